"""Hugging Face models over several ranks give what one process gives."""

import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
import multihead.distributed
from tests.distributed import bound
from tests.distributed.pool import Pool

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Any] = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "qwen": lambda t: t.Qwen3ForCausalLM(
        t.Qwen3Config(
            **SMALL, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1
        )
    ),
    "bert": lambda t: t.BertModel(t.BertConfig(**SMALL)),
}
N = 19
ORDERS = [("multihead", False), ("multihead", True), ("eager", False), ("eager", True)]  # in which plain may sum


def make(name: str, dtype: torch.dtype) -> Any:

    importlib.import_module("multihead.hf")  # registers the name
    torch.manual_seed(4)
    model = MODELS[name](transformers).to(dtype).eval()
    model.set_attn_implementation("multihead")
    return model


def inputs(padded: bool) -> dict[str, Tensor]:
    tokens = torch.randint(50, (2, N), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, 12:] = 0
    return {"input_ids": tokens, "attention_mask": mask} if padded else {"input_ids": tokens}


def first(output: Any) -> Tensor:
    return output[0]


@cache
def alone(
    name: str, padded: bool, dtype: torch.dtype, how: str = "multihead", row_by_row: bool = False
) -> dict[str, Tensor]:
    model, given = make(name, dtype), inputs(padded)
    model.set_attn_implementation(how)
    if row_by_row:  # another order of summation
        y = torch.cat([first(model(**{n: t[b : b + 1] for n, t in given.items()})) for b in (0, 1)])
    else:
        y = first(model(**given))
    y.square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **grads}


def by_sequence(mesh: Any, name: str, method: str, padded: bool) -> dict[str, Any]:
    rank, model = mesh.get_local_rank(), make(name, torch.float32)
    mh.distributed.shard_sequence(model, mesh, method=method)
    mine = {n: t.tensor_split(mesh.size(), 1)[rank] for n, t in inputs(padded).items()}
    y = first(model(**mine))
    (y.square().sum() / (y.shape[0] * N * y.shape[2])).backward()
    mh.distributed.sum_gradients(model, mesh)
    return {"y": y.detach().numpy(), **{n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "method", "ranks"),
    [("llama", "ring", 3), ("qwen", "ring", 2), ("qwen", "ulysses", 4), ("bert", "ring", 3), ("bert", "gather", 2)],
)
def test_sequence_of_a_model(pool: Pool, name: str, method: str, ranks: int, padded: bool) -> None:
    answers = pool.run(by_sequence, ranks, name, method, padded)
    found = {**answers[0], "y": torch.cat([torch.as_tensor(a["y"]) for a in answers], 1)}
    assert not compare(found, name, padded)


def compare(found: dict[str, Any], name: str, padded: bool) -> list[str]:
    right, wrong = alone(name, padded, torch.float64), []
    plains = [alone(name, padded, torch.float32, *order) for order in ORDERS]
    for key, value in right.items():
        got = torch.as_tensor(found[key])
        wrong += bound.check(key, got, [plain[key] for plain in plains], value.numpy(), torch.float32)
    return wrong


def by_heads(mesh: Any, name: str, padded: bool) -> dict[str, Any]:
    model = make(name, torch.float32)
    mh.distributed.shard_heads(model, mesh)
    y = first(model(**inputs(padded)))
    y.square().mean().backward()
    found = {"y": y.detach().numpy()}
    for module_name, module in model.named_modules():
        for n, p in module.named_parameters(module_name, recurse=False):
            shard = getattr(module, "_multihead_shards", {}).get(n.split(".")[-1])
            if p.grad is not None:
                found[n] = (p.grad if shard is None else shard.gather(p.grad)).numpy()
    return found


@pytest.mark.parametrize(("name", "ranks"), [("llama", 4), ("qwen", 3), ("bert", 2)])
def test_heads_of_a_model(pool: Pool, name: str, ranks: int) -> None:
    for answer in pool.run(by_heads, ranks, name, True):
        assert not compare(answer, name, True)


def beside_tp_plan(mesh: Any, path: str, attention_too: bool) -> Any:
    """The plan of transformers cuts the MLP, `shard_heads` the attention; or the plan cuts both."""
    os.environ.update(RANK=str(mesh.get_rank()), LOCAL_RANK=str(mesh.get_rank()), WORLD_SIZE=str(mesh.size()))
    importlib.import_module("multihead.hf")
    config = transformers.LlamaConfig.from_pretrained(path)
    if not attention_too:
        plan = config.base_model_tp_plan
        config.base_model_tp_plan = {name: style for name, style in plan.items() if "self_attn" not in name}
    how: dict[str, Any] = {"tp_plan": "auto", "config": config, "attn_implementation": "multihead"}
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **how).eval()
    try:
        mh.distributed.shard_heads(model, mesh)
    except ValueError as error:
        return str(error)
    with torch.no_grad():
        y = first(model(**inputs(True)))
    assert "DTensor" in type(model.model.layers[0].mlp.up_proj.weight.data).__name__
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (8, 32)  # one of two kv heads, on two ranks each
    return y.numpy()


def test_heads_beside_tp_plan(pool: Pool, tmp_path: Path) -> None:
    make("llama", torch.float32).save_pretrained(tmp_path)
    right = alone("llama", True, torch.float64)["y"].numpy()
    plains = [alone("llama", True, torch.float32, *order)["y"] for order in ORDERS]
    for y in pool.run(beside_tp_plan, 4, str(tmp_path), False):
        assert not bound.check("y", torch.as_tensor(y), plains, right, torch.float32)
    for said in pool.run(beside_tp_plan, 4, str(tmp_path), True):  # two kv heads on four ranks
        assert "4 rows on this rank, and a head has 8" in said


def refused(mesh: Any) -> list[str]:
    said = []
    eager = make("llama", torch.float32)
    eager.set_attn_implementation("eager")
    model, tokens = mh.distributed.shard_sequence(make("llama", torch.float32), mesh), inputs(False)["input_ids"]
    for act in (
        lambda: mh.distributed.shard_sequence(eager, mesh),
        lambda: model(tokens, labels=tokens),
        lambda: model(tokens, position_ids=torch.zeros_like(tokens)),
        lambda: model(tokens, attention_mask=torch.ones(2, 40)),
        lambda: model(tokens, output_attentions=True),
    ):
        try:
            act()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_a_slice_cannot_know_is_refused(pool: Pool) -> None:
    wanted = [
        "'eager' attention",
        "labels is given",
        "position_ids jump",
        "expected this rank's slice of it",
        "output_attentions",
    ]
    for answer in pool.run(refused, 2):
        for said, part in zip(answer, wanted, strict=True):
            assert part in said
