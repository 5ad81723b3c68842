"""What of a lens has a gradient, and the refusal of what has none."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multihead import steps
from multihead.lens.region import SIDE, At, Region
from multihead.lens.selections import Chosen, take

GRADIENT_BLOCK = 2**22  # scores held at once where columns need a gradient


class Refusal(torch.autograd.Function):
    """A result that has no gradient and says so when asked for one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, result: Tensor, *sources: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name} of a lens has no gradient: it is computed tile by tile and the tiles are not kept. rows() and "
            "columns() have one; elsewhere compute under torch.no_grad(), or detach()"
        )


def sinks_of(region: Region) -> Tensor | None:
    return None if region.sinks is None else region.sinks.to(region.exact)


def masked_scores(region: Region) -> Tensor:
    """The scores of a region in one piece, through which gradients flow: (B, H, Q, K), −inf where hidden."""
    B, H, Q, K = region.shape
    scores = steps.score(region.q.to(region.exact), steps.repeat_heads(region.k.to(region.exact), H), region.scale)
    allowed = region.allowed(At(slice(0, B), slice(0, H), slice(0, Q), slice(0, K)))
    bias = None if region.bias is None else region.bias.to(region.exact)
    return steps.hide(scores, allowed=allowed, softcap=region.softcap, bias=bias)


def columns_with_gradient(region: Region, keys: Chosen) -> Tensor:
    """The weights of some keys, a block of queries at a time, which is computed again for the gradient."""

    def of_block(part: Region) -> Tensor:
        return take(steps.weigh(masked_scores(part), sinks_of(part))[0], 3, keys)

    B, H, Q, K = region.shape
    step = max(1, min(SIDE, GRADIENT_BLOCK // max(1, B * H * K)))
    parts = [region.select(queries=slice(n, min(n + step, Q))) for n in range(0, max(Q, 1), step)]
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(of_block, part, **options) for part in parts], dim=2)
