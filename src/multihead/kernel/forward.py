"""Modules that are sped up: a forward of the module's own, which runs on the kernel where that is eligible.

It lies in the module's dictionary, over that of its class, so that the module stays what it is: its class, children,
parameters, hooks and state_dict. Every call is judged by itself; what is not eligible runs the forward of the class.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from multihead import kernel
from multihead.call import Reason
from multihead.kernel import eligible


class Forward:
    """The forward of one module. A copy of the module gets one of its own; `on` is False once it is undone."""

    what: ClassVar[str]
    method: ClassVar[str] = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module, self.on = module, True

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's class has it."""
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    def put(self) -> None:
        setattr(self.module, self.method, self)

    def undo(self) -> None:
        """Where somebody has put another forward over this one since, that one stays, and calls the class's."""
        self.on = False
        if self.module.__dict__.get(self.method) is self:
            delattr(self.module, self.method)

    @property
    def __wrapped__(self) -> Any:  # `inspect.signature` reads it
        return getattr(type(self.module), self.method).__get__(self.module)


class LinearForward(Forward):
    """An `nn.Linear` by the kernel's product."""

    what = "product of the kernel"
    module: nn.Linear

    def __call__(self, input: Tensor) -> Tensor:
        read = eligible.modules_watched() or eligible.projection(self.module, input, called=True) if self.on else None
        if read is None or isinstance(read, Reason):
            return self.plain(input)
        y = input.new_empty((*input.shape[:-1], read.outputs))
        read.run(y, torch.get_num_threads())
        return y


if kernel.module is not None:
    kernel.module.remember_forward(LinearForward)
