"""Reading a module's parameters: by name, by shape, by search, by a map; and a swap is never searched away."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh

E, H, D, N = 32, 4, 8, 5


def attend(q, k, v):
    """(B, N, E) each."""
    q, k, v = (t.view(*t.shape[:2], H, -1).transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Named(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(E, E))

    def forward(self, x):
        q, k, v, o = (getattr(self, name) for name in self.names)
        return o(attend(q(x), k(x), v(x)))


NAMES = [
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("W_q", "W_k", "W_v", "W_o"),
    ("wq", "wk", "wv", "wo"),
    ("query", "key", "value", "dense_output"),
    ("to_q", "to_k", "to_v", "to_out"),
    ("queries", "keys", "values", "unifyheads"),
    ("W_query", "W_key", "W_value", "proj"),
    ("linear_q", "linear_k", "linear_v", "fc_out"),
    ("q_linear", "k_linear", "v_linear", "c_proj"),
]


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_by_name(names):
    report = mh.diagnose(Named(names), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy", report
    assert "read by name" in report.subject


@pytest.mark.parametrize("names", [*NAMES, ("a", "b", "c", "d")], ids=str)
def test_a_swap_is_a_swap_however_the_weights_were_read(names):
    module = Named(names)
    module.names = (names[1], names[0], *names[2:])
    report = mh.diagnose(module, None, torch.randn(2, N, E), heads=H)
    assert report.cause == "q and k swapped", report


class Packed(nn.Module):
    def __init__(self, name: str, per_head: bool = False) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(E, 3 * E))
        self.proj = nn.Linear(E, E)
        self.name, self.per_head = name, per_head

    def forward(self, x):
        qkv = getattr(self, self.name)(x)
        if self.per_head:
            return self.proj(attend(*(t.flatten(2) for t in qkv.unflatten(-1, (H, 3, D)).unbind(3))))
        return self.proj(attend(*qkv.chunk(3, -1)))


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv", "query_key_value", "mystery"])
def test_packed(name):
    assert mh.diagnose(Packed(name), None, torch.randn(2, N, E), heads=H).verdict == "healthy"
    report = mh.diagnose(Packed(name, per_head=True), None, torch.randn(2, N, E), heads=H)
    assert report.cause == "QKV packing: per head against per matrix", report


def test_a_named_layout():
    packed = Packed("query_key_value", per_head=True)
    packed.dense = packed.proj
    del packed.proj
    packed.forward = lambda x: packed.dense(
        attend(*(t.flatten(2) for t in packed.query_key_value(x).unflatten(-1, (H, 3, D)).unbind(3)))
    )
    report = mh.diagnose(packed, None, torch.randn(2, N, E), heads=H)
    assert report.cause == "QKV packing: per head against per matrix", report
    report = mh.diagnose(packed, None, torch.randn(2, N, E), heads=H, layout="gpt-neox")
    assert report.verdict == "healthy", report
    with pytest.raises(ValueError, match="layout='gpt2'"):
        mh.diagnose(packed, None, torch.randn(2, N, E), heads=H, layout="gpt2")


def test_one_module_for_each_head():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(E, D, bias=False) for _ in range(3))

        def forward(self, x):
            scores = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
            return scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, -math.inf).softmax(
                -1
            ) @ self.value(x)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([Head() for _ in range(H)])
            self.proj = nn.Linear(E, E)

        def forward(self, x):
            return self.proj(torch.cat([head(x) for head in self.heads], -1))

    assert mh.diagnose(Several(), None, torch.randn(2, N, E), mask=mh.Causal(), heads=H).verdict == "healthy"


@pytest.mark.parametrize("stored", ["in, out", "out, in"])
def test_plain_parameters_of_either_orientation(stored):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "qkvo":
                setattr(self, f"w_{name}", nn.Parameter(torch.randn(E, E) / E**0.5))

        def forward(self, x):
            w = [getattr(self, f"w_{name}") for name in "qkvo"]
            q, k, v, o = w if stored == "in, out" else [t.T for t in w]
            return attend(x @ q, x @ k, x @ v) @ o

    report = mh.diagnose(Plain(), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy", report
    assert any(f"({stored})" in note for note in report.notes)


def test_three_axes():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(E, H, D) / E**0.5) for _ in range(3))
            self.w_o = nn.Parameter(torch.randn(H, D, E) / E**0.5)

        def forward(self, x):
            q, k, v = (torch.einsum("bne,ehd->bhnd", x, w) for w in (self.w_q, self.w_k, self.w_v))
            return torch.einsum("bhnd,hde->bne", F.scaled_dot_product_attention(q, k, v), self.w_o)

    assert mh.diagnose(Three(), None, torch.randn(2, N, E), heads=H).verdict == "healthy"


def test_a_transposed_linear_is_a_mistake():
    class Transposed(Named):
        def forward(self, x):
            q, k, v, o = (getattr(self, name) for name in self.names)
            q, k, v = (x @ p.weight + p.bias for p in (q, k, v))
            return o(attend(q, k, v))

    report = mh.diagnose(Transposed(NAMES[0]), None, torch.randn(2, N, E), heads=H)
    assert report.cause == "weight used transposed (W_q, W_k and W_v)", report


def test_unknown_names_are_read_in_the_order_of_declaration_and_then_searched():
    report = mh.diagnose(Named(("a", "b", "c", "d")), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy"
    assert any("declared first was taken for q" in note for note in report.notes)
    module = Named(("a", "b", "c", "d"))
    module.names = ("b", "c", "d", "a")  # the output was declared first
    report = mh.diagnose(module, None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy", report
    assert any("read by search" in note for note in report.notes)


def test_a_map():
    module = Named(("a", "b", "c", "d"))
    names = {"q": "b.weight", "k": "a.weight", "v": {"weight": "c.weight", "bias": "c.bias"}, "o": "d.weight"}
    report = mh.diagnose(module, None, torch.randn(2, N, E), heads=H, weights=names)
    assert report.cause == "q and k swapped"
    with pytest.raises(ValueError, match=r"'z\.weight', but the parameters are a\.weight"):
        mh.diagnose(module, None, torch.randn(2, N, E), heads=H, weights=names | {"q": "z.weight"})
    with pytest.raises(ValueError, match="lacks o"):
        mh.diagnose(module, None, torch.randn(2, N, E), heads=H, weights={m: names[m] for m in "qkv"})


def test_parameters_that_are_nothing_known():
    report = mh.diagnose(nn.Linear(E, E), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "unknown"
    assert "not recognised" in report.where[0]
    assert mh.diagnose(lambda x: x, None, torch.randn(2, N, E), heads=H).verdict == "unknown"


def test_other_weights_than_the_references():
    report = mh.diagnose(Named(NAMES[0]), mh.MultiHeadAttention(E, heads=H), torch.randn(2, N, E))
    assert report.cause == "its weights are not the reference's", report
    assert "W_q, W_k, W_v, W_o" in report.explanation


def test_what_was_not_said_is_found_and_noted():
    layer = mh.MultiHeadAttention(E, heads=H, rope=mh.RoPE(pairing="interleaved"))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj

        def forward(self, x):
            return layer(x, mask=mh.Causal())

    report = mh.diagnose(Llama(), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy", report
    assert "RoPE (pairing 'interleaved') and a causal mask" in report.notes[0]
    report = mh.diagnose(Llama(), None, torch.randn(2, N, E), mask=mh.Causal(), heads=H, rope=True)
    assert report.cause == "RoPE pairs halves against interleaved"


def test_a_mistake_beside_what_was_not_said():
    layer = mh.MultiHeadAttention(E, heads=H, rope=True)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj

        def forward(self, x):
            t = mh.trace(layer, x)
            weights = (t["scores"] * D**0.5).softmax(-1)
            return self.o_proj((weights @ t["v_heads"]).transpose(1, 2).flatten(2))

    report = mh.diagnose(Llama(), None, torch.randn(2, N, E), heads=H)
    assert report.cause == "scale missing", report
    assert "RoPE (pairing 'halves')" in report.notes[0]


@pytest.mark.wrong
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_in_one_sequence_with_the_output(kind):
    """As in many a vision transformer: the norm's parameters are no bias of W_o."""

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_qkv = nn.Linear(E, 3 * E, bias=False)
            self.to_out = nn.Sequential(nn.Linear(E, E), kind(E))

        def forward(self, x):
            return self.to_out(attend(*self.to_qkv(x).chunk(3, dim=-1)))

    report = mh.diagnose(Vision(), None, torch.randn(2, N, E), heads=H)
    assert report.cause == f"a norm inside ({kind.__name__} on the output)", report


@pytest.mark.parametrize("wrap", [lambda y, w: (w, y), lambda y, w: {"weights": w, "out": y}, lambda y, w: (w, (y, w))])
def test_an_output_that_does_not_come_first(wrap):
    class Wrapped(Named):
        def forward(self, x):
            q, k, v, o = (getattr(self, name) for name in self.names)
            return wrap(o(attend(q(x), k(x), v(x))), torch.zeros(2, H, N, N))

    report = mh.diagnose(Wrapped(NAMES[0]), None, torch.randn(2, N, E), heads=H)
    assert report.verdict == "healthy", report
    assert "it returns several things: the one with the shape of x was taken for the output" in report.notes


def test_an_output_of_another_shape_among_others_is_still_said():
    class Wrapped(Named):
        def forward(self, x):
            return x.new_zeros(2, H, N, D), x.new_zeros(2, 1)

    report = mh.diagnose(Wrapped(NAMES[0]), None, torch.randn(2, N, E), heads=H)
    assert "the shape (2, 4, 5, 8)" in report.headline, report
