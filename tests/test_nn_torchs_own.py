"""What torch's own tests of its layer do with one, done with ours: its attributes into torch's function, odd dtypes, masks.

After the purposes of torch's test/nn/test_multihead_attention.py. Two of its twenty do not apply: errors are ValueErrors
here that name the argument, and torch's own kernel is never taken; docs/nn.md has both.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from multihead.nn import MultiheadAttention, replace

N, L, S, E, H = 3, 5, 7, 12, 3


def by_torchs_function(m: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Any:
    """`F.multi_head_attention_forward`, called as code does that looks at `_qkv_same_embed_dim`."""
    split: dict[str, Any] = {}
    if not m._qkv_same_embed_dim:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        split = {"use_separate_proj_weight": True} | {name: getattr(m, name) for name in names}
    return F.multi_head_attention_forward(
        q, k, v, E, H, m.in_proj_weight, m.in_proj_bias, m.bias_k, m.bias_v, m.add_zero_attn, 0.0, m.out_proj.weight,
        m.out_proj.bias, training=False, **split, **masks,
    )  # fmt: skip


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "make", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 10, "vdim": 10}], ids=str
)
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_function_takes_our_attributes(make: dict, padded: bool, average: bool) -> None:
    module = MultiheadAttention(E, H, dtype=torch.float64, **make).eval()
    q, k = torch.randn(L, N, E, dtype=torch.float64), torch.randn(S, N, make.get("kdim", E), dtype=torch.float64)
    masks: dict[str, Any] = {"attn_mask": torch.randn(L, S, dtype=torch.float64), "average_attn_weights": average}
    masks |= {"key_padding_mask": torch.arange(S).expand(N, S) >= torch.tensor([[S], [4], [2]])} if padded else {}
    if padded:
        masks["attn_mask"] = masks["attn_mask"] > 1
        masks["attn_mask"][:, 0] = False
    assert_close(module(q, k, k, **masks), by_torchs_function(module, q, k, k, **masks))


def test_what_it_says_of_itself_is_true() -> None:
    assert MultiheadAttention(E, H)._qkv_same_embed_dim
    assert not MultiheadAttention(E, H, kdim=10)._qkv_same_embed_dim
    theirs = nn.TransformerEncoderLayer(E, H, 13)
    replace(theirs)
    assert theirs.self_attn._qkv_same_embed_dim
    copied = copy.deepcopy(theirs.self_attn)
    assert len(copied._forward_pre_hooks) == 1
    copied._reset_parameters()
    assert len(copied._forward_pre_hooks) == 1, "once is enough"


def test_masks_of_both_kinds_at_once() -> None:
    module = MultiheadAttention(E, H, batch_first=True).eval()
    x, attn_mask, padding = torch.rand(8, L, E), torch.rand(L, L) < 0.5, torch.rand(8, L) < 0.5
    with torch.no_grad():
        ours = module(x, x, x, attn_mask=attn_mask, key_padding_mask=padding)[0]
        t = x.transpose(0, 1)
        theirs = by_torchs_function(module, t, t, t, attn_mask=attn_mask, key_padding_mask=padding)[0].transpose(0, 1)
    seen = ~(attn_mask | padding[:, None]).all(-1)  # rows that see nothing are NaN in torch
    assert_close(ours[seen], theirs[seen])


@pytest.mark.parametrize("make", [{}, {"kdim": 10, "vdim": 10}], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("weights", "bias"), [(torch.double, torch.half), (torch.float, torch.double)], ids=str)
def test_a_bias_of_another_dtype(make: dict, grad: bool, weights: torch.dtype, bias: torch.dtype) -> None:
    module = MultiheadAttention(E, H, batch_first=True, dtype=weights, **make).eval()
    module.in_proj_bias = nn.Parameter(torch.randn(3 * E).to(bias))
    q, k = torch.randn(N, L, E, dtype=weights), torch.randn(N, S, make.get("kdim", E), dtype=weights)
    same = copy.deepcopy(module)
    same.in_proj_bias = nn.Parameter(module.in_proj_bias.to(weights))
    with torch.set_grad_enabled(grad):
        output = module(q, k, k)[0]
        assert output.dtype == weights
        assert_close(output, same(q, k, k)[0])
    if grad:
        output.sum().backward()
        assert module.in_proj_bias.grad.dtype == bias


def test_pefts_lora_on_the_whole_module() -> None:
    peft = pytest.importorskip("peft", reason="peft is optional")

    def adapted(kind: type) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"attention": kind(E, H, batch_first=True)})
        config = peft.LoraConfig(target_modules=["attention"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config).double()

    ours, theirs, x = adapted(MultiheadAttention), adapted(nn.MultiheadAttention), torch.randn(N, L, E).double()
    ours.load_state_dict(theirs.state_dict())
    outputs = [model.base_model.model["attention"](x, x, x)[0] for model in (ours, theirs)]
    assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if "lora" in n} for m in (ours, theirs)]
    assert_close(*grads)
    assert len(grads[0]) == 4
