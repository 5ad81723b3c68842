"""The package builds with its native module where there is a compiler, and installs without one."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import multihead
from multihead import kernel

ROOT = Path(__file__).parent.parent


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """A wheel of a copy of the project, made in tmp_path/out with the build tools that are installed."""
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    for name in ("src", "native"):
        shutil.copytree(
            ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True
        )
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
    environment = os.environ | {"MULTIHEAD_REQUIRE_NATIVE": ""} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def wheel(tmp_path: Path, **environment: str) -> zipfile.ZipFile:
    built = build(tmp_path, **environment)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = (tmp_path / "out").glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_native_module_was_built_here() -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert kernel.module is not None, kernel.missing
    features = kernel.cpu_features()
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
    told = info_without_the_core(tmp_path, PATH=str(tools), CXX="", CC="")
    assert "not built: no C++ compiler that works was found" in told


def info_without_the_core(tmp_path: Path, **environment: str) -> str:
    """What `multihead info` says of the wheel that is built so, which works and has no core."""
    with wheel(tmp_path, **environment) as built:
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
        "q = torch.randn(1, 1, 2, 4)\n"
        "assert mh.explain(q, q, q).reasons['native'].startswith('refuses: the native module is not built: ')\n"
        "from multihead.cli import app; app(['info'])"
    )
    environment = os.environ | {"COLUMNS": "400"}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert told.returncode == 0, told.stderr
    assert "circular import" not in told.stdout
    return told.stdout


def compiler_that_cannot(tmp_path: Path) -> str:
    """One that passes CMake's own trials, and refuses the core."""
    real = shutil.which("c++") or shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler on this machine")
    script = tmp_path / "old-c++"
    refusal = 'lanes.h:1:2: error: "__builtin_shufflevector" was not declared \\\\ here'
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *native/*|*nanobind/src/*) echo \'{refusal}\' >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def test_a_compiler_that_cannot_compile_the_core_is_no_obstacle(tmp_path: Path) -> None:
    told = info_without_the_core(tmp_path, CXX=compiler_that_cannot(tmp_path))
    assert "cannot compile it (GCC 12 or newer can): " in told
    assert 'lanes.h:1:2: error: "__builtin_shufflevector" was not declared' in told


def test_it_is_an_error_where_the_core_is_required(tmp_path: Path) -> None:
    compiler = compiler_that_cannot(tmp_path)
    for _ in range(2):  # the second time in the folder of the first, where CMake remembers things
        built = build(tmp_path, CXX=compiler, MULTIHEAD_REQUIRE_NATIVE="1")
        assert built.returncode != 0
        assert "MULTIHEAD_REQUIRE_NATIVE is set" in built.stdout + built.stderr
        assert "no Python headers" not in built.stdout + built.stderr


def test_a_compiler_that_refuses_everything_is_no_obstacle(tmp_path: Path) -> None:
    refuses = tmp_path / "no-c++"
    refuses.write_text("#!/bin/sh\nexit 1\n")
    refuses.chmod(0o755)
    assert "no C++ compiler that works was found" in info_without_the_core(tmp_path, CXX=str(refuses))


def test_what_is_compiled_for_is_asked_for() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    assert set(re.findall(r"(?<=[ (])-m[a-z0-9.-]+", text)) == {
        "-mprefer-vector-width",
        "-march",
    }, "other flags come from the lists; ARM's bf16 is a part of an architecture to the compiler"
    features = dict(re.findall(r"set\((avx\w+)_features ([^)]*)\)", text))
    needs = {"avx2": features["avx2"].split()}
    needs["avx512"] = features["avx512"].replace("${avx2_features}", features["avx2"]).split()
    needs["avx512_vnni"] = features["avx512_vnni"].replace("${avx512_features}", " ".join(needs["avx512"])).split()
    needs["avx512_bf16"] = (
        features["avx512_bf16"].replace("${avx512_vnni_features}", " ".join(needs["avx512_vnni"])).split()
    )
    assert {"avx2", "fma", "f16c"} <= set(needs["avx2"]) < set(needs["avx512"])
    if kernel.module is None or "avx2" not in kernel.cpu_features():
        pytest.skip("no native module for x86 here")
    known = set(kernel.cpu_features())
    assert kernel.module.instruction_sets([]) == ["portable"]
    assert kernel.module.instruction_sets(known) == ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
    for isa, needed in needs.items():
        assert set(needed) <= known, "features.cpp knows each"
        for feature in needed:
            assert isa not in kernel.module.instruction_sets(known - {feature}), feature


def compiler_in_haste(tmp_path: Path) -> str:
    """The compiler of this machine, asked for no speed: with it the core takes two minutes to build."""
    real = shutil.which("c++") or shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler on this machine")
    script = tmp_path / "quick-c++"
    script.write_text(f'#!/bin/sh\nexec {real} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


def test_with_a_compiler_the_wheel_holds_the_native_module(tmp_path: Path) -> None:
    with wheel(tmp_path, CXX=compiler_in_haste(tmp_path), MULTIHEAD_REQUIRE_NATIVE="1") as built:
        assert [name for name in built.namelist() if name.startswith("multihead/_native.") and name.endswith(".so")]


def test_the_version_is_that_of_the_project() -> None:
    assert f'version = "{multihead.__version__}"' in (ROOT / "pyproject.toml").read_text()
    dated = rf"^## {re.escape(multihead.__version__)} — \d{{4}}-\d\d-\d\d$"
    assert re.search(dated, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
