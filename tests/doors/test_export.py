"""Models that were exported run where snarenet is not installed, and give the same numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import snarenet as sn
from snarenet.testing import draw

PAGE = (Path(__file__).parents[2] / "docs/doors/export.md").read_text()
PACKAGES = Path(torch.__file__).parents[1]


def blocks(kind: str) -> list[str]:
    """The code of the page, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with all installed packages but snarenet."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for entry in PACKAGES.iterdir():
        if "snarenet" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def run_without_snarenet(code: str, packages: Path, cwd: Path) -> str:
    """What a Python process prints that has these packages alone."""
    head = f"""
import sys
sys.path.insert(0, {str(packages)!r})
try:
    import snarenet
except ImportError:
    pass
else:
    sys.exit("snarenet can be imported")
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", head + code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_in_cpp(code: str, cwd: Path) -> None:
    """Compile the program and write what it prints to y.txt."""
    compiler, torch_at = shutil.which("g++"), PACKAGES / "torch"
    if compiler is None:
        pytest.skip("no C++ compiler")
    (cwd / "main.cpp").write_text(code)
    folders = [f"-I{torch_at / 'include'}", f"-L{torch_at / 'lib'}", f"-Wl,-rpath,{torch_at / 'lib'}"]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, "-std=c++20", "main.cpp", *folders, *libraries, "-o", "main"], check=True, cwd=cwd)
    (cwd / "y.txt").write_text(subprocess.run(["./main"], check=True, capture_output=True, text=True, cwd=cwd).stdout)


def model(constraints: sn.Constraints, **options) -> sn.ConstrainedModel:
    torch.manual_seed(0)
    layer = sn.SnareLayer(constraints, rescue=False, on_failure="ignore", **options)
    return sn.ConstrainedModel(sn.MLP(2, 4, width=8).double(), layer).eval()


def test_a_saved_program_runs_without_snarenet(elsewhere: Path, tmp_path: Path) -> None:
    m = model(sn.Linear(draw(2, 4, seed=1), upper=0.5), start=None, max_steps=4, damping=sn.Annealed(0.1, 0.1))
    x = draw(6, 2, seed=2)
    with torch.no_grad():
        program = torch.export.export(m, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    code = """
import torch
torch.save(torch.export.load("model.pt2").module()(torch.load("x.pt")), "y.pt")
"""
    run_without_snarenet(code, elsewhere, tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), m(x), rtol=0, atol=1e-9)


def test_an_active_set_for_batches_of_any_size() -> None:
    allowed = sn.Quadratic(torch.ones(1, 4), upper=0.01) & sn.Linear(torch.ones(1, 4), upper=0.1)
    m = model(allowed, start=sn.Nearest(8), max_steps=1)
    x, other = draw(6, 2, seed=2), draw(3, 2, seed=3)
    with torch.no_grad():
        program = torch.export.export(m, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
        found = program.module()(other)
    torch.testing.assert_close(found, m(other), rtol=0, atol=1e-9)
    assert m.layer.constraints.violation(found).max() <= 1e-8 < m.layer.constraints.violation(m.raw(other)).max()


def test_a_start_that_cannot_be_exported_warns() -> None:
    m = model(sn.Nonlinear(lambda y, x: y[:, :1] * y[:, 1:2], rows=1, upper=-0.1), max_steps=1)
    with pytest.warns(sn.RepairWarning, match="cannot be exported.*with `start=None` the two agree"), torch.no_grad():
        torch.export.export(m, (draw(6, 2, seed=2),))


def test_a_function_with_its_own_jacobian() -> None:
    """The derivative of exp, which autograd takes from its result, cannot be traced; what users give can."""
    jacobian = lambda y, x: y.exp().unsqueeze(1)  # noqa: E731
    allowed = sn.Nonlinear(lambda y, x: y.exp().sum(1, keepdim=True), rows=1, upper=2.0, jacobian=jacobian)
    m = model(allowed, start=None, max_steps=5, damping=sn.Annealed(0.1, 0.1))
    x = draw(6, 2, seed=2)
    with torch.no_grad():
        found = torch.export.export(m, (x,)).module()(x)
    torch.testing.assert_close(found, m(x), rtol=0, atol=1e-9)
    assert allowed.violation(found).max() <= 1e-8 < allowed.violation(m.raw(x)).max()


@pytest.mark.slow
def test_the_page_compiled_runs_without_snarenet(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of docs/doors/export.md: AOTInductor's in this process, the loading one where there is no snarenet."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    before, compiling, loading = blocks("python"), *blocks("py")
    for code in [block for block in before if "onnxruntime" not in block]:
        exec(code if "import os" in code else f"import os\n{code}", names)
    exec(compiling, names)
    run_without_snarenet(loading + "\ntorch.save((y, violation), 'y.pt')", elsewhere, tmp_path)
    y, violation = torch.load(tmp_path / "y.pt")
    torch.testing.assert_close(y, names["solution"].value, rtol=0, atol=1e-9)
    assert violation.max() <= 1e-8
    run_in_cpp(*blocks("cpp"), tmp_path)
    shown = [float(line) for line in (tmp_path / "y.txt").read_text().split()]
    with torch.no_grad():
        expected = names["model"](torch.full((3, 2), 1.5, dtype=torch.float64))[0]
    torch.testing.assert_close(torch.tensor(shown, dtype=torch.float64), expected, rtol=0, atol=1e-9)
