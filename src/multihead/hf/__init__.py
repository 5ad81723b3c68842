"""Hugging Face models on our attention: `model.set_attn_implementation("multihead")`.

Importing this module registers the name, for `from_pretrained(..., attn_implementation="multihead")` too. `watch` gives
a lens on every layer, `ablate` and `patch` change what heads put out; all three on the fast path, and in `generate`.
`trace` gives the seven steps of one layer. `speed_up` runs more of a model on the kernel, `cache` grows in place.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from multihead.hf.cache import cache
from multihead.hf.interface import NAME, attention
from multihead.hf.masks import mask
from multihead.hf.speed_up import speed_up
from multihead.hf.trace import trace
from multihead.hf.watch import ablate, attentions, patch, watch

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)

__all__ = ["ablate", "attentions", "cache", "patch", "speed_up", "trace", "watch"]
