"""The package builds with its native module where there is a compiler, and installs without one."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import multihead
from multihead import native

ROOT = Path(__file__).parent.parent


def wheel(tmp_path: Path, **environment: str) -> zipfile.ZipFile:
    """A wheel built from a copy of the project, with the build tools that are installed."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        tmp_path / "out",
        project,
    ]
    built = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = (tmp_path / "out").glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_native_module_was_built_here() -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert native.module is not None, native.missing
    features = native.cpu_features()
    assert features
    assert all(isinstance(there, bool) for there in features.values())
    flags = Path("/proc/cpuinfo")
    if flags.exists() and "avx2" in features:
        line = next((line for line in flags.read_text().splitlines() if line.startswith("flags")), "")
        for name in ("avx2", "fma", "f16c", "avx512f", "avx512bw", "amx_bf16"):
            assert features[name] == (f" {name}" in line.split(":")[1] + " "), name


def test_without_a_compiler_it_installs_and_says_so(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert found, f"{name} is part of the dev extra"
        (tools / name).symlink_to(found)
    with wheel(tmp_path, PATH=str(tools), CXX="", CC="") as built:
        names = built.namelist()
        assert not [name for name in names if name.endswith((".so", ".pyd"))]
        assert "multihead/py.typed" in names
        built.extractall(tmp_path / "installed")
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__ and 'ScikitBuild' not in type(f).__name__]\n"
        f"sys.path.insert(0, {str(tmp_path / 'installed')!r})\n"
        "import torch, multihead as mh\n"
        f"assert mh.__file__.startswith({str(tmp_path)!r}), mh.__file__\n"
        "assert mh.MultiHeadAttention(8, heads=2)(torch.randn(3, 8)).shape == (3, 8)\n"
        "from multihead.cli import app; app(['info'])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert "not built" in told.stdout


def test_with_a_compiler_the_wheel_holds_the_native_module(tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler on this machine")
    with wheel(tmp_path) as built:
        assert [name for name in built.namelist() if name.startswith("multihead/_native.") and name.endswith(".so")]


def test_the_version_is_that_of_the_project() -> None:
    assert f'version = "{multihead.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert (
        f"## {multihead.__version__}" in (ROOT / "CHANGELOG.md").read_text()
        or "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    )
