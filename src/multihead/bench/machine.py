"""Where and with what a run was made: without this a figure means nothing."""

import os
import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

TOLD_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512", "avx_vnni", "amx", "asimd", "sve", "bf16")  # prefixes
PACKAGES = ("multihead", "torch", "onnx", "onnxruntime", "openvino", "transformers", "zentorch", "numpy")

LIMIT = "ONEDNN_MAX_CPU_ISA"
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def limit_onednn():
    """Start again with oneDNN held to AVX-512 where its AMX kernels die: virtual machines hide what they ask for.

    The limit counts only where it is set before torch is imported, so that this does not return then.
    """
    if LIMIT in os.environ or not any(flag.startswith("amx") for flag in cpu()[1]):
        return
    if subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True).returncode == -signal.SIGILL:
        os.environ[LIMIT] = "AVX512_CORE_FP16"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def describe(threads, backend):
    """A flat dictionary, in the order it is to be read."""
    name, flags = cpu()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "CPU": name,
        "cores": str(os.cpu_count()),
        "flags": " ".join(flags),
        "system": f"{platform.system()} {platform.machine()}",
        "load average at the start": load,
        "threads": str(threads),
        "backend": backend or "default",
        LIMIT: os.environ.get(LIMIT, "not set"),
        "versions": ", ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in PACKAGES)]),
        "torch CPU capability": torch.backends.cpu.get_cpu_capability(),
    }


def cpu(cpuinfo="/proc/cpuinfo"):
    """Name and the flags that decide which kernels can run."""
    fields = {}
    if os.path.exists(cpuinfo):
        for line in Path(cpuinfo).read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return fields.get("model name") or platform.processor() or "unknown", [f for f in flags if f.startswith(TOLD_FLAGS)]


def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit():
    """The commit measured, marked where the tree differs from it."""
    here = Path(__file__).parent

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel"), "src", "multihead").resolve() != here.parent.resolve():
            return "unknown"  # installed, perhaps in a folder of somebody else's repository
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
