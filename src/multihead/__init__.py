"""Multi-head attention you can see through, at full speed.

>>> layer = mh.MultiHeadAttention(1024, heads=8)
>>> x = torch.randn(4, 1024)
>>> layer(x, mask=mh.Causal()).shape
torch.Size([4, 1024])
"""

from importlib.metadata import version

from multihead import heads, models, nn, weights
from multihead.attend import attend, backend, explain
from multihead.cache import Cache, CacheOverflow, ContextCache
from multihead.doctor import Report, diagnose
from multihead.edit import ablate, patch
from multihead.layer import MultiHeadAttention
from multihead.lens import Lens, look
from multihead.masks import Allowed, Causal, Documents, Mask, Padding, Prefix, Window
from multihead.positions import RoPE
from multihead.sizes import Sizes
from multihead.trace import Trace, trace
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
