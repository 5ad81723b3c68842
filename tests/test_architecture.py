"""Who may import whom: nothing imports upwards, and `import multihead` needs no optional dependency."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import multihead

SOURCE = Path(multihead.__file__).parent

# A room may import from the rooms above it, and its own files from each other, without a circle.
ROOMS = [
    "sizes",
    "files",
    "draw",
    "masks",
    "positions",
    "steps",
    "call",
    "_native",
    "kernel",
    "attention",
    "lens",
    "cache",
    "layer",
    "heads",
    "weights",
    "nn",
    "doctor",
    "models",
    "hf",
    "show",
    "distributed",
    "explorer",
    "",  # the package itself
    "bench",
    "cli",
    "__main__",
]
RANK = {room: row for row, room in enumerate(ROOMS)}
EXCEPTIONS = {("layer.trace", "explorer")}  # (file, room): it may import upwards, when it is called


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room(name: str) -> str:
    return name.split(".")[0]


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
                while inside and ".".join(inside) not in MODULES:
                    inside.pop()
                found.add(".".join(inside))
    return found


MODULES = {module_name(path) for path in SOURCE.rglob("*.py")} | {"_native"}  # compiled


def test_every_room_has_its_place() -> None:
    assert {room(name) for name in MODULES} == set(RANK)


def test_nothing_imports_upwards() -> None:
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        for other in imported(path):
            if room(other) != room(name) and (name, room(other)) not in EXCEPTIONS:
                assert RANK[room(other)] < RANK[room(name)], f"{name} imports {other}"


def test_no_room_goes_round_in_a_circle() -> None:
    """Within a room, files import each other in some order; a package's own file counts as all of what it imports."""
    graph = {
        module_name(path): {other for other in imported(path) if room(other) == room(module_name(path))}
        for path in SOURCE.rglob("*.py")
    }
    for name, others in graph.items():
        parent = name.rpartition(".")[0]
        others -= {name, parent if name not in graph.get(parent, set()) else ""} if parent else {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_nobody_reaches_for_another_rooms_private_names() -> None:
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multihead."):
                other = (node.module or "").removeprefix("multihead.")
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private or room(other) == room(name), f"{name} imports {private} from {other}"


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
        "starlette",
        "uvicorn",
    ]
    script = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import multihead\nfor name in multihead.__all__: getattr(multihead, name)\n"
        "assert 'typer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_help_and_version_do_not_wait_for_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'multihead'; import multihead.cli; multihead.cli.main()"
    )
    for option in ("--help", "--version", "show"):
        arguments = [option] if option != "show" else ["show", "--help"]
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "multihead" in done.stdout


def test_every_public_name_is_found_where_it_is_said_to_live() -> None:
    for name in multihead.__all__:
        assert getattr(multihead, name) is not None
    assert set(multihead.__all__) <= set(dir(multihead))
    with pytest.raises(AttributeError, match="no attribute 'attendd'"):
        _ = multihead.attendd
