from collections.abc import Sequence
from typing import Any

from torch import Tensor

Shape = tuple[int, ...] | Sequence[int]
Ramp = tuple[int, int, int]  # clamp(q + offset, low, high)
BoundTensor = tuple[int, int, int, int, int]  # address, 32 or 64, strides of B, H, Q
Dense = tuple[int, int, int, int, int]  # address, strides of B, H, Q, K
Linear = tuple[int, int, int]  # address of (out, in), its row stride, address of the bias or 0

def cpu_features() -> dict[str, bool]: ...
def cpu_is_intel() -> bool: ...
def instruction_sets() -> list[str]: ...
def instruction_set(name: str = "") -> str: ...

most_weighed_keys: int

def attend(
    q: int,
    q_shape: Shape,
    q_strides: Shape,
    k: int,
    k_shape: Shape,
    k_strides: Shape,
    v: int,
    v_shape: Shape,
    v_strides: Shape,
    out: int,
    out_strides: Shape,
    dtype: str,
    scale: float,
    threads: int,
    lse: int = 0,
    start: Ramp | BoundTensor | None = None,
    stop: Ramp | BoundTensor | None = None,
    allowed: Dense | None = None,
    bias: Dense | None = None,
    sinks: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    state: int = 0,
    entropy: int = 0,
    top: tuple[int, int, int] | None = None,
    mass: int = 0,
    given: int = 0,
    weights: tuple[int, int, int, int] | None = None,
    isa: str = "",
) -> None: ...
def backward(
    q: int,
    q_shape: Shape,
    q_strides: Shape,
    k: int,
    k_shape: Shape,
    k_strides: Shape,
    v: int,
    v_shape: Shape,
    v_strides: Shape,
    d_out: int,
    d_out_strides: Shape,
    d_q: int,
    d_q_strides: Shape,
    d_k: int,
    d_k_strides: Shape,
    d_v: int,
    d_v_strides: Shape,
    state: int,
    delta: int,
    dtype: str,
    scale: float,
    threads: int,
    d_lse: int = 0,
    start: Ramp | BoundTensor | None = None,
    stop: Ramp | BoundTensor | None = None,
    allowed: Dense | None = None,
    bias: Dense | None = None,
    sinks: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    isa: str = "",
) -> None: ...
def look(
    q: int,
    q_shape: Shape,
    q_strides: Shape,
    k: int,
    k_shape: Shape,
    k_strides: Shape,
    given: int,
    dtype: str,
    scale: float,
    threads: int,
    weights: tuple[int, int, int, int] | None = None,
    received: int = 0,
    map: tuple[int, int, int, int] | None = None,
    start: Ramp | BoundTensor | None = None,
    stop: Ramp | BoundTensor | None = None,
    allowed: Dense | None = None,
    bias: Dense | None = None,
    softcap: float = 0.0,
    isa: str = "",
) -> None: ...
def layer(
    x: int,
    x_shape: Shape,
    x_strides: Shape,
    context: int,
    context_shape: Shape,
    context_strides: Shape,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: tuple[int, int, int, int],
    y: int,
    scale: float,
    threads: int,
    start: Ramp | BoundTensor | None = None,
    stop: Ramp | BoundTensor | None = None,
    allowed: Dense | None = None,
    bias: Dense | None = None,
    sinks: int = 0,
    softcap: float = 0.0,
    isa: str = "",
) -> None: ...

class Layer:
    @property
    def sizes(self) -> tuple[int, int, int, int]: ...
    def run(
        self,
        y: int,
        scale: float,
        threads: int,
        start: Ramp | BoundTensor | None,
        stop: Ramp | BoundTensor | None,
        allowed: Dense | None,
        sinks: int,
        softcap: float,
    ) -> None: ...

def meet_torch() -> None: ...
def held(module: Any) -> tuple[Tensor, Tensor | None] | None: ...
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, threads: int, isa: str = "") -> bool: ...
def plain_layer(x: Tensor, context: Tensor | None, children: dict[str, Any], widths: Shape) -> Layer | None: ...
