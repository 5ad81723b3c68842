"""transformers' attention interface, argument by argument: what a model passes, and what is refused."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import multihead as mh
import multihead.hf
from multihead.hf.interface import attention
from tests.hf_architectures import tokens
from tests.hf_running import llama, logits, padding

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


def test_set_attn_implementation_and_from_pretrained(tmp_path: Any) -> None:
    model = llama("eager")
    ids, plain = tokens(2, 9), logits(model, tokens(2, 9))
    model.set_attn_implementation("multihead")
    with mh.hf.watch(model) as seen:
        torch.testing.assert_close(logits(model, ids), plain)
    assert len(seen) == 2
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="multihead")
    with mh.hf.watch(loaded) as seen:
        torch.testing.assert_close(logits(loaded, ids), plain)
    assert len(seen) == 2


def dense_4d(kind: str) -> Tensor:
    """Causal, with one more key hidden in one row."""
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    allowed[1, :, 5:, 2] = False
    if kind == "bool":
        return allowed
    return torch.zeros(2, 1, 9, 9).masked_fill(
        ~allowed, torch.finfo(torch.float32).min if kind == "min" else -torch.inf
    )


@pytest.mark.parametrize("kind", ["bool", "min", "-inf"])
def test_four_axes(kind: str) -> None:
    ours, eager, ids = llama(), llama("eager"), tokens(2, 9)
    expected = logits(eager, ids, attention_mask=dense_4d("min"))
    torch.testing.assert_close(logits(ours, ids, attention_mask=dense_4d(kind)), expected)


def test_a_float_mask_is_added() -> None:
    q, added = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 5)
    out, weights = attention(nn.Module(), q, q, q, added, output_attentions=True)
    expected = (q @ q.mT / 8**0.5 + added).softmax(-1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ q).transpose(1, 2))


def test_packed_sequences_by_positions_and_by_lengths() -> None:
    ours, ids = llama(), tokens(1, 9)
    apart = torch.cat([logits(ours, ids[:, :4]), logits(ours, ids[:, 4:])], dim=1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(logits(ours, ids, position_ids=positions, use_cache=False), apart)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    torch.testing.assert_close(logits(ours, ids, position_ids=positions, **packed), apart)


def test_lengths_without_a_mask() -> None:
    q, ends = torch.randn(1, 4, 9, 8), torch.tensor([0, 4, 9])
    out, _ = attention(nn.Module(), q, q, q, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    expected = mh.attend(q, q, q, mask=mh.Documents([4, 5]) & mh.Causal())
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("Q", "K", "given", "mask"),
    [
        (5, 5, {}, mh.Causal()),
        (5, 5, {"is_causal": False}, None),
        (1, 5, {}, None),
        (5, 5, {"sliding_window": 2}, mh.Causal(window=2)),
        (5, 5, {"sliding_window": 2, "is_causal": False}, mh.Window(1, 1)),
        (3, 7, {}, mh.Allowed(torch.ones(3, 7, dtype=torch.bool).tril())),
    ],
    ids=[
        "causal unless told",
        "told",
        "decode",
        "window",
        "window both ways",
        "prefill of a static cache: later keys are empty",
    ],
)
def test_without_a_mask(Q: int, K: int, given: dict[str, Any], mask: Any) -> None:
    q, k, v = torch.randn(2, 4, Q, 8), torch.randn(2, 2, K, 8), torch.randn(2, 2, K, 6)
    out, weights = attention(nn.Module(), q, k, v, None, output_attentions=True, **given)
    torch.testing.assert_close(out, mh.attend(q, k, v, mask=mask).transpose(1, 2))
    torch.testing.assert_close(weights, mh.look(q, k, mask=mask).weights())
    assert out.is_contiguous()


def test_every_argument_at_once_in_the_order_of_eager() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    bias, sinks, hidden = torch.randn(1, 4, 5, 5), torch.randn(4), torch.rand(2, 1, 5, 5) < 0.3
    given = {"scaling": 0.7, "softcap": 1.5, "s_aux": sinks, "position_bias": bias}
    out, weights = attention(nn.Module(), q, k, v, ~hidden, output_attentions=True, **given)
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.7 / 1.5) * 1.5 + bias
    scores = scores.masked_fill(hidden, -torch.inf)
    expected = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ v.repeat_interleave(2, 1)).transpose(1, 2))


def test_what_is_not_known_is_refused_by_name() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"Module passes block_indices, head_mask to its attention"):
        attention(nn.Module(), q, q, q, None, head_mask=torch.ones(2), block_indices=torch.ones(1), use_cache=True)
    attention(nn.Module(), q, q, q, None, head_mask=None, position_ids=torch.arange(3))
    with pytest.raises(ValueError, match="head_mask"):
        llama()(tokens(1, 5), head_mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 3, 5\)"):
        attention(nn.Module(), q, q, q, torch.ones(1, 1, 3, 5, dtype=torch.bool))


def test_dropout_in_training_only() -> None:
    model, ids = llama(attention_dropout=0.5), tokens(2, 9)
    still = logits(model, ids)
    assert torch.equal(logits(model, ids), still)
    model.train()
    torch.manual_seed(5)
    first = logits(model, ids)
    assert not torch.allclose(first, still)
    assert not torch.equal(logits(model, ids), first)
    torch.manual_seed(5)
    assert torch.equal(logits(model, ids), first)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gradients_equal_eager_with_padding_on_the_left() -> None:
    found = []
    for name in ("multihead", "eager"):
        model, ids, real = llama(name), tokens(2, 9), padding(9, "left")
        labels = ids.masked_fill(real == 0, -100)
        labels[0, 4] = -100  # the first real token would be predicted by padding
        model(ids, attention_mask=real, labels=labels).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], msg=name)


def test_the_last_padded_query_learns_by_itself_as_with_sdpa() -> None:
    """Under the label shift it predicts the first real token: its attention is 0, and no other position is reached."""
    found = []
    for name in ("multihead", "sdpa"):
        model, ids, real = llama(name), tokens(2, 9), padding(9, "left")
        labels = torch.full_like(ids, -100)
        labels[0, 4] = ids[0, 4]
        x = model.get_input_embeddings()(ids.clamp(min=1)).detach().requires_grad_()
        model(inputs_embeds=x, attention_mask=real, labels=labels).loss.backward()
        assert (x.grad.abs().sum(-1) > 0).nonzero().tolist() == [[0, 3]]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            if "layers" in name:
                assert (gradient == 0).all() == any(part in name for part in ("self_attn", "input_layernorm")), name
        found.append(gradients)
    torch.testing.assert_close(*found)


def test_gradient_checkpointing() -> None:
    model, ids = llama(), tokens(2, 9)
    model.train()
    model(ids, attention_mask=padding(9, "left"), labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", None)  # as transformers 5.23 names it
    (enable or model.gradient_checkpointing_enable)()
    model(ids, attention_mask=padding(9, "left"), labels=ids, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], msg=name)


def test_compiled() -> None:
    model, ids, real = llama(), tokens(2, 9), padding(9, "left")
    expected = logits(model, ids, attention_mask=real)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(ids, attention_mask=real, use_cache=False).logits
    torch.testing.assert_close(found[real.bool()], expected[real.bool()])
