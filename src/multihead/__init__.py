"""Multi-head attention you can see through, at full speed.

>>> layer = mh.MultiHeadAttention(1024, heads=8)
>>> x = torch.randn(4, 1024)
>>> layer(x, mask=mh.Causal()).shape
torch.Size([4, 1024])
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Where each name lives. It is imported when it is first used, so that `multihead --help` does not wait for torch.
_PLACES = {
    "attention": ("attend", "backend", "explain"),
    "cache": ("Cache", "CacheOverflow", "ContextCache"),
    "doctor": ("Report", "diagnose"),
    "explorer": ("explore",),
    "layer": ("MultiHeadAttention",),
    "layer.edit": ("ablate", "patch"),
    "layer.trace": ("Trace", "trace"),
    "lens": ("Lens", "look"),
    "masks": ("Allowed", "Causal", "Documents", "Mask", "Padding", "Prefix", "Window"),
    "positions": ("RoPE",),
    "sizes": ("Sizes",),
    "weights": ("load_weights", "save_weights"),
}
_ROOM_OF = {name: room for room, names in _PLACES.items() for name in names}
_ROOMS = {"distributed", "heads", "hf", "kernel", "models", "nn", "positions", "steps"} | {
    room for room in _PLACES if "." not in room
}


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        found = getattr(import_module(f"multihead.{_ROOM_OF[name]}"), name)
    elif name in _ROOMS:
        found = import_module(f"multihead.{name}")
    else:
        raise AttributeError(f"module 'multihead' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
