"""What the seven steps need of a layer, as plain tensors that any dtype can be made of."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from multihead.doctor.norms import Norm, norms_of
from multihead.layer import MultiHeadAttention
from multihead.positions import RoPE
from multihead.sizes import Sizes


@dataclass(frozen=True, eq=False)
class Weights:
    """The four matrices by their letter, their biases, and the layer's options.

    `w`: q (E,H,D), k (C,G,D), v (C,G,V), o (H,V,E). `b`: q (H,D), k (G,D), v (G,V), o (E,), or None.
    """

    sizes: Sizes
    w: dict[str, Tensor]
    b: dict[str, Tensor | None]
    scale: float
    rope: RoPE | None = None
    norm: tuple[Tensor, Tensor] | None = None  # of q and of k, (D,) each
    eps: float = 1e-6
    softcap: float | None = None
    sinks: Tensor | None = None
    inner: tuple[Norm, ...] = ()  # the candidate's own norms over E
    of_heads: tuple[Norm, ...] = ()  # and over D

    @staticmethod
    def of(layer: MultiHeadAttention) -> "Weights":
        """The layer's own, after adapters and parametrizations."""
        s = layer.sizes
        w, b = {}, {}
        for name, projection, heads in (
            ("q", layer.q_proj, (-1, s.D)),
            ("k", layer.k_proj, (-1, s.D)),
            ("v", layer.v_proj, (-1, s.V)),
        ):
            matrix, bias = _matrix(projection)
            w[name] = matrix.unflatten(1, heads)
            b[name] = None if bias is None else bias.unflatten(0, heads)
        matrix, b["o"] = _matrix(layer.o_proj)
        w["o"] = matrix.unflatten(0, (-1, s.V))
        norm, eps = None, 1e-6
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = (layer.q_norm.weight.detach(), layer.k_norm.weight.detach())
            eps = layer.q_norm.eps or eps
        sinks = None if layer.sinks is None else layer.sinks.detach()
        return Weights(s, w, b, layer.scale, layer.rope, norm, eps, layer.softcap, sinks)

    def to(self, dtype: torch.dtype) -> "Weights":
        return replace(
            self,
            w={name: t.to(dtype) for name, t in self.w.items()},
            b={name: None if t is None else t.to(dtype) for name, t in self.b.items()},
            norm=None if self.norm is None else (self.norm[0].to(dtype), self.norm[1].to(dtype)),
            sinks=None if self.sinks is None else self.sinks.to(dtype),
            inner=tuple(norm.to(dtype) for norm in self.inner),
            of_heads=tuple(norm.to(dtype) for norm in self.of_heads),
        )

    def with_norms_of(self, module: object) -> "Weights":
        """The same, knowing the norms over E and over D that a candidate has inside."""
        return replace(self, inner=norms_of(module, self.sizes.E), of_heads=norms_of(module, self.sizes.D))


def _matrix(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A projection as (in, out) and its bias; one that is no plain Linear is asked what it does to unit vectors."""
    if type(projection) is nn.Linear:
        bias = projection.bias
        return projection.weight.detach().T, None if bias is None else bias.detach()
    weight = next(projection.parameters())
    width = int(projection.in_features)  # type: ignore[arg-type]
    with torch.no_grad():
        zero = projection(torch.zeros(1, width, dtype=weight.dtype, device=weight.device))[0]
        unit = projection(torch.eye(width, dtype=weight.dtype, device=weight.device))
    return unit - zero, zero
