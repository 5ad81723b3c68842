"""A separate input for values, a mask for each row of the batch, and means that leave padding out."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import multihead as mh

B, N, K, E, H = 2, 5, 7, 32, 4
MODEL = {"vocab_size": 61, "hidden_size": E, "num_hidden_layers": 1, "num_attention_heads": H}
TOKENS = {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_values_are_made_of_another_sequence(cross: bool, grad: bool) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    layer = mh.MultiHeadAttention(E, H)
    mh.load_weights(layer, theirs.state_dict())
    x = torch.randn(B, N, E)
    keys = torch.randn(B, K, E) if cross else x
    values = torch.randn_like(keys)
    with torch.set_grad_enabled(grad):
        found = layer(x, keys if cross else None, values=values)
        assert_close(found, theirs(x, keys, values)[0], atol=1e-5, rtol=1e-5)
        assert_close(layer(x[0], keys[0] if cross else None, values=values[0]), found[0], atol=1e-5, rtol=1e-5)


def test_values_join_a_cache() -> None:
    layer, x, values = mh.MultiHeadAttention(E, H, rope=True), torch.randn(B, N, E), torch.randn(B, N, E)
    expected, cache = layer(x, mask=mh.Causal(), values=values), layer.new_cache(batch=B)
    rows = [layer(x[:, n : n + 1], mask=mh.Causal(), cache=cache, values=values[:, n : n + 1]) for n in range(N)]
    assert_close(torch.cat(rows, 1), expected, atol=1e-5, rtol=1e-5)


def test_values_that_do_not_fit_are_refused_in_words() -> None:
    layer, x, context = mh.MultiHeadAttention(E, H), torch.randn(B, N, E), torch.randn(B, K, E)
    with pytest.raises(ValueError, match=r"values has shape \(2, 5, 32\): expected \(2, 7, 32\), as context"):
        layer(x, context, values=x)
    with pytest.raises(ValueError, match=r"values has shape \(2, 7, 32\): expected \(2, 5, 32\), as x"):
        layer(x, values=context)
    with pytest.raises(ValueError, match="leave out values="):
        layer(x, cache=layer.new_cache(context=context), values=context)
    with pytest.raises(TypeError, match="what a layer's values are made of as values="):
        layer(x, context, context)


def test_a_mask_for_each_row_of_the_batch_is_told_how() -> None:
    layer, x = mh.MultiHeadAttention(E, H), torch.randn(B, N, E)
    mask = torch.rand(B, N, N) < 0.7
    for wrong in ({"mask": mask}, {"bias": mask.float()}):
        with pytest.raises(ValueError, match=r"\(2, 5, 5\): .*one for each row of the batch is given as \[:, None\]"):
            layer(x, **wrong)
    assert layer(x, mask=mask[:, None]).shape == x.shape
    with pytest.raises(ValueError, match=r"\(3, 5, 5\)") as refused:
        layer(x, mask=torch.ones(3, N, N, dtype=torch.bool))
    assert "None" not in str(refused.value)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mean_leaves_padded_rows_out(side: str, causal: bool) -> None:
    layer, x, lengths = mh.MultiHeadAttention(E, H), torch.randn(B, N, E), [N, 3]
    mask = mh.Padding(lengths, side=side)
    mask = mask & mh.Causal() if causal else mask
    heads = mh.trace(layer, x, mask=mask)["heads"]  # (B, H, Q, V)
    real = torch.ones(B, N, dtype=torch.bool)
    real[1, slice(3, None) if side == "right" else slice(0, 2)] = False
    expected = heads[:, 1].permute(2, 0, 1)[:, real].mean(-1)
    seen = []
    with mh.ablate(layer, 1, with_="mean"), mh.patch(layer, "merged", lambda t: seen.append(t) or t):
        layer(x, mask=mask)
    merged = seen[0].unflatten(-1, (H, -1))[:, :, 1]
    assert_close(merged, expected.expand_as(merged))


def test_a_mean_leaves_out_tokens_beyond_lengths_and_counts_all_of_a_query_over_a_padded_context() -> None:
    layer, x = mh.MultiHeadAttention(E, H), torch.randn(B, N, E)
    for call, counted in (
        ({"lengths": [N, 3]}, [N, 3]),
        ({"context": torch.randn(B, N, E), "mask": mh.Padding([N, 2])}, [N, N]),
        ({"mask": mh.Causal()}, [N, N]),
        ({"mask": torch.ones(N, N).tril(-1).bool()}, None),  # the first query sees nothing
    ):
        heads = mh.trace(layer, x, **call)["heads"]
        rows = [heads[b, 2, slice(0, n)] for b, n in enumerate(counted)] if counted else [heads[:, 2, 1:].flatten(0, 1)]
        expected, seen = torch.cat(rows).mean(0), []
        with mh.ablate(layer, 2, with_="mean"), mh.patch(layer, "merged", lambda t, s=seen: s.append(t) or t):
            layer(x, **call)
        assert_close(seen[0].unflatten(-1, (H, -1))[0, 0, 2], expected)
    assert layer._visibility is None


def test_a_mean_in_a_hugging_face_model_leaves_padded_rows_out() -> None:
    transformers, hf = pytest.importorskip("transformers"), pytest.importorskip("multihead.hf")

    for kind, config, side in (
        ("GPT2Model", transformers.GPT2Config(vocab_size=61, n_embd=E, n_layer=1, n_head=H, **TOKENS), "left"),
        ("BertModel", transformers.BertConfig(**MODEL), "right"),
    ):
        model = getattr(transformers, kind)(config).eval()
        model.set_attn_implementation("multihead")
        tokens, real = torch.randint(1, 61, (B, N)), torch.ones(B, N, dtype=torch.long)
        real[1, slice(0, 2) if side == "left" else slice(3, None)] = 0
        whole: list[torch.Tensor] = []
        ablated: list[torch.Tensor] = []
        with torch.no_grad():
            with hf.patch(model, 0, lambda t, kept=whole: kept.append(t) or t):
                model(tokens, attention_mask=real)
            with (
                hf.ablate(model, {0: 1}, with_="mean"),
                hf.patch(model, 0, lambda t, kept=ablated: kept.append(t) or t),
            ):
                model(tokens, attention_mask=real)
        expected = whole[0][:, 1].permute(2, 0, 1)[:, real.bool()].mean(-1)
        assert_close(ablated[0][:, 1], expected.expand_as(ablated[0][:, 1]))


def test_three_axes_are_heads_also_where_the_batch_is_as_many() -> None:
    """Right-aligned, as everywhere: what was meant by row is not guessed, and `explain` says how it is read."""
    q, k, v = (torch.randn(4, 4, 5, 3) for _ in "qkv")
    by_row = torch.rand(4, 5, 5) > 0.4
    by_row[:, :, 0] = True
    assert torch.equal(mh.attend(q, k, v, by_row), mh.attend(q, k, v, by_row[None]))
    assert not torch.allclose(mh.attend(q, k, v, by_row), mh.attend(q, k, v, by_row[:, None]))
    said = (
        "the mask has shape (4, 5, 5), and B is H: it is taken for (H,Q,K); one for each row of the batch is given as"
    )
    for mask in (by_row, mh.Allowed(by_row), mh.Allowed(by_row) & mh.Causal()):
        assert said in str(mh.explain(q, k, v, mask))
    assert "bias has shape (4, 5, 5)" in str(mh.explain(q, k, v, bias=by_row.float()))
    for mask in (None, mh.Causal(), by_row[:, None], by_row[:1]):
        assert not mh.explain(q, k, v, mask).notes
    assert not mh.explain(q[:3], k[:3], v[:3], by_row).notes
