"""The layer sharded by heads, by sequence and by both: output, gradients, caches, lens and state as in one process.

Longer than other files because three ways to shard a layer are held against one process.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import multihead as mh
import multihead.distributed
from tests.distributed import bound
from tests.distributed.pool import SIZES, Pool

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"heads": 4},
    "everything": {
        "heads": 8, "kv_heads": 4, "head_dim": 6, "value_dim": 10, "rope": True, "qk_norm": True, "softcap": 3.0, "sinks": True,
    },
    "few kv heads": {"heads": 6, "kv_heads": 2, "head_dim": 4, "rope": True, "sinks": True, "qk_norm": True},
    "uneven heads": {"heads": 5, "head_dim": 4, "bias": False},
}  # fmt: skip
MASKS = {
    "none": None,
    "causal": mh.Causal(),
    "window": mh.Causal(window=4),
    "padding": mh.Padding([7, 19]) & mh.Causal(),
}
N, E = 19, 24


def make(name: str, dtype: torch.dtype, **more: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(3)
    layer = mh.MultiHeadAttention(E, **LAYERS[name], **more)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) / 4)
    return layer.to(dtype)


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def one_process(name: str, mask: str, dtype: torch.dtype, backend: str, row_by_row: bool = False) -> dict[str, Tensor]:
    layer, x = make(name, dtype), numbers(dtype, 2, N, E).requires_grad_()
    if row_by_row:  # another order of summation
        masks = [mh.Padding([n]) & mh.Causal() for n in (7, 19)] if mask == "padding" else [MASKS[mask]] * 2
        y = torch.cat([layer(x[b : b + 1], mask=masks[b], backend=backend) for b in (0, 1)])
    else:
        y = layer(x, mask=MASKS[mask], backend=backend)
    (y * numbers(dtype, 2, N, E, seed=1)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def plain(name: str, mask: str) -> list[dict[str, Tensor]]:
    """One process in float32, in the orders in which it may sum."""
    return [one_process(name, mask, torch.float32, b, rows) for b in ("reference", "native") for rows in (False, True)]


def compare(found: dict[str, Any], name: str, mask: str) -> list[str]:
    right = one_process(name, mask, torch.float64, "reference")
    plains, wrong = plain(name, mask), []
    for key in found.keys() & right.keys():
        value = right[key]
        label, got = f"{name}, {mask}, {key}", torch.as_tensor(found[key])
        wrong += bound.check(label, got, [p[key] for p in plains], value.numpy(), torch.float32)
    return wrong


def sequence(mesh: Any, method: str) -> dict[tuple[str, str], dict[str, Any]]:
    rank, ranks, found = mesh.get_local_rank(), mesh.size(), {}
    for name in LAYERS:
        if method == "ulysses" and LAYERS[name]["heads"] < ranks:
            continue
        layer = mh.distributed.shard_sequence(make(name, torch.float32), mesh, method=method)
        for mask in MASKS:
            layer.zero_grad()
            x = numbers(torch.float32, 2, N, E).tensor_split(ranks, 1)[rank].clone().requires_grad_()
            y = layer(x, mask=MASKS[mask])
            (y * numbers(torch.float32, 2, N, E, seed=1).tensor_split(ranks, 1)[rank]).sum().backward()
            mh.distributed.sum_gradients(layer, mesh)
            grads = {n: p.grad.numpy() for n, p in layer.named_parameters()}
            found[name, mask] = {"y": y.detach().numpy(), "x": x.grad.numpy(), **grads}
    return found


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_sequence_sharded_layer_is_that_of_one_process(pool: Pool, method: str, ranks: int) -> None:
    answers, wrong = pool.run(sequence, ranks, method), []
    for name, mask in answers[0]:
        parts = [answer[name, mask] for answer in answers]
        cut = {key: torch.cat([torch.as_tensor(p[key]) for p in parts], 1) for key in ("x", "y")}
        wrong += compare({**parts[-1], **cut}, name, mask)
    assert not wrong, "\n".join(wrong)


def by_heads(mesh: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for name in LAYERS:
        whole = make(name, torch.float32)
        layer = mh.distributed.shard_heads(make(name, torch.float32), mesh)
        state = layer.state_dict()
        assert all(torch.equal(state[key], value) for key, value in whole.state_dict().items())
        layer.load_state_dict(state)
        with torch.no_grad():  # the cache has this rank's heads, and decoding gives the same rows
            x = numbers(torch.float32, 2, N, E)
            kept = layer.new_cache(batch=2)
            steps = torch.cat([layer(x[:, n : n + 1], mask=mh.Causal(), cache=kept) for n in range(N)], 1)
            assert kept.k.shape[1] == layer.k_proj.out_features // layer.sizes.D
        for mask in MASKS:
            layer.zero_grad()
            x = numbers(torch.float32, 2, N, E).requires_grad_()
            y = layer(x, mask=MASKS[mask])
            (y * numbers(torch.float32, 2, N, E, seed=1)).sum().backward()
            grads = {}
            for module_name, module in layer.named_modules():
                for n, p in module.named_parameters(module_name, recurse=False):
                    shard = getattr(module, "_multihead_shards", {}).get(n.split(".")[-1])
                    grads[n] = (p.grad if shard is None else shard.gather(p.grad)).numpy()
            found[name, mask] = {"y": y.detach().numpy(), "x": x.grad.numpy(), **grads}
        found[name, "causal"]["decoded"] = steps.numpy()
    return found


@pytest.mark.parametrize("ranks", SIZES)
def test_heads_sharded_layer_is_that_of_one_process(pool: Pool, ranks: int) -> None:
    answers, wrong = pool.run(by_heads, ranks), []
    for rank in range(ranks):
        for (name, mask), found in answers[rank].items():
            wrong += [f"rank {rank}: {what}" for what in compare(found, name, mask)]
            if "decoded" in found:
                wrong += compare({"y": found["decoded"]}, name, mask)
    assert not wrong, "\n".join(wrong)


def both(mesh: Any) -> list[Any]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rank, found = grid["cp"].get_local_rank(), []
    for name in ("everything", "few kv heads"):
        layer = make(name, torch.float32)
        mh.distributed.shard_heads(layer, grid["tp"])
        mh.distributed.shard_sequence(layer, grid["cp"])
        for mask in MASKS:
            layer.zero_grad()
            x = numbers(torch.float32, 2, N, E).tensor_split(2, 1)[rank].clone().requires_grad_()
            y = layer(x, mask=MASKS[mask])
            (y * numbers(torch.float32, 2, N, E, seed=1).tensor_split(2, 1)[rank]).sum().backward()
            found.append((name, mask, rank, y.detach().numpy(), x.grad.numpy()))
        looked = asked(layer.look(numbers(torch.float32, 2, N, E).tensor_split(2, 1)[rank], mask=MASKS["padding"]))
        found.append((name, "look", rank, looked))
    return found


def test_both_on_a_grid_of_ranks(pool: Pool) -> None:
    answers, wrong = pool.run(both, 4), []
    for number, (name, mask, *_) in enumerate(answers[0]):
        if mask == "look":
            wrong += [what for answer in answers for what in compare_look(answer[number][3], name)]
            continue
        right = one_process(name, mask, torch.float64, "reference")
        plains = plain(name, mask)
        for tp in (0, 1):
            for place, key in ((3, "y"), (4, "x")):
                got = torch.cat([torch.as_tensor(answers[2 * cp + tp][number][place]) for cp in (0, 1)], 1)
                wrong += bound.check(
                    f"{name}, {mask}, {key}", got, [p[key] for p in plains], right[key].numpy(), torch.float32
                )
    assert not wrong, "\n".join(wrong)


ASKS: dict[str, tuple[Any, ...]] = {"rows": ([3, -1],), "received": (), "entropy": (), "map": (4, 5)}


def asked(lens: Any) -> dict[str, Any]:
    return {ask: getattr(lens, ask)(*args).detach().numpy() for ask, args in ASKS.items()}


@cache
def looked_alone(name: str, dtype: torch.dtype, row_by_row: bool = False) -> dict[str, Any]:
    layer, x = make(name, dtype), numbers(dtype, 2, N, E)
    if not row_by_row:
        return asked(layer.look(x, mask=MASKS["padding"]))
    rows = [asked(layer.look(x[b : b + 1], mask=mh.Padding([n]) & mh.Causal())) for b, n in enumerate((7, 19))]
    return {ask: np.concatenate([row[ask] for row in rows]) for ask in ASKS}


def compare_look(found: dict[str, Any], name: str) -> list[str]:
    right, wrong = looked_alone(name, torch.float64), []
    plains = [looked_alone(name, torch.float32, row_by_row) for row_by_row in (False, True)]
    for ask in ASKS:
        others = [torch.as_tensor(plain[ask]) for plain in plains]
        wrong += bound.check(f"{name}, {ask}", torch.as_tensor(found[ask]), others, right[ask], torch.float32)
    return wrong


def look(mesh: Any, shard: str) -> dict[str, Any]:
    rank, ranks, found = mesh.get_local_rank(), mesh.size(), {}
    for name in ("everything", "few kv heads"):
        layer, x = make(name, torch.float32), numbers(torch.float32, 2, N, E)
        if shard == "heads":
            lens = mh.distributed.shard_heads(layer, mesh).look(x, mask=MASKS["padding"])
        else:
            mine = x.tensor_split(ranks, 1)[rank]
            lens = mh.distributed.shard_sequence(layer, mesh, method=shard).look(mine, mask=MASKS["padding"])
        found[name] = asked(lens)
    return found


@pytest.mark.parametrize("shard", ["heads", "ring"])
def test_lens_sees_what_one_process_sees(pool: Pool, shard: str) -> None:
    for answer in pool.run(look, 3, shard):
        for name, found in answer.items():
            assert not compare_look(found, name)


def dropped(mesh: Any, shard: str) -> Any:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    layer = make("everything", torch.float32, dropout=0.4).train()
    x = numbers(torch.float32, 2, N, E)
    torch.manual_seed(11)
    if shard == "heads":
        return mh.distributed.shard_heads(layer, mesh)(x, mask=mh.Causal()).detach().numpy()
    mine = x.tensor_split(ranks, 1)[rank]
    return mh.distributed.shard_sequence(layer, mesh, method=shard)(mine, mask=mh.Causal()).detach().numpy()


@pytest.mark.parametrize("shard", ["heads", "ring", "ulysses", "gather"])
def test_dropout_drops_what_one_process_drops(pool: Pool, shard: str) -> None:
    answers = pool.run(dropped, 3, shard)
    found = answers[0] if shard == "heads" else torch.cat([torch.as_tensor(a) for a in answers], 1)

    def alone(dtype: torch.dtype, backend: str) -> Tensor:
        torch.manual_seed(11)
        layer = make("everything", dtype, dropout=0.4).train()
        torch.manual_seed(11)
        return layer(numbers(dtype, 2, N, E), mask=mh.Causal(), backend=backend).detach()

    right = alone(torch.float64, "reference").numpy()
    plains = [alone(torch.float32, backend) for backend in ("reference", "native")]
    assert not bound.check("y", torch.as_tensor(found), plains, right, torch.float32)


def crossed(mesh: Any, method: str) -> Any:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    layer = mh.distributed.shard_sequence(make("everything", torch.float32), mesh, method=method)
    x, context = numbers(torch.float32, 2, N, E), numbers(torch.float32, 2, 31, E, seed=2)
    x, context = x.tensor_split(ranks, 1)[rank], context.tensor_split(ranks, 1)[rank]
    with torch.no_grad():
        direct = layer(x, context, mask=mh.Causal())
        kept = layer(x, mask=mh.Causal(), cache=layer.new_cache(context=context))
    return direct.numpy(), kept.numpy()


@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_cross_attention(pool: Pool, method: str) -> None:
    answers = pool.run(crossed, 3, method)

    def alone(dtype: torch.dtype) -> Tensor:
        x, context = numbers(dtype, 2, N, E), numbers(dtype, 2, 31, E, seed=2)
        return make("everything", dtype)(x, context, mask=mh.Causal(), backend="reference").detach()

    for parts in zip(*answers):  # the context given, and the context from a cache
        found = torch.cat([torch.as_tensor(part) for part in parts], 1)
        assert not bound.check("y", found, [alone(torch.float32)], alone(torch.float64).numpy(), torch.float32)


def biased(mesh: Any, method: str) -> Any:
    """A bias with rows for this rank's queries only, and one that differs by head."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    layer = mh.distributed.shard_sequence(make("plain", torch.float32), mesh, method=method)
    x, bias = numbers(torch.float32, 2, N, E).tensor_split(ranks, 1)[rank], numbers(torch.float32, 4, N, N, seed=9)
    mine = bias.tensor_split(ranks, 1)[rank].clone().requires_grad_()
    y = layer(x, mask=mh.Causal(), bias=mine)
    y.square().sum().backward()
    return y.detach().numpy(), mine.grad.numpy()


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_bias_with_rows_for_one_rank(pool: Pool, method: str) -> None:
    answers = pool.run(biased, 3, method)

    def alone(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        bias = numbers(dtype, 4, N, N, seed=9).requires_grad_()
        y = make("plain", dtype)(numbers(dtype, 2, N, E), mask=mh.Causal(), bias=bias, backend="reference")
        y.square().sum().backward()
        return y.detach(), bias.grad

    for place, (name, right, plain) in enumerate(zip("yb", alone(torch.float64), alone(torch.float32))):
        found = torch.cat([torch.as_tensor(a[place]) for a in answers], 1)
        assert not bound.check(name, found, [plain], right.numpy(), torch.float32)


def decoded(mesh: Any, capacity: int | None) -> Any:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    layer = mh.distributed.shard_sequence(make("everything", torch.float32), mesh).eval()
    x = numbers(torch.float32, 2, N, E)
    prompt, rest, found = x[:, :11], x[:, 11:], {}
    for mask in ("causal", "window"):
        cache = layer.new_cache(batch=2, capacity=capacity)
        with torch.no_grad():
            with mh.distributed.prefill(cache):
                layer(prompt.tensor_split(ranks, 1)[rank], mask=MASKS[mask], cache=cache)
            parts = [layer(rest[:, :3], mask=MASKS[mask], cache=cache)]
            parts += [layer(rest[:, n : n + 1], mask=MASKS[mask], cache=cache) for n in range(3, rest.shape[1])]
        assert cache.length == N
        assert sum(cache.counts) == N
        assert max(cache.counts) <= -(-N // ranks) + 2, cache.counts  # nobody is left with much more than the others
        assert cache.k.shape[2] == cache.counts[rank]
        found[mask] = torch.cat(parts, 1).numpy()
    if capacity is not None:
        many = numbers(torch.float32, 2, ranks * capacity, E)
        with torch.no_grad(), pytest.raises(mh.CacheOverflow, match="full on every rank"):
            layer(many, mask=mh.Causal(), cache=cache)
        assert cache.length == N  # a call that fails leaves the cache as it was
    cache.crop(5)
    assert (cache.length, sum(cache.counts)) == (5, 5)
    return found


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("capacity", [None, 10])
def test_decoding_with_a_spread_cache(pool: Pool, ranks: int, capacity: int | None) -> None:
    judge_decoded(pool.run(decoded, ranks, capacity))


def judge_decoded(answers: list[Any]) -> None:
    """All ranks have the same rows, to the last bit, and they are those of one process."""
    for mask in ("causal", "window"):
        right = one_process_without_batch_mask(mask, torch.float64)
        plain = one_process_without_batch_mask(mask, torch.float32)
        for answer in answers:
            assert (answer[mask] == answers[0][mask]).all()  # to the last bit
            assert not bound.check(mask, torch.as_tensor(answer[mask]), [plain], right.numpy(), torch.float32)


def one_process_without_batch_mask(mask: str, dtype: torch.dtype) -> Tensor:
    return one_process("everything", mask, dtype, "reference")["y"][:, 11:]


def refused(mesh: Any) -> list[str]:
    def why(act: Callable[[], object]) -> str:
        try:
            act()
        except (ValueError, TypeError) as error:
            return str(error)
        return "nothing"

    fresh = lambda **more: mh.MultiHeadAttention(E, heads=4, **more)  # noqa: E731
    shard, x = mh.distributed.shard_sequence, torch.randn(2, 3, E)
    dynamic = mh.RoPE(scaling=mh.positions.NTKScaling(2.0, original_length=8))
    layer = shard(fresh(), mesh)
    return [
        why(lambda: shard(fresh(), mesh, method="rings")),
        why(lambda: shard(nn.Linear(2, 2), mesh)),
        why(lambda: shard(fresh(rope=dynamic), mesh)),
        why(lambda: layer(x, lengths=[2, 3])),
        why(lambda: layer(x, cache=fresh().new_cache(batch=2))),
        why(lambda: layer.new_cache(window=3)),
        why(lambda: shard(layer, mesh)),
        why(lambda: mh.distributed.shard_heads(mh.MultiHeadAttention(E, heads=1), mesh)),
        why(lambda: mh.distributed.shard_heads(layer, mesh)),
        why(lambda: mh.distributed.attend(x[None], x[None], x[None], mesh="cp")),
        why(lambda: layer(x, bias=torch.zeros(5, 5))),
    ]


def test_what_cannot_be_honoured_is_refused_in_words(pool: Pool) -> None:
    expected = [
        "method='rings': expected one of ring, ulysses, gather",
        "Linear has no MultiHeadAttention",
        "dynamic scaling",
        "expected mask=Padding(lengths)",
        "expected one from the sharded layer's new_cache()",
        "give mask=Causal(window=…)",
        "sharded by sequence already",
        "H=1 heads cannot be split over 2 ranks",
        "call shard_heads first",
        "mesh is a str: expected a DeviceMesh",
        "bias is",
    ]
    for answer in pool.run(refused, 2):
        for said, wanted in zip(answer, expected, strict=True):
            assert wanted in said


def with_values(mesh: Any) -> list[Any]:
    """What each kind of sharded layer makes of values of another sequence, and what its lens knows of a score."""
    rank, ranks, found = mesh.get_local_rank(), mesh.size(), []
    x, values = numbers(torch.float32, 2, N, E), numbers(torch.float32, 2, N, E, seed=1)
    parts = [t.tensor_split(ranks, 1)[rank] for t in (x, values)]
    for shard, (own_x, own_values) in (
        (mh.distributed.shard_sequence, parts),
        (mh.distributed.shard_heads, (x, values)),
    ):
        layer, own_values = shard(make("few kv heads", torch.float32), mesh), own_values.clone().requires_grad_()
        y = layer(own_x, mask=mh.Causal(), values=own_values)
        y.sum().backward()
        why = layer.look(own_x, mask=mh.Causal()).why(query=-1, key=1, head=-1)
        found.append((y.detach().numpy(), own_values.grad.numpy(), why.score, float(why.frequencies.sum()), why.terms))
    return found


def test_values_and_why_in_a_sharded_layer(pool: Pool) -> None:
    @cache
    def alone(dtype: torch.dtype, backend: str = "reference") -> tuple[Tensor, Tensor, Tensor]:
        layer, x = make("few kv heads", dtype), numbers(dtype, 2, N, E)
        values = numbers(dtype, 2, N, E, seed=1).requires_grad_()
        y = layer(x, mask=mh.Causal(), values=values, backend=backend)
        y.sum().backward()
        score = layer.look(x, mask=mh.Causal()).why(query=-1, key=1, head=-1).score
        return y.detach(), values.grad, torch.tensor([score], dtype=torch.float64)

    answers = pool.run(with_values, 2)
    by_sequence, by_heads = zip(*answers)

    def check(n: int, found: Any) -> list[str]:
        plains = [alone(torch.float32, backend)[n] for backend in ("reference", "native")]
        return bound.check("yvs"[n], torch.as_tensor(found), plains, alone(torch.float64)[n].numpy(), torch.float32)

    for n in (0, 1):
        cut = torch.cat([torch.as_tensor(answer[n]) for answer in by_sequence], 1)
        for found in (cut, *(answer[n] for answer in by_heads)):
            assert not check(n, found)
    for *_, score, summed, terms in (*by_sequence, *by_heads):
        assert not check(2, [score])
        assert not check(2, [summed])  # the score split by frequency adds up to it
        assert terms is None
