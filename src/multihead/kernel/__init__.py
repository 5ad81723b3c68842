"""The C++ core, where it was built: `module` is None where it was not, and `missing` says why."""

from importlib import import_module
from types import ModuleType


def _why_not_built() -> str:
    """What the build has written down: native/attempt.cmake."""
    try:
        return f"not built: {import_module('multihead._native_missing').reason}"
    except ModuleNotFoundError:
        return "not built: this copy of the package was not installed (pip install . builds it)"


module: ModuleType | None
missing: str

try:
    module, missing = import_module("multihead._native"), ""
except ModuleNotFoundError as error:
    module = None
    missing = _why_not_built() if error.name == "multihead._native" else f"built, but does not load: {error}"
except ImportError as error:
    module, missing = None, f"built, but does not load: {error}"


def instruction_set() -> str:
    """The build of the kernel that runs here: the one MULTIHEAD_ISA names, or the best this CPU can."""
    return module.instruction_set() if module is not None else "none"


def cpu_features() -> dict[str, bool]:
    """What this CPU can do, by name, empty where the core was not built."""
    return module.cpu_features() if module is not None else {}


def threads() -> str:
    """How the kernel deals with threads that come late, in words."""
    if module is None:
        return "none"
    adapts, alone, retreats = module.patience()
    if not adapts:
        return "always all that torch uses (MULTIHEAD_THREADS=fixed)"
    if alone:
        return f"one for now: others came late, as on a busy machine (given up {retreats} times)"
    return "all that torch uses, and one while others come late" + (f" (given up {retreats} times)" if retreats else "")


def in_pairs() -> bool:
    """Whether bfloat16 numbers are multiplied in pairs, as they lie, and not as float32."""
    return instruction_set().endswith("_bf16")


def widens_float16() -> bool:
    """Whether an instruction widens float16, and the CPU multiplies none: then torch has nothing faster."""
    return instruction_set() not in ("none", "portable") and not _MULTIPLIES_FLOAT16


_MULTIPLIES_FLOAT16 = any(cpu_features().get(name, False) for name in ("avx512_fp16", "asimdhp"))


def arithmetic(dtype: str) -> str:
    """The build of the kernel that runs here, and how it multiplies half-precision numbers."""
    if dtype not in ("bfloat16", "float16"):
        return instruction_set()
    return f"{instruction_set()}, {'in pairs' if dtype == 'bfloat16' and in_pairs() else 'as float32'}"
