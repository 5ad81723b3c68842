"""Weights that are elsewhere until the layer is called: accelerate's offloading, and FSDP2 on two ranks."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import multihead as mh

E, H = 32, 4
OPTIONS: list[dict[str, Any]] = [{}, {"rope": True, "qk_norm": True, "sinks": True, "kv_heads": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("where", ["cpu", "disk", "dispatch"])
def test_accelerates_offloading(where: str, options: dict, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    layer, x, cpu = mh.MultiHeadAttention(E, H, **options).eval(), torch.randn(2, 5, E), torch.device("cpu")
    expected = layer(x, mask=mh.Causal()).detach()
    if where == "cpu":
        accelerate.cpu_offload(layer, execution_device=cpu)
    elif where == "disk":
        accelerate.disk_offload(layer, tmp_path, execution_device=cpu)
    else:
        model = torch.nn.ModuleDict({"attention": layer})
        accelerate.dispatch_model(model, {"attention": "disk"}, "cpu", offload_dir=tmp_path, force_hooks=True)
    assert layer.q_proj.weight.is_meta
    with torch.no_grad():
        assert_close(layer(x, mask=mh.Causal()), expected)
        assert_close(layer(x, x, mask=mh.Causal()), expected)
        cache = layer.new_cache(batch=2)
        rows = [layer(x[:, n : n + 1], mask=mh.Causal(), cache=cache) for n in range(5)]
    assert_close(torch.cat(rows, 1), expected)
    assert layer.q_proj.weight.is_meta, "and away again"


def test_a_layer_on_meta_is_still_refused_by_name() -> None:
    layer = mh.MultiHeadAttention(E, H, device="meta")
    with pytest.raises(ValueError, match=r"but the layer's weights are torch.float32 on meta"):
        layer(torch.randn(2, 5, E))


def fully_sharded(rank: int, port: int, options: dict) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(E, H, **options), torch.randn(2, 2, 5, E)[rank]  # a batch of its own on each rank
    expected = layer(x, mask=mh.Causal()).detach()
    layer(x, mask=mh.Causal()).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
        grad /= 2
    layer.zero_grad()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(layer, mesh=mesh)
    assert layer.q_proj.weight.to_local().shape == (E // 2, E), "a half on each rank"
    for _ in range(2):
        layer.zero_grad()
        y = layer(x, mask=mh.Causal())
        assert_close(y, expected)
        y.square().sum().backward()
        for name, p in layer.named_parameters():
            assert_close(p.grad.full_tensor(), grads[name], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert_close(layer(x, mask=mh.Causal()), expected)
        cache = layer.new_cache(batch=2)
        rows = [layer(x[:, n : n + 1], mask=mh.Causal(), cache=cache) for n in range(5)]
        assert_close(torch.cat(rows, 1), expected)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fsdp2_on_two_ranks(options: dict) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(fully_sharded, (port, options), nprocs=2)
