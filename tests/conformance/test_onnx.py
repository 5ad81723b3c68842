"""ONNX's own node tests of its `Attention` operator, on every backend, judged by ONNX's own comparison.

The cases are those that `onnx.backend.test.loader.load_model_tests(kind="node")` generates; importing the module of
this operator alone makes the same ones, without those of every other.
"""

import ml_dtypes
import numpy as np
import onnx.backend.test.case.node.attention  # noqa: F401  registers its cases when imported
import pytest
import torch
from adapters import BACKENDS, Ledger, refusals, standing
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner
from onnx.helper import get_attribute_value
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.nn import functional as F

import multihead as mh
from multihead import steps

CASES: dict[str, TestCase] = {c.name: c for c in _NodeTestCases if c.name.startswith("test_attention")}
HALF = (np.float16, ml_dtypes.bfloat16)
LEDGER = Ledger("onnx")
RUN = [name for name in CASES if not LEDGER.leaves_out(name)]


class Node:
    """One `Attention` node with its inputs: `call` is how it reads as a call of `mh.attend`."""

    def __init__(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        attn_mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        nonpad_kv_seqlen: Tensor | None = None,
        *,
        is_causal: int = 0,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        left_window_size: int = -1,
        right_window_size: int = -1,
        qk_matmul_output_mode: int = 0,
        softmax_precision: int | None = None,  # ours is float32 or the inputs' own, whichever is finer
    ) -> None:
        self.merged = Q.dim() == 3  # (B, N, H·D): heads side by side
        if self.merged:
            Q, K, V = (
                steps.split(t.unflatten(-1, (heads, -1)))
                for t, heads in ((Q, q_num_heads), (K, kv_num_heads), (V, kv_num_heads))
            )
        past = 0
        if past_key is not None:
            past = past_key.shape[2]
            cache = mh.Cache(*K.shape[:2], K.shape[3], V.shape[3], dtype=K.dtype)
            cache.append(past_key, past_value)
            K, V, _ = cache.append(K, V)
        self.present_key, self.present_value = K, V
        self.mode = qk_matmul_output_mode

        mask = align(
            Q.shape[2],
            K.shape[2],
            past,
            nonpad_kv_seqlen,
            left=left_window_size if left_window_size >= 0 else None,
            right=0 if is_causal else right_window_size if right_window_size >= 0 else None,
        )
        bias = None
        if attn_mask is not None:
            hidden = False if attn_mask.dtype == torch.bool else -torch.inf
            attn_mask = F.pad(attn_mask, (0, K.shape[2] - attn_mask.shape[-1]), value=hidden)  # it may be too short
            if attn_mask.dtype == torch.bool:
                mask = mh.Allowed(attn_mask) if mask is None else mask & attn_mask
            else:
                bias = attn_mask
        self.call = {"q": Q, "k": K, "v": V, "mask": mask, "scale": scale, "softcap": softcap or None, "bias": bias}

    def run(self, backend: str) -> dict[str, Tensor]:
        """Every output that the operator has, by name."""
        out = mh.attend(**self.call, backend=backend)
        return {
            "Y": steps.concatenate(steps.transpose_back(out)) if self.merged else out,
            "present_key": self.present_key,
            "present_value": self.present_value,
            "qk_matmul_output": self.intermediate(),
        }

    def intermediate(self) -> Tensor:
        """What step 3 holds at the point that `qk_matmul_output_mode` names; no backend has it, the steps do."""
        q, k, mask, bias, softcap = (self.call[name] for name in ("q", "k", "mask", "bias", "softcap"))
        exact = torch.promote_types(q.dtype, torch.float32)
        keys = steps.repeat_heads(k.to(exact), q.shape[1])
        scores = steps.score(q.to(exact), keys, self.call["scale"] or q.shape[-1] ** -0.5)
        allowed = None if mask is None else mask.dense(q.shape[2], k.shape[2])
        masked = steps.hide(scores, allowed=allowed, softcap=softcap, bias=bias)
        found = (scores, steps.hide(scores, softcap=softcap), masked, steps.weigh(masked)[0])
        return found[self.mode].to(q.dtype)


def align(Q: int, K: int, past: int, nonpad: Tensor | None, *, left: int | None, right: int | None) -> mh.Mask | None:
    """ONNX's alignment in our masks. Query i attends to key j iff j <= i + offset (causal), where offset is

    - `past`, the length of past_key, where there is one: our bottom-right if and only if as many keys are new as
      there are queries; the last query stands at key past + Q − 1;
    - nonpad_kv_seqlen[b] − Q, where that is given: the last query stands at the last real key, which is our
      bottom-right among the real keys of that row; a negative offset leaves the first queries nothing to see;
    - 0 where neither is: top-left, the last query stands at key Q − 1.

    A window counts from the same place.
    """
    if left is None and right is None:
        return None if nonpad is None else mh.Padding(nonpad)
    return standing(Q, K, past + Q if nonpad is None else nonpad, left, right)


def read(case: TestCase) -> tuple[Node, dict[str, np.ndarray]]:
    """The one node of a case with its inputs, and the outputs it is to have."""
    (node,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    assert node.op_type == "Attention"
    given = dict(zip(filter(None, node.input), map(from_numpy, inputs), strict=True))
    options = {a.name: get_attribute_value(a) for a in node.attribute}
    return Node(**given, **options), dict(zip(filter(None, node.output), outputs, strict=True))


def from_numpy(a: np.ndarray) -> Tensor:
    return torch.tensor(a.astype(np.float32)).bfloat16() if a.dtype == ml_dtypes.bfloat16 else torch.tensor(a)


def to_numpy(t: Tensor) -> np.ndarray:
    return t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def exact_Y(case: TestCase) -> np.ndarray:
    """ONNX's own reference, in float64."""
    (inputs, _) = case.data_sets[0]
    finer = [a.astype(np.float64) if a.dtype in (*HALF, np.float32) else a for a in inputs]
    given = dict(zip((i.name for i in case.model.graph.input), finer, strict=True))
    return ReferenceEvaluator(case.model).run(["Y"], given)[0]


@pytest.mark.parametrize(("name", "backend"), LEDGER.pairs(CASES))
def test_outputs_are_those_of_onnx(name: str, backend: str) -> None:
    node, expected = read(CASES[name])
    found = node.run(backend)
    if name in LEDGER.coarse:
        exact, Y = exact_Y(CASES[name]), expected.pop("Y")
        assert np.abs(to_numpy(found["Y"]) - exact).max() <= np.abs(Y - exact).max()
    Runner.assert_similar_outputs(
        list(expected.values()), [to_numpy(found[output]) for output in expected], CASES[name].rtol, CASES[name].atol
    )


@pytest.mark.parametrize(("name", "backend"), LEDGER.refused)
def test_a_backend_that_is_named_refuses_in_the_words_of_the_ledger(name: str, backend: str) -> None:
    node, _ = read(CASES[name])
    with pytest.raises(ValueError, match="refuses this call") as refusal:
        mh.attend(**node.call, backend=backend)
    assert str(refusal.value).endswith(LEDGER.refused[name, backend])


def test_the_ledger_lists_exactly_what_is_refused() -> None:
    found = {(name, backend): why for name in RUN for backend, why in refusals(read(CASES[name])[0].call).items()}
    assert found == LEDGER.refused
    assert len(LEDGER.pairs(CASES)) + len(found) == len(RUN) * len(BACKENDS)


def test_the_ledger_lists_exactly_the_cases_whose_expectation_is_too_coarse() -> None:
    """Those where half a unit in the last place and the expectation's own error are more than the tolerance."""
    found = set()
    for name in RUN:
        Y, exact = read(CASES[name])[1]["Y"], exact_Y(CASES[name])
        rtol = CASES[name].rtol if Y.dtype != ml_dtypes.bfloat16 else 2**-6  # as in Runner.assert_similar_outputs
        error = np.abs(Y.astype(np.float64) - exact) + np.abs(exact) * float(ml_dtypes.finfo(Y.dtype).eps) / 2
        if (error > rtol * np.abs(exact) + CASES[name].atol).any():
            found.add(name)
    assert found == LEDGER.coarse.keys()


def test_the_ledger_has_no_stale_entry() -> None:
    assert not LEDGER.stale(CASES)


def test_what_is_left_out_runs_under_its_own_name() -> None:
    for name in CASES.keys() - set(RUN):
        assert name.removesuffix("_expanded") in RUN
        assert all(node.op_type != "Attention" for node in CASES[name].model.graph.node)
