"""Beyond one machine: the same layer with its heads or its sequence sharded on `torch.distributed`.

Nothing is started here: a process group that torchrun, mpirun, Ray or Slurm has led to is given as a `DeviceMesh`.
"""

from multihead.distributed.attention import attend
from multihead.distributed.decode import SpreadCache, prefill
from multihead.distributed.heads import shard_heads
from multihead.distributed.plan import Plan, plan
from multihead.distributed.sequence import shard_sequence, sum_gradients
from multihead.distributed.state import load_checkpoint, save_checkpoint
from multihead.distributed.styles import HeadColumns, HeadRows
from multihead.distributed.wire import RankLost

__all__ = [
    "HeadColumns",
    "HeadRows",
    "Plan",
    "RankLost",
    "SpreadCache",
    "attend",
    "load_checkpoint",
    "plan",
    "prefill",
    "save_checkpoint",
    "shard_heads",
    "shard_sequence",
    "sum_gradients",
]
