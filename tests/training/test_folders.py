"""Run folders that two want, that a kill has cut short, or whose files are damaged: one sentence, and nothing lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import snarenet as sn
from snarenet.report.page import write_report
from snarenet.training import lock
from snarenet.training.folder import Folder
from snarenet.training.lock import hold

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
CONFIG = sn.TrainConfig(
    epochs=3, batch=25, width=8, validate_every=1, checkpoint_seconds=0.0, average=0.5, relaxation="adarel"
)
CONFIG_FILE, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.safetensors"
MODEL, EVALUATION, INSTANCES = "model.safetensors", "evaluation.json", "evaluation.npz"


def fit(out: Path, resume: Path | None = None, quiet: bool = True, epochs: int = 3) -> sn.Run:
    family, config = sn.problems.load("nclp", **SIZES), CONFIG.replace(epochs=epochs)
    return sn.Trainer(config, out, quiet=quiet).fit(config.build(family), family, resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained and evaluated."""
    run = fit(tmp_path_factory.mktemp("whole"))
    family = run.load_problem()
    run.save_evaluation(*sn.evaluate(run.load_model(family), family, timed=False))
    return run.path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def assert_same_tensors(file: Path, other: Path) -> None:
    mine, theirs = load_file(file), load_file(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def is_tidy(folder: Path) -> bool:
    """Is there neither a lock nor a file that was being written?"""
    return not [file.name for file in folder.iterdir() if file.name.startswith(".")]


class TestLock:
    def test_one_training_at_a_time(self, folder: Path) -> None:
        with hold(folder), pytest.raises(sn.RunError, match=rf"in use by process {os.getpid()} on .*: wait until that"):
            fit(folder, resume=folder)
        fit(folder, resume=folder)
        assert is_tidy(folder)

    def test_a_new_folder(self, tmp_path: Path) -> None:
        with hold(tmp_path), pytest.raises(sn.RunError, match="in use by process"):
            fit(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_stacked_seeds(self, tmp_path: Path) -> None:
        family, trainer = sn.problems.load("nclp", **SIZES), sn.Trainer(CONFIG, tmp_path, quiet=True)
        (tmp_path / "seed1").mkdir()
        with hold(tmp_path / "seed1"), pytest.raises(sn.RunError, match=r"seed1 is in use by process"):
            trainer.fit_seeds([0, 1], family)
        assert is_tidy(tmp_path / "seed0")
        assert not sn.Run.exists(tmp_path / "seed0")

    def test_a_kill_ends_it(self, tmp_path: Path) -> None:
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            with hold(tmp_path):
                os.write(told, b"!")
                time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        with pytest.raises(sn.RunError, match=rf"in use by process {child} on"), hold(tmp_path):
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with hold(tmp_path):
            assert (tmp_path / ".lock").exists()
        assert is_tidy(tmp_path)

    def test_a_lock_file_that_its_holder_removes_is_no_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Opened before the removal, locked after it: the next one would see no lock."""
        real, calls = os.open, []

        def slow(path: Any, *args: Any) -> int:
            handle = real(path, *args)
            calls.append(path)
            if len(calls) == 1:
                Path(path).unlink()
            return handle

        monkeypatch.setattr(os, "open", slow)
        with hold(tmp_path):
            assert len(calls) == 2
            assert (tmp_path / ".lock").exists()

    def test_where_there_are_no_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock, "fcntl", None)
        with pytest.warns(UserWarning, match="cannot be locked .*this system has no flock"), hold(tmp_path):
            pass

    @pytest.mark.slow
    def test_only_the_leader_locks(self, tmp_path: Path) -> None:
        """Two processes of torchrun on a folder, and a run that was cut off before its first checkpoint."""
        family = sn.problems.load("nclp", **SIZES)
        sn.Run.create(tmp_path / "run", CONFIG, family)
        script = tmp_path / "train.py"
        script.write_text(f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
from pathlib import Path
import test_folders as t
t.fit(Path({str(tmp_path / "run")!r}), resume=Path({str(tmp_path / "run")!r}))
""")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(sn.Run.open(tmp_path / "run").metrics()) == 3
        assert is_tidy(tmp_path / "run")


class TestBeginsAnew:
    def test_without_a_checkpoint(self, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sn.Run.create(tmp_path, CONFIG, sn.problems.load("nclp", **SIZES))
        (tmp_path / ".checkpoint.safetensors.abc.new").write_bytes(b"cut off")
        run = fit(tmp_path, resume=tmp_path, quiet=False)
        assert "was stopped before its first checkpoint, and begins anew" in capsys.readouterr().err
        assert_same_tensors(run.path / MODEL, whole / MODEL)
        assert is_tidy(tmp_path)

    def test_without_any_file(self, whole: Path, tmp_path: Path) -> None:
        (tmp_path / ".config.json.abc.new").write_bytes(b"cut off")
        assert_same_tensors(fit(tmp_path, resume=tmp_path).path / MODEL, whole / MODEL)

    def test_not_in_a_folder_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("")
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(sn.RunError, match=r"holds no run: it has no config\.json"):
                fit(path, resume=path)
        assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_of_a_gpu_goes_on_here(folder: Path) -> None:
    """Its random numbers cannot: a generator there has another state."""
    tensors, state = Folder(folder).read_tensors(CHECKPOINT)
    tensors |= {name: torch.zeros(16, dtype=torch.uint8) for name in ("generator", "random_cuda")}
    Folder(folder).write_tensors(CHECKPOINT, tensors, state | {"epoch": 2})
    for name in (MODEL, EVALUATION, INSTANCES):
        (folder / name).unlink(missing_ok=True)
    run = fit(folder, resume=folder)
    assert [line["epoch"] for line in run.metrics()] == [1, 2, 3]
    assert (folder / MODEL).exists()


Mutate = Callable[[Path], object]


def text(content: str) -> Mutate:
    return lambda file: file.write_text(content)


def raw(content: bytes) -> Mutate:
    return lambda file: file.write_bytes(content)


def cut(share: float) -> Mutate:
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def flip(place: float) -> Mutate:
    """Flip the lowest bit of the byte at this share of the file."""

    def mutate(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return mutate


def with_json(**changes: Any) -> Mutate:
    """Change parts of a JSON file; `a__b` is b in a."""

    def mutate(file: Path) -> None:
        content = json.loads(file.read_text())
        for name, value in changes.items():
            *path, last = name.split("__")
            part = content
            for key in path:
                part = part[key]
            part[last] = value
        file.write_text(json.dumps(content))

    return mutate


def with_tensors(change: Callable[[dict[str, Tensor], dict[str, Any]], object], state: str | None = None) -> Mutate:
    """Change tensors and state; the file is well-formed and its checksum right."""

    def mutate(file: Path) -> None:
        tensors, header = Folder(file.parent).read_tensors(file.name)
        change(tensors, header)
        if state is None:
            Folder(file.parent).write_tensors(file.name, tensors, header)
        else:
            save_file(tensors, file, {"state": state})

    return mutate


def without(start: str) -> Mutate:
    def change(tensors: dict[str, Tensor], _: object) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return with_tensors(change)


def misshaped(name: str) -> Mutate:
    return with_tensors(lambda tensors, _: tensors.update({name: tensors[name].new_zeros(7, 3)}))


def with_state(**changes: Any) -> Mutate:
    return with_tensors(lambda _, state: state.update(changes))


def with_line(number: int, line: str) -> Mutate:
    def mutate(file: Path) -> None:
        lines = file.read_text().splitlines()
        lines[number] = line
        file.write_text("\n".join(lines) + "\n")

    return mutate


def with_arrays(**arrays: np.ndarray) -> Mutate:
    return lambda file: np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


BAD: list[tuple[str, str, Mutate]] = [
    (CONFIG_FILE, "empty", text("")),
    (CONFIG_FILE, "cut", cut(0.5)),
    (CONFIG_FILE, "a number", text("5")),
    (CONFIG_FILE, "a list", text("[]")),
    (CONFIG_FILE, "deep", text("[" * 100_000)),
    (CONFIG_FILE, "not text", raw(b"\xff\xfe\x00")),
    (CONFIG_FILE, "a folder", folder_instead),
    (CONFIG_FILE, "no problem", text('{"config": {}}')),
    (CONFIG_FILE, "problem: null", with_json(problem=None)),
    (CONFIG_FILE, "problem: []", with_json(problem=[])),
    (CONFIG_FILE, "config: null", with_json(config=None)),
    (CONFIG_FILE, "config: 5", with_json(config=5)),
    (CONFIG_FILE, "sizes: null", with_json(problem__sizes=None)),
    (CONFIG_FILE, "sizes: []", with_json(problem__sizes=[])),
    (CONFIG_FILE, "sizes: sise", with_json(problem__sizes={"sise": 5})),
    (CONFIG_FILE, "size: text", with_json(problem__sizes={"size": "8"})),
    (CONFIG_FILE, "size: 0", with_json(problem__sizes={"size": 0})),
    (CONFIG_FILE, "size: 1e40", with_json(problem__sizes={"size": 10**40})),
    (CONFIG_FILE, "name: []", with_json(problem__name=[])),
    (CONFIG_FILE, "name: nclq", with_json(problem__name="nclq")),
    (CONFIG_FILE, "fingerprint: 5", with_json(problem__fingerprint=5)),
    (CONFIG_FILE, "data: null", with_json(problem__data=None)),
    (CONFIG_FILE, "data: []", with_json(problem__data=[])),
    (CONFIG_FILE, "data: a tensor is a number", with_json(**{"problem__data__NCLP.inputs": 5})),
    (CONFIG_FILE, "data: entries are null", with_json(**{"problem__data__NCLP.inputs__entries": None})),
    (CONFIG_FILE, "data: a number is missing", with_json(**{"problem__data__NCLP.inputs": {"entries": 6000}})),
    (CONFIG_FILE, "data: a tensor is null", with_json(**{"problem__data__NCLP.inputs": None})),
    (CONFIG_FILE, "data: entries are text", with_json(**{"problem__data__NCLP.inputs__entries": "many"})),
    (CONFIG_FILE, "width: 64.0", with_json(config__width=64.0)),
    (CONFIG_FILE, "width: 1e40", with_json(config__width=10**40)),
    (CONFIG_FILE, "epochs: null", with_json(config__epochs=None)),
    (CONFIG_FILE, "method: []", with_json(config__method=[])),
    (METRICS, "a line [1]", with_line(1, "[1]")),
    (METRICS, "a line null", with_line(1, "null")),
    (METRICS, "a line cut off in the middle", with_line(1, '{"epoch": 2, "lo')),
    (METRICS, "no epoch", with_line(2, '{"loss": 2.0}')),
    (METRICS, "epoch: text", with_line(2, '{"epoch": "3"}')),
    (METRICS, "loss: []", with_line(0, '{"epoch": 1, "loss": []}')),
    (METRICS, "valid: 5", with_line(0, '{"epoch": 1, "valid": 5}')),
    (METRICS, "a number too large", with_line(0, f'{{"epoch": 1, "loss": {10**400}}}')),
    (METRICS, "not text", raw(b"\xff\xfe\x00\n")),
    (METRICS, "a folder", folder_instead),
    (CHECKPOINT, "empty", raw(b"")),
    (CHECKPOINT, "cut", cut(0.9)),
    (CHECKPOINT, "zeros", lambda file: file.write_bytes(bytes(file.stat().st_size))),
    (CHECKPOINT, "a folder", folder_instead),
    *((CHECKPOINT, f"a bit at {place}", flip(place)) for place in (0.3, 0.5, 0.8, 1.0)),
    (CHECKPOINT, "state: 5", with_tensors(lambda *_: None, "5")),
    (CHECKPOINT, "no state", lambda file: save_file(load_file(file), file)),
    (CHECKPOINT, "no tensors", without("")),
    (CHECKPOINT, "no model", without("model.")),
    (CHECKPOINT, "no average", without("average.")),
    (CHECKPOINT, "no best", without("best.")),
    (CHECKPOINT, "no optimizer", without("optimizer.")),
    (CHECKPOINT, "half an optimizer", without("optimizer.0.0.exp_avg")),
    (CHECKPOINT, "no generator", without("generator")),
    (CHECKPOINT, "no relaxation", without("relaxation")),
    *((CHECKPOINT, f"misshaped {name}", misshaped(name)) for name in ("model.net.0.weight", "best.net.0.weight")),
    *((CHECKPOINT, f"misshaped {name}", misshaped(name)) for name in ("generator", "random", "relaxation", "averaged")),
    (CHECKPOINT, "misshaped optimizer", misshaped("optimizer.0.0.exp_avg")),
    (CHECKPOINT, "epoch: text", with_state(epoch="3")),
    (CHECKPOINT, "epoch: null", with_state(epoch=None)),
    (CHECKPOINT, "best: 5", with_state(best=5)),
    (CHECKPOINT, "best: {}", with_state(best={})),
    (MODEL, "empty", raw(b"")),
    (MODEL, "cut", cut(0.5)),
    *((MODEL, f"a bit at {place}", flip(place)) for place in (0.6, 0.9, 1.0)),
    (MODEL, "no weights", without("net.")),
    (MODEL, "misshaped", misshaped("net.0.weight")),
    (MODEL, "epoch: text", with_state(epoch="3")),
    (MODEL, "best: []", with_state(best=[])),
    (EVALUATION, "empty", text("")),
    (EVALUATION, "5", text("5")),
    (EVALUATION, "gap: 5", with_json(gap=5)),
    (EVALUATION, "feasible: names", with_json(feasible={"tight": 1.0})),
    (EVALUATION, "steps: {median: text}", with_json(steps={"median": "3"})),
    (EVALUATION, "tol: text", with_json(tol="1e-8")),
    (EVALUATION, "seconds: []", with_json(seconds=[])),
    (INSTANCES, "empty", raw(b"")),
    (INSTANCES, "cut", cut(0.5)),
    (INSTANCES, "a bit", flip(0.1)),
    (INSTANCES, "something else", raw(b"PK\x03\x04 something else")),
    (INSTANCES, "words", with_arrays(gap=np.array(["a", "b"]))),
    (INSTANCES, "axes", with_arrays(violation=np.zeros((2, 2)))),
    (INSTANCES, "trajectory", with_arrays(trajectory=np.zeros((2, 2, 1)))),
    (INSTANCES, "pickled", with_arrays(gap=np.array([{}, None], dtype=object))),
    ("environment.json", "a list", text("[1]")),
]


def uses(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What can be done with a run folder."""
    yield "load", lambda: sn.load_model(folder)
    yield "load the last", lambda: sn.load_model(folder, keep="last")
    yield "kept", lambda: sn.Run.open(folder).kept()
    yield "resume", lambda: fit(folder, resume=folder)
    yield "report", lambda: write_report(folder)


def sentence_of(call: Callable[[], object]) -> str:
    """What a call is refused with; "" if it is not."""
    try:
        call()
    except sn.RunError as error:
        return str(error)
    return ""


READERS = {
    CONFIG_FILE: {"load", "load the last", "resume"},
    METRICS: {"resume", "report"},
    CHECKPOINT: {"resume"},
    MODEL: {"load"},
    EVALUATION: {"report"},
    INSTANCES: {"report"},
    "environment.json": {"report"},
}


@pytest.mark.parametrize(("name", "mutate"), [pytest.param(n, m, id=f"{n}: {what}") for n, what, m in BAD])
def test_a_bad_file_is_named_in_a_sentence(folder: Path, name: str, mutate: Mutate) -> None:
    mutate(folder / name)
    asked = READERS[name] | ({"kept"} if name == MODEL else set())
    told = {use: said for use, call in uses(folder) if use in asked and (said := sentence_of(call))}
    assert all(str(folder / name) in said and "\n" not in said for said in told.values()), told
    assert told, "nobody noticed"
    if name not in (CONFIG_FILE, MODEL):
        assert told.keys() == asked


def test_a_checksum_of_every_tensor(folder: Path) -> None:
    for name in (MODEL, CHECKPOINT):
        with safe_open(folder / name, "pt") as file:
            assert len(file.metadata()["sha256"]) == 64


def test_files_without_a_checksum_still_load(folder: Path, whole: Path) -> None:
    for name in (MODEL, CHECKPOINT):
        tensors, state = Folder(folder).read_tensors(name)
        save_file(tensors, folder / name, {"state": json.dumps(state)})
    x = sn.problems.load("nclp", **SIZES).split("test")
    assert torch.equal(sn.load_model(folder)(x), sn.load_model(whole)(x))
    fit(folder, resume=folder)


def with_another_type(value: Any, draw: random.Random) -> Any:
    """A JSON value with one of its parts, at random, made something else."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not inside or draw.random() < 0.1:
        return draw.choice([None, [], {}, "text", True, -1, 0.5, [value]])
    key = draw.choice(list(inside))
    value[key] = with_another_type(value[key], draw)
    return value


def corrupt(file: Path, draw: random.Random) -> str:
    """Damage a file at random; what was done to it."""
    content = bytearray(file.read_bytes())
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    kinds = ["flip", "flips", "cut", "zero", "swap", "noise"]
    kind = draw.choice(kinds + 3 * ["type"] if file.suffix in (".json", ".jsonl") else kinds)
    if kind == "type":
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(with_another_type(json.loads(lines[place]), draw))
        content = bytearray("\n".join(lines).encode() + b"\n")
    elif kind.startswith("flip"):
        for _ in range(1 if kind == "flip" else 8):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[a:]
    elif kind == "zero":
        content[a:b] = bytes(b - a)
    elif kind == "swap":
        middle = (a + b) // 2
        content[a:b] = content[middle:b] + content[a:middle]
    else:
        content[a : a + 16] = draw.randbytes(16)
    file.write_bytes(content)
    return f"{kind} {file.name} {a} {b}"


@pytest.mark.slow
def test_no_corruption_ends_in_a_traceback(whole: Path, tmp_path: Path) -> None:
    """200 damaged files: each use ends in a sentence, or is right; weights are those that were saved, or refused."""
    draw, x = random.Random(16), sn.problems.load("nclp", **SIZES).split("test")
    expected = sn.load_model(whole)(x)
    names = [CONFIG_FILE, METRICS, CHECKPOINT, MODEL, EVALUATION, INSTANCES]
    refused = 0
    for k in range(200):
        folder = Path(shutil.copytree(whole, tmp_path / str(k)))
        name = names[k % len(names)]
        done = corrupt(folder / name, draw)
        changed = (folder / name).read_bytes() != (whole / name).read_bytes()
        for use, call in uses(folder):
            if use not in READERS[name]:
                continue
            try:
                found = call()
            except sn.RunError:
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"{k}, {done}, {use}: {error!r}") from error
            if use == "load" and name == MODEL:
                assert isinstance(found, sn.ConstrainedModel)
                assert torch.equal(found(x), expected), (k, done)
            if use == "resume" and name == CHECKPOINT and changed:
                assert_same_tensors(folder / MODEL, whole / MODEL)
        shutil.rmtree(folder)
    assert refused > 150  # most are noticed; the others changed a number in a text file, or nothing


TRIALS, EPOCHS = 50, 8  # every other trial ends at another of some thirty uses of a file, the rest at any moment


def train_until(folder: Path, most: int, seconds: float | None = None) -> int:
    """Train in a process of its own that is killed at its use number `most` of a file in the folder; how many.

    Or killed after so many seconds, wherever that is.
    """
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        uses = 0

        def count(event: str, given: tuple) -> None:
            nonlocal uses
            if any(str(folder) in str(one) for one in given):
                uses += 1
                if uses == most:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        fit(folder, epochs=EPOCHS)
        os.write(told, bytes([uses]))
        os._exit(0)
    os.close(told)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if most else 0) or seconds is not None
    found = os.read(ready, 1)
    os.close(ready)
    return found[0] if found else most


def kill_trainings(out: Path) -> None:
    """One training to its end, and others that are killed, each at another place."""
    torch.set_num_threads(1)  # as in the process that goes on with them
    began, draw = time.monotonic(), random.Random(16)
    uses = train_until(out / "whole", 0)
    took = time.monotonic() - began
    assert TRIALS // 2 < uses < 256
    for k in range(0, TRIALS, 2):
        train_until(out / str(k), 1 + k * uses // TRIALS)
        train_until(out / str(k + 1), 0, draw.uniform(0, took))


@pytest.mark.slow
def test_killed_trainings_go_on_bit_for_bit(tmp_path: Path) -> None:
    """50 trainings, killed at what they write and at random moments, resumed, and compared with a whole one.

    They fork from a process that has never differentiated: PyTorch forbids it after that.
    """
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_folders as t
t.kill_trainings(t.Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
    whole = sn.Run.open(tmp_path / "whole")
    for k in range(TRIALS):
        folder = tmp_path / str(k)
        run = fit(folder, resume=folder if folder.exists() else None, epochs=EPOCHS)
        for name in (MODEL, CHECKPOINT):
            assert_same_tensors(folder / name, whole.path / name)
        assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in whole.metrics()]
        assert is_tidy(folder)
