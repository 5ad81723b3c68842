"""The bundler joins what it knows, and refuses the rest in words; the page's own modules go through it."""

import shutil
import subprocess

import pytest

from multihead.explorer.bundle import bundle
from multihead.explorer.export import modules


def test_modules_come_after_what_they_import_and_names_may_repeat() -> None:
    joined = bundle(
        {
            "main.js": 'import { b } from "./steps/b.js";\nimport {\n  a,\n  C,\n} from "./a.js";\nconst x = 1;\nout(a(), b, new C().d);\n',
            "a.js": "const x = 2;\nexport function a() { return x; }\nexport class C { d = 4; }\n",
            "steps/b.js": 'import { a } from "../a.js";\nconst x = 3;\nexport const b = a() + x;\nexport async function never() {}\n',
        }
    )
    assert joined.index("// a.js") < joined.index("// steps/b.js") < joined.index("// main.js")
    assert "import" not in joined
    assert "export" not in joined
    if shutil.which("node") is None:
        pytest.skip("no node on this machine: the joined module was not run")
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", f"globalThis.out = console.log;\n{joined}"],
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "2 5 4\n", ran.stderr


REFUSED = [
    ('import a from "./b.js";', "expected import { a }"),
    ('import * as b from "./b.js";', "expected import { a }"),
    ('import "./b.js";', "expected import { a }"),
    ('import { a as c } from "./b.js";', "without `as`"),
    ('import { a } from "https://cdn.example/b.js";', "expected import { a }"),
    ('import { missing } from "./b.js";', "imports missing from b.js"),
    ('import { a } from "./c.js";', "there is no such module"),
    ("export default function a() {}", "expected export function"),
    ("const a = 1;\nexport { a };", "expected export function"),
    ("export let a = 1;", "expected export function"),
    ('export * from "./b.js";', "expected export function"),
    ('const b = await import("./b.js");', "nothing to import later"),
    ("const here = import.meta.url;", "no address of its own"),
    ("await later();", "may not wait"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"main\.js") as refused:
        bundle({"main.js": text, "b.js": "export const a = 1;"})
    assert message in str(refused.value)


def test_circles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"main.js → a.js → main.js"):
        bundle(
            {"main.js": 'import { a } from "./a.js";', "a.js": 'import { b } from "./main.js";\nexport const a = 1;'}
        )


def test_types_in_comments_are_no_imports() -> None:
    joined = bundle(
        {"main.js": '/** @param {import("./b.js").T} t */\nfunction f(t) {}\n// import.meta is not for us\nf();'}
    )
    assert "function f" in joined


def test_the_page_itself_can_be_joined() -> None:
    joined = bundle(modules())
    assert "</script" not in joined.lower()
    if shutil.which("node") is not None:
        ran = subprocess.run(
            ["node", "--check", "--input-type=module", "-"], input=joined, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
