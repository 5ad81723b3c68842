"""Guard pages: every tensor ends where its page ends, and the next page may not be touched; nor may hidden keys."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import torch
from oracle import ISAS, Problem, random
from test_kernel_forward import CASES, Case
from test_kernel_layer import ROWS, TYPES, product_of

from multihead import _native

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory whose last byte is followed by a page that may not be touched."""

    def __init__(self) -> None:
        self.maps: list = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        size = max(1, tensor.numel() * tensor.element_size())
        pages = (size + PAGE - 1) // PAGE
        area = mmap.mmap(-1, (pages + 1) * PAGE)
        self.maps.append(area)
        whole = torch.frombuffer(area, dtype=torch.uint8)
        if libc.mprotect(ctypes.c_void_p(whole.data_ptr() + pages * PAGE), PAGE, 0):
            pytest.skip("mprotect is not allowed here")
        if not tensor.numel():
            return tensor
        flat = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=pages * PAGE - size)
        flat.copy_(tensor.flatten())
        return flat.view(tensor.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:11], ids=lambda c: c.why)
def test_nothing_beyond_a_tensor_is_touched(case: Case, dtype: torch.dtype, isa: str) -> None:
    memory = Guarded()
    plain = case.problem(dtype)
    q, k, v = (memory.copy(t) for t in (plain.q, plain.k, plain.v))
    own = Problem(q, k, v, plain.scale, plain.start, plain.stop)
    B, H, _, Q, K, _, V = plain.sizes
    own.allowed = plain.allowed = memory.copy(torch.rand(B, 1, Q, K) > 0.2)
    out = memory.copy(torch.zeros(B, H, Q, V, dtype=dtype))
    own.native(isa, out=out)
    assert torch.equal(out, plain.native(isa)[0])
    if dtype != torch.float16:
        d_out = memory.copy(torch.ones(B, H, Q, V, dtype=dtype))
        a, b = own.native_gradients(d_out, isa=isa), plain.native_gradients(d_out.clone(), isa=isa)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[:11], ids=lambda c: c.why)
def test_a_look_touches_nothing_beyond_a_tensor(case: Case, dtype: torch.dtype, isa: str) -> None:
    memory = Guarded()
    plain = case.problem(dtype)
    own = Problem(memory.copy(plain.q), memory.copy(plain.k), plain.v, plain.scale, plain.start, plain.stop)
    B, H, _, Q, K, _, _ = plain.sizes
    own.allowed = plain.allowed = memory.copy(torch.rand(B, 1, Q, K) > 0.2)
    own.bias = plain.bias = memory.copy(torch.randn(1, H, Q, K, dtype=plain.wide))
    shapes = {
        "entropy": (B, H, Q),
        "mass": (B, H, Q),
        "received": (B, H, K),
        "weights": (B, H, Q, K),
        "map": (B, H, 5, 7),
    }

    def ask(problem: Problem, place: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        entropy, mass, received, weights, picture = (
            place(torch.zeros(shape, dtype=plain.wide)) for shape in shapes.values()
        )
        top, keys = place(torch.zeros(B, H, Q, 2, dtype=plain.wide)), place(torch.zeros(B, H, Q, 2, dtype=torch.int64))
        state = place(problem.scan(isa))
        wanted = {"entropy": entropy, "mass": mass, "top": top, "keys": keys}
        problem.given(state, isa, **wanted)
        problem.look(state, isa, weights=weights, received=received)
        problem.look(state, isa, map=picture)
        return [entropy, mass, received, weights, picture, top, keys]

    for a, b in zip(ask(own, memory.copy), ask(plain, torch.Tensor.clone), strict=True):
        assert torch.equal(a, b)


KEYS = 3072
SEEN = slice(1024, 2048)  # whole pages and whole tiles of keys


class Unreadable:
    """(B,G,K,D) whose keys outside SEEN lie in pages that may not be read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        row = tensor.shape[-1] * tensor.element_size()
        assert tensor.shape[:3] == (1, 1, KEYS)
        assert SEEN.start * row % PAGE == SEEN.stop * row % PAGE == 0
        self.area = mmap.mmap(-1, KEYS * row)
        self.tensor = torch.frombuffer(self.area, dtype=tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor)
        for start, stop in ((0, SEEN.start), (SEEN.stop, KEYS)):
            at = ctypes.c_void_p(self.tensor.data_ptr() + start * row)
            if libc.mprotect(at, (stop - start) * row, 0):
                pytest.skip("mprotect is not allowed here")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "chunk"])
def test_hidden_keys_are_not_read(queries: int, dtype: torch.dtype, isa: str) -> None:
    """Work that hidden keys cost would begin with reading them: here that ends the process."""
    bounds = {"start": (0, SEEN.start, SEEN.start), "stop": (0, SEEN.stop, SEEN.stop)}
    plain = random(1, 4, 1, queries, KEYS, 64, 64, dtype=dtype, **bounds)
    k, v = Unreadable(plain.k), Unreadable(plain.v)
    own = Problem(plain.q, k.tensor, v.tensor, plain.scale, **bounds)
    assert torch.equal(own.native(isa)[0], plain.native(isa)[0])


def test_the_guard_guards() -> None:
    assert random(1, 1, 1, 1, 1, 1, 1).sizes == (1, 1, 1, 1, 1, 1, 1)
    memory = Guarded()
    tensor = memory.copy(torch.arange(5.0))
    assert (tensor.data_ptr() + 20) % PAGE == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), *TYPES], ids=str)
@pytest.mark.parametrize("case", ROWS, ids=lambda c: c[-1])
def test_a_product_touches_nothing_beyond_a_tensor(case: tuple, types: tuple, isa: str) -> None:
    memory = Guarded()
    x, weight, bias, wanted = product_of(case, types)
    y = torch.empty(wanted.exact.shape, dtype=types[0])
    guarded = [memory.copy(t) for t in (x, weight, bias, y)]
    _native.linear(x, weight, bias).run(y, 1, isa)
    _native.linear(*guarded[:3]).run(guarded[3], 1, isa)
    assert torch.equal(guarded[3], y)
