from collections.abc import Iterable
from typing import Any

from torch import Tensor

Refusal = tuple[str, bool]  # why a call may not go straight to the kernel, and whether torch's dispatcher deals with it

most_weighed_keys: int
openmp: bool

def cpu_features() -> dict[str, bool]: ...
def cpu_is_intel() -> bool: ...
def instruction_sets(features: Iterable[str] | None = None) -> list[str]: ...
def instruction_set(name: str = "") -> str: ...
def patience() -> tuple[bool, bool, int]: ...  # whether threads are given up, are now, how often they were
def remember_torch(in_c: bool = True) -> None: ...
def remember_forward(type: type) -> None: ...

class Attention:
    seed: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]: ...  # B, H, G, Q, K, D, V
    def see(self, visible: Any) -> Refusal | None: ...
    def attend(
        self,
        threads: int,
        isa: str = "",
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        state: Tensor | None = None,
        given: Tensor | None = None,
        entropy: Tensor | None = None,
        mass: Tensor | None = None,
        top: Tensor | None = None,
        keys: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None: ...
    def backward(
        self,
        threads: int,
        isa: str = "",
        *,
        d_out: Tensor,
        d_lse: Tensor | None = None,
        state: Tensor,
        delta: Tensor,
        d_q: Tensor,
        d_k: Tensor,
        d_v: Tensor,
    ) -> None: ...
    def look(
        self,
        threads: int,
        isa: str = "",
        *,
        given: Tensor,
        weights: Tensor | None = None,
        received: Tensor | None = None,
        map: Tensor | None = None,
        largest: bool = False,
    ) -> None: ...

class Layer:
    @property
    def sizes(self) -> tuple[int, int, int, int]: ...  # B, H, Q, K
    @property
    def outputs(self) -> int: ...
    @property
    def widens(self) -> bool: ...  # float32 rows, weights of half precision
    @property
    def kv_heads(self) -> int: ...
    def rotate(
        self,
        cos: Any,
        sin: Any,
        positions: Any = None,
        *,
        counted: bool = False,
        interleaved: bool = False,
        pairs: int = -1,
        queries: bool = True,
        keys: bool = True,
    ) -> Refusal | None: ...
    def join(
        self, k: Any, v: Any, first: Any, K: int, real: Any = None, k_scales: Any = None, v_scales: Any = None
    ) -> Refusal | None: ...
    def recall(self, k: Any, v: Any, K: int) -> Refusal | None: ...
    def see(self, visible: Any) -> Refusal | None: ...
    def put_out(self, x: Tensor) -> Tensor: ...
    def run(self, y: Tensor, threads: int, isa: str = "") -> None: ...

class FeedForward:
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    def run(self, y: Tensor, middle: Tensor, threads: int, isa: str = "") -> None: ...

class Linear:
    @property
    def rows(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def widens(self) -> bool: ...  # float32 rows, weights of half precision
    def run(self, y: Tensor, threads: int, isa: str = "") -> None: ...

def attention(call: Any, gradients: bool = False) -> Attention | Refusal: ...
def attend(call: tuple, mask: Any, lower: Any) -> Tensor | Refusal: ...
def watched(modules: bool = False) -> Refusal | None: ...
def layer(layer: Any, x: Any, context: Any, gradients: bool = False, recalls: bool = False) -> Layer | Refusal: ...
def parts(parts: Any, x: Any, context: Any = None, gradients: bool = False) -> Layer | Refusal: ...
def feed_forward(
    gate: Any, up: Any, down: Any, tanh: bool, x: Any, gradients: bool = False
) -> FeedForward | Refusal: ...
def norm(x: Any, weight: Any, eps: float, y: Any, gradients: bool, threads: int) -> Refusal | None: ...
def linear(x: Any, weight: Any, bias: Any, gradients: bool = False) -> Linear | Refusal: ...
def projection(module: Any, x: Any, gradients: bool = False, called: bool = False) -> Linear | Refusal: ...
