"""The page's own modules: node runs their tests, on cases that are dumped here from `mh.trace` and `multihead.masks`."""

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.explorer.bundle import bundle

HERE = Path(__file__).parent
PAGE = Path(mh.__file__).parent / "explorer" / "page"
MODULES = sorted(PAGE.rglob("*.js"))

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node: the page's modules are not tested")

# N  layer                                            mask                  off, W_o, why
CASES: list[dict[str, Any]] = [
    {"N": 4, "layer": {"width": 24, "heads": 3}, "why": "no mask"},
    {"N": 5, "layer": {"width": 24, "heads": 4, "bias": False}, "mask": "causal", "why": "causal, no bias"},
    {"N": 7, "layer": {"width": 24, "heads": 4, "kv_heads": 2}, "mask": "causal:3", "why": "GQA, a causal window"},
    {"N": 6, "layer": {"width": 20, "heads": 4, "kv_heads": 1}, "mask": "window:1,2", "why": "MQA, a window"},
    {"N": 6, "layer": {"width": 18, "heads": 3, "rope": True}, "mask": "prefix:2", "why": "RoPE, a prefix"},
    {"N": 5, "layer": {"width": 16, "heads": 2, "rope": mh.RoPE(dim=4, pairing="interleaved")}, "mask": "padding:3",
     "why": "RoPE on part of a head, interleaved, padding"},
    {"N": 6, "layer": {"width": 16, "heads": 2, "qk_norm": True, "rope": True}, "mask": "documents:2,4",
     "why": "QK-norm, documents"},
    {"N": 6, "layer": {"width": 16, "heads": 2}, "mask": "documents:2,4+causal", "why": "documents, each causal"},
    {"N": 5, "layer": {"width": 15, "heads": 3, "head_dim": 4, "value_dim": 7}, "mask": "causal", "why": "D, V and E/H differ"},
    {"N": 4, "layer": {"width": 16, "heads": 4, "softcap": 3.0, "sinks": True, "scale": 0.9}, "mask": "causal",
     "why": "softcap, sinks and a scale of its own"},
    {"N": 3, "layer": {"width": 12, "heads": 2}, "mask": "drawn:4f8", "why": "drawn by hand"},
    {"N": 3, "layer": {"width": 12, "heads": 2}, "mask": "drawn:1f8", "why": "a query that sees nothing"},
    {"N": 5, "layer": {"width": 24, "heads": 4}, "mask": "causal", "off": [[1, "zero"]], "why": "a head switched off"},
    {"N": 5, "layer": {"width": 24, "heads": 4}, "mask": "causal", "off": [[0, "mean"], [3, "mean"]],
     "why": "two heads set to their mean"},
    {"N": 5, "layer": {"width": 24, "heads": 4, "value_dim": 5}, "mixing": False, "why": "without W_o"},
    {"N": 4, "K": 6, "layer": {"width": 16, "heads": 2, "context_dim": 10}, "why": "cross-attention"},
]  # fmt: skip

MASKS = ["none", "causal", "causal:2", "window:0,0", "window:2,1", "prefix:0", "prefix:3", "padding:0", "padding:4",
         "documents:2,3", "documents:2,3+causal", "documents:5", "documents:1,1,3+causal"]  # fmt: skip


def mask_of(text: str | None, Q: int, K: int) -> mh.masks.Mask | None:
    """The mask that a text of the page stands for."""
    if text is None or text == "none":
        return None
    first, *joined = text.split("+")
    kind, _, rest = first.partition(":")
    if kind == "drawn":
        bits = "".join(f"{int(digit, 16):04b}" for digit in rest)[: Q * K]
        return mh.Allowed(torch.tensor([bit == "1" for bit in bits]).view(Q, K))
    numbers = [int(n) for n in rest.split(",")] if rest else []
    make = {
        "causal": lambda: mh.Causal(window=numbers[0] if numbers else None),
        "window": lambda: mh.Window(*numbers),
        "prefix": lambda: mh.Prefix(numbers[0]),
        "padding": lambda: mh.Padding([numbers[0]]),
        "documents": lambda: mh.Documents(numbers),
    }[kind]
    return make() & mh.Causal() if joined else make()


def listed(t: torch.Tensor) -> dict[str, Any]:
    values = t.detach().float().contiguous().flatten().tolist()
    return {"shape": list(t.shape), "data": [None if v == -math.inf else v for v in values]}


def dumped(case: dict[str, Any]) -> dict[str, Any]:
    """A case with what goes into the layer, and every intermediate of `mh.trace`."""
    torch.manual_seed(3)
    layer = mh.MultiHeadAttention(**case["layer"]).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    s, N = layer.sizes, case["N"]
    K = case.get("K", N)
    x = torch.randn(N, s.E)
    context = torch.randn(K, s.C) if "K" in case else None
    mask, off, mixing = mask_of(case.get("mask"), N, K), case.get("off", []), case.get("mixing", True)
    with torch.no_grad():
        if off:
            with mh.ablate(layer, [h for h, _ in off], off[0][1]):
                traced = mh.trace(layer, x, context, mask)
        else:
            traced = mh.trace(layer, x, context, mask)
    found = {name: listed(t) for name, t in traced.items()}
    if off:  # the trace's tap comes after the ablation's or before: what the heads put out is what was merged
        found["heads"] = listed(traced["transposed"].transpose(0, 1))
    if not mixing:
        found["output"] = listed(traced["merged"])
    tensors = {"x": x, "w_q": layer.w_q, "w_k": layer.w_k, "w_v": layer.w_v, "w_o": layer.w_o}
    tensors |= {} if context is None else {"context": context}
    for name, proj, heads in (("b_q", layer.q_proj, s.H), ("b_k", layer.k_proj, s.G), ("b_v", layer.v_proj, s.G)):
        if proj.bias is not None:
            tensors[name] = proj.bias.view(heads, -1)
    if layer.o_proj.bias is not None:
        tensors["b_o"] = layer.o_proj.bias
    if layer.sinks is not None:
        tensors["sinks"] = layer.sinks
    if layer.q_norm is not None and layer.k_norm is not None:
        tensors |= {"norm_q": layer.q_norm.weight, "norm_k": layer.k_norm.weight}
    rope = None
    if layer.rope is not None:
        angles = torch.arange(N)[:, None] * layer.rope.frequencies(s.D)
        tensors |= {"rope_cos": angles.cos(), "rope_sin": angles.sin()}
        rope = {"dim": 2 * angles.shape[1], "interleaved": layer.rope.pairing == "interleaved"}
    about = {
        "sizes": {n: getattr(s, n) for n in "EHGDVC"}, "scale": layer.scale, "softcap": layer.softcap,
        "rope": rope, "qk_norm": layer.q_norm is not None,
    }  # fmt: skip
    given = {name: listed(t) for name, t in tensors.items()}
    return {"why": case["why"], "mask": case.get("mask"), "off": off, "mixing": mixing, "layer": about,
            "tensors": given, "trace": found}  # fmt: skip


@needs_node
@pytest.mark.parametrize("joined", [False, True], ids=["as they lie", "in the bundle"])
def test_the_modules_own_tests(tmp_path: Path, joined: bool) -> None:
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([dumped(case) for case in CASES]))
    masks = []
    for text in MASKS:
        for Q, K in ((5, 5),) if "documents" in text else ((5, 5), (3, 5)):
            mask = mask_of(text, Q, K)
            seen = torch.ones(Q, K, dtype=torch.bool) if mask is None else mask.dense(Q, K).expand(1, 1, Q, K)[0, 0]
            masks.append({"text": text, "Q": Q, "K": K, "cells": "".join(str(int(c)) for c in seen.flatten())})
    cases.with_suffix(".masks.json").write_text(json.dumps(masks))
    tests = [str(path) for path in sorted((HERE / "js").glob("*.test.mjs"))]
    assert tests
    env = {"MULTIHEAD_CASES": str(cases), "PATH": os.environ["PATH"]}
    if joined:
        text = bundle({path.relative_to(PAGE).as_posix(): path.read_text() for path in MODULES})
        names = re.findall(r"^// (\S+)\nconst (module_\d+) = ", text, flags=re.M)
        together = ", ".join(f'"{path}": {name}' for path, name in names)
        env["MULTIHEAD_BUNDLE"] = str(tmp_path / "bundle.mjs")
        Path(env["MULTIHEAD_BUNDLE"]).write_text(f"{text}\nexport const modules = {{ {together} }};\n")
    done = subprocess.run(
        ["node", "--experimental-default-type=module", "--no-warnings", "--test", *tests],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    wrong = "\n".join(re.findall(r"^not ok.*?^  \.\.\.", done.stdout, flags=re.S | re.M))
    assert done.returncode == 0, wrong + done.stderr[-2000:]


def test_modules_are_what_the_bundler_takes() -> None:
    """Only named imports and exports, no cycles, files of at most 400 lines, and nothing that a strict policy refuses."""
    assert MODULES
    imports: dict[Path, list[Path]] = {}
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path.name} has {text.count(chr(10))} lines"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function|setAttribute\(\"style\"", text
        ), path
        assert not re.search(
            r"export (default|\{|\*|let)|import\(|import\.meta|import \*", re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        ), path
        assert path.name == "ask.js" or "fetch(" not in text, f"{path.name}: only ask.js talks to Python"
        imports[path] = [(path.parent / name).resolve() for name in re.findall(r'from "(\.[^"]+)"', text)]

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"a cycle: {' → '.join(p.name for p in (*above, path))}"
        for other in imports[path]:
            assert other in imports, f"{path.name} imports {other.name}, which is not there"
            visit(other, (*above, path))

    visit(PAGE / "main.js", ())


def test_markup_has_no_inline_style_or_script() -> None:
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"\bstyle=|\bon[a-z]+=|https?:", html)
    assert not re.search(r"@import|url\(|https?:", (PAGE / "style.css").read_text())
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;]*?([\d.]+)px", (PAGE / "style.css").read_text())]
    assert min(sizes) >= 12, f"a text of {min(sizes)} px"
