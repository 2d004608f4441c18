"""The package as a whole: what importing it does, the command line, and who imports whom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import snarenet as sn

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
(VERSION,) = re.findall(r'^version = "(.*)"', PROJECT, re.M)


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


def test_import_takes_little_beyond_torch() -> None:
    """No package but torch and numpy is loaded, and nothing of torch that it does not load by itself."""
    python("""
import sys
import numpy.typing, torch
before = set(sys.modules)
assert "torch._dynamo" not in before
import snarenet
free = {"snarenet", *sys.stdlib_module_names}
loaded = sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in free)
assert loaded == [], loaded
""")


def test_public_names_exist() -> None:
    assert [name for name in sn.__all__ if not hasattr(sn, name)] == []
    assert sn.__version__[0].isdigit()


def test_import_layers() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "snarenet", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_the_library_imports_nothing_of_its_lab() -> None:
    """No module of it, not even where one is imported late."""
    python("""
import importlib, pkgutil, sys
sys.modules["snarenet_lab"] = None
import snarenet
for module in pkgutil.walk_packages(snarenet.__path__, "snarenet."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
""")
    sources = (ROOT / "src").rglob("*.py")
    assert [file.name for file in sources if "snarenet_lab" in file.read_text()] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of this tree."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], check=True, cwd=ROOT)
    return out


def files(folder: str) -> set[str]:
    """All that belongs to the project in this folder, as paths from the root."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if not {"__pycache__", ".cache"} & set(path.parts)}


def test_the_wheel_is_the_library(built: Path) -> None:
    """With its types, its kernels, the script and style of a report, and nothing else."""
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in files("src")}
    assert {Path(name).suffix for name in names} == {".cpp", ".py", ".typed", ".cu", ".cuh", ".js", ".css"}


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_installs_in_a_clean_environment(built: Path, tmp_path: Path, kind: str) -> None:
    """Wheel and source distribution alike: the library imports, knows its version, and has its command."""
    (archive,) = built.glob(kind)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "-w", str(tmp_path), str(archive)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clean)], check=True)
    subprocess.run([*pip, "--python", str(clean / "bin/python"), "install", *offline, str(wheel)], check=True)
    (site,) = clean.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():  # torch and all others, but nothing of ours
        if "snarenet" not in entry.name and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        options: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "cwd": tmp_path, "env": outside}
        return subprocess.run([str(clean / "bin" / command[0]), *command[1:]], **options).stdout

    where, version = output("python", "-c", "import snarenet as sn; print(sn.__file__, sn.__version__)").split()
    assert Path(where) == site / "snarenet" / "__init__.py"
    assert version == VERSION
    assert "snarenet train nclp" in output("snarenet", "--help")


def test_one_version() -> None:
    """That of the library is also that of its lab, of the citation and of the newest changes."""
    lab = (ROOT / "lab" / "pyproject.toml").read_text()
    assert f'\nversion = "{VERSION}"\n' in lab
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == VERSION


def test_the_supported_versions_are_those_of_make() -> None:
    """`make test-versions` runs those that the metadata name."""
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    (tested,) = re.findall(r"^VERSIONS \?= (.*)", (ROOT / "Makefile").read_text(), re.M)
    assert tested.split() == named
    assert f'requires-python = ">={named[0]}"' in PROJECT


@pytest.mark.slow
def test_the_source_distribution_passes_its_own_tests(built: Path, tmp_path: Path) -> None:
    """It has all that the suites of library and lab read: documents, settings, stored runs, the lab."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    top = {".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"}
    top |= {"CITATION.cff", "conftest.py", "pins.txt", "pyproject.toml"}
    expected = top.union(*(files(part) for part in ("src", "tests", "lab", "docs", "examples", ".ci")))
    assert names - {"PKG-INFO", ".gitignore"} == expected  # these two are hatchling's own
    some = [
        "tests/test_docs.py",
        "tests/test_package.py",
        "tests/test_damping.py",
        "tests/testing",
        "lab/tests/test_pages.py",
    ]
    some += ["tests/training/test_training.py", "lab/tests/test_commands.py", "tests/repair/gpu"]
    path = os.pathsep.join([str(folder / "src"), str(folder / "lab" / "src")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
