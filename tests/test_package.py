"""The package as a whole: what importing it does, the command line, and who imports whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import snarenet as sn
from snarenet.cli import main

ROOT = Path(__file__).parents[1]


def python(code: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, *options, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout


def test_import_changes_no_global_state_and_needs_no_extra() -> None:
    """Neither dtype, threads, grad mode nor random numbers change, and a machine without rich and tyro will do."""
    python("""
import sys
for missing in ("rich", "tyro", "matplotlib", "scipy", "casadi", "safetensors"):
    sys.modules[missing] = None
import random, numpy, torch
def state():
    return (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
before = state()
import snarenet
assert state() == before
""")


def test_public_names_exist() -> None:
    assert [name for name in sn.__all__ if not hasattr(sn, name)] == []
    assert sn.__version__[0].isdigit()


def test_import_layers() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_demo_prints_a_table_and_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--instances", "30", "--out", str(tmp_path / "deep" / "er")])
    printed = capsys.readouterr().out
    assert "two disks" in printed
    assert "NCLP" in printed
    figure = tmp_path / "deep" / "er" / "two_disks.png"
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_demo_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["demo", "--instances", "5", "--out", str(tmp_path)])
    assert "snarenet[plots]" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_unknown_commands_and_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["dmo"], ["demo", "--instancs", "3"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
    assert "instances" in capsys.readouterr().err


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "snarenet", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
