"""Multi-head attention you can see through, at full speed.

>>> layer = mh.MultiHeadAttention(1024, heads=8)
>>> x = torch.randn(4, 1024)
>>> layer(x, mask=mh.Causal()).shape
torch.Size([4, 1024])
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from multihead import heads, models, nn, weights
from multihead.attention import attend, backend, explain
from multihead.cache import Cache, CacheOverflow, ContextCache
from multihead.doctor import Report, diagnose
from multihead.explorer import explore
from multihead.layer import MultiHeadAttention
from multihead.layer.edit import ablate, patch
from multihead.layer.trace import Trace, trace
from multihead.lens import Lens, look
from multihead.masks import Allowed, Causal, Documents, Mask, Padding, Prefix, Window
from multihead.positions import RoPE
from multihead.sizes import Sizes
from multihead.weights import load_weights, save_weights

__version__ = version("multihead")

__all__ = [
    "Allowed",
    "Cache",
    "CacheOverflow",
    "Causal",
    "ContextCache",
    "Documents",
    "Lens",
    "Mask",
    "MultiHeadAttention",
    "Padding",
    "Prefix",
    "Report",
    "RoPE",
    "Sizes",
    "Trace",
    "Window",
    "ablate",
    "attend",
    "backend",
    "diagnose",
    "explain",
    "explore",
    "heads",
    "load_weights",
    "look",
    "models",
    "nn",
    "patch",
    "save_weights",
    "trace",
    "weights",
]


def __getattr__(name: str) -> ModuleType:
    """`mh.distributed` is imported when it is first asked for: torch.distributed takes its time."""
    if name == "distributed":
        return import_module("multihead.distributed")
    raise AttributeError(f"module 'multihead' has no attribute {name!r}")
