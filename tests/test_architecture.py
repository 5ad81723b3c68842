"""Who may import whom, how long a file and a list of parameters may be, and that cited files are there."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import multihead

ROOT = Path(__file__).parent.parent
SOURCE = Path(multihead.__file__).parent
CORE = [path for path in sorted((ROOT / "native").rglob("*.*")) if path.suffix in (".cpp", ".h", ".inl")]

# A room may import from the rooms above it, and its own files from each other, without a circle.
ROOMS = [
    "sizes",
    "tensors",
    "files",
    "positions",
    "steps",
    "draw",
    "masks",
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
EXCEPTIONS = {
    ("layer.trace", "explorer"),
    ("lens", "explorer"),
}  # (file, room): it may import upwards, when it is called


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


def test_the_drawings_have_the_rooms_in_their_order() -> None:
    lines = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("```\n")[1].splitlines()
    drawn = " ".join(re.split(r" {3,}", line.strip())[0] for line in lines)
    picture = (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
    rooms = [room for room in ROOMS if room and not room.startswith("_")]
    assert drawn.split() == rooms
    assert " ".join(re.findall(r'class="name"[^>]*>([a-z ]+)<', picture)).split() == rooms


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


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file gives to something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if private(name)}


def reached(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and private(node.attr)}


def test_nor_does_anybody_read_them_of_another_rooms_objects() -> None:
    trees = {module_name(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    owners: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for one in defined(tree):
            owners.setdefault(one, set()).add(room(name))
    owners.pop("_version", None)  # a tensor's too, and that is torch's own word for it
    for name, tree in trees.items():
        taken = {one for one in reached(tree) if one in owners and room(name) not in owners[one]}
        assert not taken, f"{name} reaches for {taken}"


def test_that_would_be_found() -> None:
    assert defined(ast.parse("class A:\n def __init__(self): self._x = 1\ndef _f(): ...\n_y = 2")) == {"_x", "_f", "_y"}
    assert reached(ast.parse("layer._x + _f(self._z).__class__")) == {"_x", "_z"}


# Words a reader stumbles over, where the field has one; prose may hold on to numbers, code may not call anything `held`.
NOT_OUR_WORDS = re.compile(
    r"_meet\b|_stands_between|meet_torch|\b_who\b|\bcrowds\b|\bclass Looking\b|_hung\b|laid in lanes"
    r"|(?i:whole[ _-]?numbers?\b)"
    r"|\b_?held\b *(?:,.*)?=(?!=)|\bdef held\(|\bheld: \w+[,)[]|\bheld_by\b"
    r"|\binside=\"|times 0 being|where nobody would notice|exist nowhere"
)


def test_words_of_the_field() -> None:
    texts = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.js"), *CORE, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts += [path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    for path in [*texts, ROOT / "CONTRIBUTING.md", ROOT / "native" / "README.md"]:
        if path == Path(__file__).resolve():
            continue
        found = NOT_OUR_WORDS.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"


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


MOST_PARAMETERS, MOST_LINES = 8, 400
SIGNED_BY_OTHERS = {  # file: functions whose parameters are not ours to choose
    "cli.py": {"show", "shapes", "doctor", "train", "explore"},  # typer's: each is an option of the command line
    "kernel/operators.py": {"attend_op", "backward_op", "_"},  # torch's: an operator takes no struct
    "hf/masks.py": {"mask"},  # transformers' mask interface
    "python/bindings.cpp": {"lambda"},  # nanobind's: each is an argument in Python, where the last ones are keywords
}


def long_lists(source: str) -> list[str]:
    """Functions of a Python file with too many parameters that may be given by position, `self` aside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                found.append(getattr(node, "name", "lambda"))
    return found


NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
DECLARED = re.compile(
    r"(?:const\s+|typename\s+)*[\w:]+(?:\s*<.*>)?(?:\s*[*&]+\s*|\s+)(?:const\s*)?(?:\w+|\(&\w+\))(?:\[\w*\])?(?:\s*=.*)?",
    re.DOTALL,
)
BODY = re.compile(r"(?:\s|const\b|noexcept\b|override\b|mutable\b|->[\s\w:<>,*&]+)*\{")
KEYWORDS = {"if", "for", "while", "switch", "catch"}


def long_lists_in_cpp(source: str) -> list[str]:
    """The same for C++: what has too many parts between parentheses, and a body behind them or `type name` in each."""
    source, found = NO_CODE.sub(" ", source), []
    for opening in re.finditer(r"(\w+|\])\s*\(", source):
        depth, parts, end = 0, [""], opening.end()
        for end in range(opening.end(), len(source)):
            character = source[end]
            if character == ")" and depth <= 0:
                break
            depth += (character in "([{<") - (character in ")]}>" and source[end - 1 : end + 1] != "->")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        if len(parts) <= MOST_PARAMETERS or opening[1] in KEYWORDS:
            continue
        if BODY.match(source, end + 1) or all(DECLARED.fullmatch(part.strip()) for part in parts):
            found.append("lambda" if opening[1] == "]" else opening[1])
    return found


def test_more_than_eight_parameters_are_a_struct_that_has_no_name_yet() -> None:
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        assert not set(long_lists(path.read_text())) - SIGNED_BY_OTHERS.get(name, set()), name


def test_so_they_are_in_the_core() -> None:
    assert CORE
    for path in CORE:
        name = path.relative_to(ROOT / "native").as_posix()
        assert not set(long_lists_in_cpp(path.read_text())) - SIGNED_BY_OTHERS.get(name, set()), name


def test_the_counting_of_parameters_finds_what_it_should() -> None:
    nine = ", ".join("abcdefghi")
    assert long_lists(f"def f({nine}): ...") == ["f"]
    assert long_lists(f"class C:\n def f(self, {nine[:-3]}): ...\n def g(a, *, {nine[3:]}): ...") == []
    typed = "const T* a, index b, View c = {}, std::vector<int> d, std::map<int, int>& e, int f, int g, F (h), int i"
    assert long_lists_in_cpp(f"void f({typed.replace('(h)', 'h')}) {{}}") == ["f"]
    assert long_lists_in_cpp(f"f({nine}); g(int a, int b);  // void h({typed})") == []
    odd = "typename A::T* a, F&& b, const T* const* c, T (&d)[NR], int, bool, index e, index f, const Plan& g"
    assert long_lists_in_cpp(f"template <class A>\nconst typename A::T* f({odd}) const {{ return a; }}") == ["f"]
    assert long_lists_in_cpp(f"[&]({odd}) -> std::pair<T, T> {{ }}") == ["lambda"]
    assert long_lists_in_cpp(f"if (a < b && f({nine})) {{ for (index i = 0; i < n; ++i) f({nine}); }}") == []
    fine = odd.rpartition(",")[0]
    assert long_lists_in_cpp(f"void f({fine}) {{ g({nine}); if (a->b) {{ }} }}") == []


LONG = [
    path
    for folder in ("src", "native", "benchmarks", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in (".py", ".js", ".css", ".cpp", ".h", ".inl")
    and len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
]


@pytest.mark.parametrize("path", LONG, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_long_file_says_why(path: Path) -> None:
    assert "Longer than other files because" in path.read_text(encoding="utf-8")[:1500]


def test_the_checks_of_a_submission_are_told() -> None:
    run = re.findall(r"^make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    told = (
        (ROOT / "CONTRIBUTING.md").read_text().split("`.ci/run` does what a submission must pass: ")[1].split(". ")[0]
    )
    assert run
    assert re.findall(r"`make (\w+)`", told) == run


CITED = re.compile(
    r"`(?:src/multihead/|multihead/)?((?:[\w.-]+/)*[\w.-]+\.(?:py|cpp|h|inl|toml|js|css|md|txt))(?::\w+)?`"
)
MADE_UP = {"ten.py", "FILE.py", "attention.py", "file.py", "wire.js"}  # in examples: the reader's own


def test_cited_files_are_there() -> None:
    """What documents, docstrings and comments call by name in backquotes, from the root, their folder or the package."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    ends = {"/".join(path.split("/")[n:]) for path in tracked for n in range(path.count("/") + 1)}
    for path in tracked:
        if path.endswith((".md", ".py", ".cpp", ".h", ".inl", ".js")) and path != "CHANGELOG.md":
            for cited in CITED.findall((ROOT / path).read_text(encoding="utf-8")):
                assert cited in ends or cited in MADE_UP, f"{path} cites {cited}"
