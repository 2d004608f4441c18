"""The lab as a package: its commands in `snarenet`, its layers, and what it needs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snarenet import cli
from snarenet_lab.experiments.reproduce import reproduce

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)


def test_commands_appear(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "train", *cli.LAB))
    assert "not installed" not in printed


@pytest.mark.parametrize("command", cli.LAB)
def test_each_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    examples, options = printed.split("Examples:\n")[1].split("\n\n", 1)
    assert all(line.startswith(f"    snarenet {command} ") for line in examples.splitlines())
    assert [word for word in examples.split() if word.startswith("--") and word not in options] == []
    assert len(printed.splitlines()) <= 50


def test_a_mistake_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, sentence in {
        ("compare", "nclq"): "did you mean 'nclp'?",
        ("bench", "speed", "--device", "cpu"): "`item` must be all or one of repair,",
        ("reproduce", "nlcp", "--device", "cpu"): "`items` must be some of all, nclp,",
        ("report", str(tmp_path)): "holds no run, and no results of `snarenet reproduce`",
    }.items():
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        assert stop.value.code == 1
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_import_layers() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(str(ROOT / "lab" / "pyproject.toml"), no_cache=True) == 0


@pytest.mark.parametrize(
    "module", ["snarenet_lab.bench", pytest.param("snarenet_lab.experiments", marks=pytest.mark.slow)]
)
def test_where_nothing_is_installed(module: str, tmp_path: Path) -> None:
    """From a source tree, with torch and numpy, but without rich, tyro and entry points."""
    hidden = "\n".join(f"sys.modules[{name!r}] = None" for name in ("rich", "tyro", "matplotlib", "scipy", "casadi"))
    script = f"import runpy, sys\n{hidden}\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    where = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab" / "src")])
    arguments = {
        "snarenet_lab.bench": ["matrix_free", "--set", "cases", "waves", "size", "30", "rows", "5"],
        "snarenet_lab.experiments": ["theory", "--seeds", "1", "--engine", "none"],
    }[module]
    done = python("-c", script, *arguments, "--device", "cpu", "--out", str(tmp_path), PYTHONPATH=where)
    assert done.returncode == 0, done.stderr
    assert "| waves | 5 x 30 |" in done.stdout or "theory: 0 of 0 runs" in done.stdout


def test_a_reproduction_without_tyro_has_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from snarenet_lab.experiments import __main__ as module

    called: dict[str, object] = {}
    monkeypatch.setattr(module, "reproduce", lambda **given: called.update(given) or [])
    monkeypatch.setattr(sys, "argv", ["experiments", "qcqp", "--only", "DC3", "SnareNet*", "--share", "0.5"])
    module.main()
    assert called["items"] == ["qcqp"]
    assert called["only"] == ["DC3", "SnareNet*"]
    assert called["share"] == 0.5
    assert set(called) == set(inspect.signature(reproduce).parameters) - {"quiet"}
