"""The C++ core, where it was built: `module` is None where it was not, and `missing` says why."""

from types import ModuleType

module: ModuleType | None
missing: str

try:
    from multihead import _native

    module, missing = _native, ""
except ImportError as error:
    module = None
    missing = f"not built: {error} (it needs a C++ compiler when the package is installed)"


def instruction_set() -> str:
    """The build of the kernel that runs here: the one MULTIHEAD_ISA names, or the best this CPU can."""
    return module.instruction_set() if module is not None else "none"


def cpu_features() -> dict[str, bool]:
    """What this CPU can do, by name, empty where the core was not built."""
    return module.cpu_features() if module is not None else {}
