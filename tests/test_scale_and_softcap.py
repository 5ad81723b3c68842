"""A scale or softcap that the dtype of scores cannot hold, and one at the ends of what it can."""

import pytest
import torch

import multihead as mh
from multihead import kernel
from multihead.attention import BACKENDS

NOT_IN_FLOAT32 = [{"scale": 1e300}, {"scale": -1e39}, {"softcap": 1e300}, {"softcap": 1e-60}]


@pytest.mark.parametrize("options", NOT_IN_FLOAT32, ids=str)
class TestNumbersThatFloat32CannotHold:
    """They were NaN in silence, on every way in."""

    @pytest.mark.parametrize("backend", [None, *BACKENDS])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_attend_and_the_lens_refuse_them(self, options: dict, dtype: torch.dtype, backend: str | None) -> None:
        q, k, v = torch.randn(3, 2, 3, 7, 8).to(dtype)
        name = next(iter(options))
        for more in ({}, {"return_lse": True}, {"mask": mh.Causal()}):
            with pytest.raises(ValueError, match=f"{name}=.*; scores are computed in float32"):
                mh.attend(q, k, v, backend=backend, **more, **options)
        with pytest.raises(ValueError, match=f"{name}=.*; scores are computed in float32"):
            mh.look(q, k, **options)

    @pytest.mark.parametrize("grad", [False, True])
    def test_a_layer_refuses_them(self, options: dict, grad: bool) -> None:
        layer, x = mh.MultiHeadAttention(24, 4, **options).eval(), torch.randn(2, 5, 24)
        for call in (layer, layer.look, lambda x: mh.trace(layer, x)):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="; scores are computed in float32"):
                call(x)

    @pytest.mark.parametrize("backend", [b for b in ("native", "reference") if b in BACKENDS])
    def test_float64_holds_them(self, options: dict, backend: str) -> None:
        if backend == "native" and kernel.module is None:
            pytest.skip("the native module is missing")
        q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64)
        found = mh.attend(q, k, v, backend=backend, **options)
        if "scale" in options:  # one key has all of the weight
            scores = q @ k.mT * (1 if options["scale"] > 0 else -1)
            wanted = v.gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, 8))
        elif options["softcap"] > 1:  # it does nothing
            wanted = mh.attend(q, k, v, backend="reference")
        else:  # nothing is left of the scores
            wanted = v.mean(2, keepdim=True).expand_as(v)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("end", ["least", "most"])
def test_a_softcap_at_the_ends_of_what_is_taken_keeps_its_digits(end: str, backend: str) -> None:
    if backend == "native" and kernel.module is None:
        pytest.skip("the native module is missing")
    ends = torch.finfo(torch.float32)
    softcap = ends.tiny * 2.0**24 if end == "least" else ends.max / 2.0**24
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        given = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = mh.attend(*given, softcap=softcap, backend="reference" if dtype == torch.float64 else backend)
        gradients.append([out, *torch.autograd.grad(out.sum(), given)])
    for exact, found in zip(*gradients):
        torch.testing.assert_close(found, exact.float())
