"""Checkpoints of a sharded model and its optimiser: whole on disk, so that any number of ranks can go on from them.

Written and read by `torch.distributed.checkpoint`. The keys are those of one process: "model/q_proj.weight",
"optimizer/q_proj.weight/exp_avg".
"""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from multihead.distributed.styles import SHARDS, Shard


def _shards(model: nn.Module) -> dict[str, Shard]:
    """How the parameters that are cut are cut, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): shard
        for prefix, module in model.named_modules()
        for name, shard in getattr(module, SHARDS, {}).items()
    }


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a sharded model, and its optimiser's state, whole; every rank has to call it.

    Args:
        path: a folder that all ranks can write to.
        model: sharded by heads, by sequence, or not at all.
        optimizer: what trains it; its learning rate and other settings are not saved.
        group: the ranks that take part; all of them unless given.

    >>> mh.distributed.save_checkpoint("checkpoint", model, optimizer)  # doctest: +SKIP
    """
    flat: dict[str, Any] = {f"model/{name}": t for name, t in model.state_dict().items()}
    shards = _shards(model)
    for name, p in model.named_parameters():
        for key, value in ({} if optimizer is None else optimizer.state.get(p, {})).items():
            whole = torch.as_tensor(value)
            if name in shards and whole.shape == p.shape:
                whole = shards[name].gather(whole)
            flat[f"optimizer/{name}/{key}"] = whole
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may save too
        save(flat, checkpoint_id=path, process_group=group, no_dist=not dist.is_initialized())


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load what `save_checkpoint` has saved, on any number of ranks, or in one process; see there for the arguments.

    >>> mh.distributed.load_checkpoint("checkpoint", model, optimizer)  # doctest: +SKIP
    """
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    flat = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in found.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read it too
        load(flat, checkpoint_id=path, process_group=group, no_dist=not dist.is_initialized())
    model.load_state_dict({key.removeprefix("model/"): t for key, t in flat.items() if key.startswith("model/")})
    if optimizer is None:
        return
    parameters, shards = dict(model.named_parameters()), _shards(model)
    for key, value in flat.items():
        if not key.startswith("optimizer/"):
            continue
        name, _, what = key.removeprefix("optimizer/").rpartition("/")
        if name not in parameters:
            raise ValueError(f"{path} has the optimiser's {what} of {name}: expected the parameters of this model")
        optimizer.state[parameters[name]][what] = _mine(value, shards.get(name), parameters[name])


def _mine(whole: Tensor, shard: Shard | None, p: Tensor) -> Tensor:
    return shard.cut(whole) if shard is not None and whole.dim() == p.dim() else whole.clone()
