"""The specification as a backend: takes every call, on every device, and holds the whole (Q, K) matrix."""

from torch import Tensor

from multihead import steps
from multihead.call import Call


class Reference:
    name = "reference"

    def refuse(self, call: Call) -> str | None:
        return None

    def note(self, call: Call) -> str:
        return "the seven steps as written, with the whole (Q, K) matrix in memory"

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return steps.attend(
            call.q,
            call.k,
            call.v,
            allowed=call.allowed(),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.bias,
            dropout=call.dropout,
            seed=seed,
        )
