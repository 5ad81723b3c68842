"""Who may import whom: nothing imports upwards, and `import multihead` needs no optional dependency."""

import ast
import subprocess
import sys
from pathlib import Path

import multihead

SOURCE = Path(multihead.__file__).parent

# Lower rows may import from rows above them, and from their own row only what stands to the left.
ORDER = [
    ["sizes"],
    ["selections"],
    ["intervals"],
    ["masks", "positions"],
    ["steps"],
    ["_native", "native"],
    ["backends", "backends.reference", "backends.sdpa", "backends.native"],
    ["backends.region", "backends.blocked", "backends.native_statistics", "backends.statistics"],
    ["attend"],
    ["project"],
    ["whole"],
    ["terminal", "plots"],
    ["lens"],
    ["cache"],
    ["arguments"],
    ["layer"],
    ["edit"],
    ["heads.patterns", "heads.stack", "heads.output", "heads"],
    ["trace"],
    ["weights.arrange", "weights.layouts", "weights.files", "weights.recognise", "weights", "nn"],
    ["doctor.weights", "doctor.masking"],
    ["doctor.variant"],
    ["doctor.measure", "doctor.cause"],
    [f"doctor.causes.{name}" for name in ("project", "split", "score", "mask", "merge")],
    ["doctor.causes"],
    ["doctor.search"],
    ["doctor.report", "doctor.candidate", "doctor.parameters", "doctor.probes", "doctor.progress"],
    ["doctor.chance", "doctor.localise", "doctor.watch", "doctor.patient"],
    ["doctor.findings"],
    ["doctor.examine"],
    ["doctor.load"],
    ["doctor.run"],
    ["doctor"],
    ["models.blocks", "models.induction", "models.sampling", "models.texts", "models.images"],
    ["models.lm", "models.vit", "models.training"],
    ["models.store"],
    ["models.recipes"],
    ["models.progress", "models.evaluate"],
    ["models"],
    ["hf.masks", "hf.interface", "hf.watch", "hf.screen", "hf"],
    ["screens"],
    [""],  # the package itself
    ["bench", "bench.cases", "bench.measure", "bench.machine", "bench.oracle"],
    ["bench.ceilings", "bench.ours", "bench.models"],
    [f"bench.peers{name}" for name in ("", ".child", ".graphs", ".layers", ".runtimes", ".sdpa", ".weights")],
    ["bench.problems", "bench.runner", "bench.report", "bench.cli"],
    ["cli"],
    ["__main__"],
]
RANK = {name: (row, column) for row, names in enumerate(ORDER) for column, name in enumerate(names)}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, but for those it needs only to name types."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "multihead":
                inside = name.split(".")[1:]
                while inside and ".".join(inside) not in RANK:
                    inside.pop()
                found.add(".".join(inside))
    return found


def test_every_module_has_its_place() -> None:
    assert {module_name(path) for path in SOURCE.rglob("*.py")} == set(RANK) - {"_native"}  # compiled


def test_nothing_imports_upwards() -> None:
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        for other in imported(path) - {name}:
            assert RANK[other] < RANK[name], f"{name} imports {other}"


def test_import_needs_no_optional_dependency() -> None:
    blocked = [
        "transformers",
        "onnx",
        "onnxruntime",
        "openvino",
        "hypothesis",
        "pytest",
        "matplotlib",
        "PIL",
        "tokenizers",
    ]
    script = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport multihead\nassert 'typer' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
