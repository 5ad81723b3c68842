"""The page's modules joined into one, for the single file and the notebook, which cannot import files beside them.

A module says only `import { a, b } from "./other.js"` and `export function|async function|class|const NAME`, each at
the start of a line; so joining takes no parser. Each module becomes a function that is called once, in the order of
imports, and gives its exports. Anything else is refused in words.
"""

import posixpath
import re
from collections.abc import Mapping

IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"(\.{1,2}/[^"\n]+)";?[ \t]*$', re.MULTILINE)
EXPORT = re.compile(r"^export\s+(async\s+function\*?|function\*?|class|const)\s+([A-Za-z_$][\w$]*)", re.MULTILINE)
NAME = re.compile(r"[A-Za-z_$][\w$]*")
COMMENT = re.compile(r"^[ \t]*/\*.*?\*/|^[ \t]*//[^\n]*", re.MULTILINE | re.DOTALL)
LEFT = (  # what may not be left once imports and exports are taken out, and why
    (re.compile(r"^import\b[^\n]*", re.MULTILINE), 'expected import { a } from "./b.js" at the start of a line'),
    (re.compile(r"^export\b[^\n]*", re.MULTILINE), "expected export function, class or const NAME"),
    (re.compile(r"\bimport\s*\([^\n]*"), "a page in one file has nothing to import later"),
    (re.compile(r"\bimport\.meta\b[^\n]*"), "a page in one file has no address of its own"),
    (re.compile(r"^await\b[^\n]*", re.MULTILINE), "a module may not wait: call an async function"),
)


def bundle(modules: Mapping[str, str], entry: str = "main.js") -> str:
    r"""One module that does what `entry` does.

    Args:
        modules: the text of each, by its path in the page's folder, such as "steps/mix.js".
        entry: the one to start with.

    >>> from multihead.explorer.bundle import bundle
    >>> print(bundle({"main.js": 'import { a } from "./b.js";\nshow(a);', "b.js": "export const a = 1;"}))
    // b.js
    const module_0 = (() => {
    const a = 1;
    return { a };
    })();
    // main.js
    const module_1 = (() => {
    const { a } = module_0;
    show(a);
    return {};
    })();
    """
    order = import_order(modules, entry)
    numbers = {path: number for number, path in enumerate(order)}
    exported = {path: [name for _, name in EXPORT.findall(modules[path])] for path in order}
    parts = []
    for path in order:

        def take(found: re.Match[str], path: str = path) -> str:
            names, source = _names(found, path), _resolve(path, found[2])
            absent = [name for name in names if name not in exported[source]]
            if absent:
                raise ValueError(f"{path} imports {', '.join(absent)} from {source}: it exports {exported[source]}")
            return f"const {{ {', '.join(names)} }} = module_{numbers[source]};"

        body = EXPORT.sub(r"\1 \2", IMPORT.sub(take, modules[path])).rstrip()
        _refuse_what_is_left(path, body)
        gives = f"return {{ {', '.join(exported[path])} }};" if exported[path] else "return {};"
        parts.append(f"// {path}\nconst module_{numbers[path]} = (() => {{\n{body}\n{gives}\n}})();")
    return "\n".join(parts)


def import_order(modules: Mapping[str, str], entry: str) -> list[str]:
    """The modules that `entry` needs, itself included, each after all that it imports."""
    order: list[str] = []
    _visit(entry, modules, order, [])
    return order


def _visit(path: str, modules: Mapping[str, str], order: list[str], open_: list[str]) -> None:
    """Append a module to the order after all that it imports."""
    if path in order:
        return
    if path in open_:
        raise ValueError(f"modules import each other in a circle: {' → '.join([*open_[open_.index(path) :], path])}")
    if path not in modules:
        raise ValueError(f"{open_[-1] if open_ else 'the page'} imports {path}: there is no such module")
    for found in IMPORT.finditer(modules[path]):
        _visit(_resolve(path, found[2]), modules, order, [*open_, path])
    order.append(path)


def _resolve(path: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), source))


def _names(found: re.Match[str], path: str) -> list[str]:
    names = [name.strip() for name in found[1].split(",") if name.strip()]
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"{path}: import {{ {name} }}: expected plain names, without `as`")
    return names


def _refuse_what_is_left(path: str, body: str) -> None:
    code = COMMENT.sub("", body)  # types in comments may say import("./b.js").T
    for pattern, why in LEFT:
        found = pattern.search(code)
        if found:
            raise ValueError(f"{path}: {found[0].strip()[:80]!r}: {why}")
