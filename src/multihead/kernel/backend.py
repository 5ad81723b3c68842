"""The kernel as one of the backends: what it refuses, and what it says of a call that goes through torch's operator."""

import torch
from torch import Tensor

from multihead import kernel
from multihead.call import Call
from multihead.kernel.operators import attend_through_torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST = 2**30  # keys, or query rows that share them


class Native:
    name = "native"

    def refuse(self, call: Call) -> str | None:
        if kernel.module is None:
            return f"the native module is {kernel.missing}"
        if call.q.device.type != "cpu":
            return f"the kernel runs on the CPU, and q is on {call.q.device}"
        if call.q.dtype not in DTYPES:
            return f"the kernel has no {call.q.dtype}"
        if call.k.shape[2] > MOST or call.q.shape[1] // call.k.shape[1] * call.q.shape[2] > MOST:
            return f"more than {MOST} keys, or query rows that share them"
        if call.ineligible is not None and not call.ineligible.dispatched:
            return call.ineligible.says
        return None

    def note(self, call: Call) -> str:
        adapts, alone, _ = kernel.module.patience() if kernel.module is not None else (False, False, 0)
        slow = ", on one thread while others come late" if adapts and alone else ""
        through = "" if call.ineligible is None else f"; through torch's operator, because {call.ineligible.says}"
        how = kernel.arithmetic(str(call.q.dtype).removeprefix("torch."))
        return f"the native kernel, {how}, skipping what is hidden{slow}{through}"

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, lse, _ = attend_through_torch(call, seed)
        return out, lse

    def run_with_state(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and the state of every row (see native/README.md)."""
        return attend_through_torch(call, seed)
