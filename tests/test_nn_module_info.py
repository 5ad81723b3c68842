"""torch's own ModuleInfo cases for `MultiheadAttention`, and what its module tests check with them, on our class."""

import copy
import io
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db

import multihead as mh
from multihead.nn import MultiheadAttention

INFO = next(info for info in module_db if info.module_cls is torch.nn.MultiheadAttention)


def samples(dtype: torch.dtype, training: bool, requires_grad: bool = False) -> list:
    return INFO.module_inputs_func(INFO, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)


def build(sample: Any, dtype: torch.dtype, training: bool) -> MultiheadAttention:
    made = sample.constructor_input
    return MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)


def run(module: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return module(*sample.forward_input.args, **sample.forward_input.kwargs)


def with_random_biases(module: MultiheadAttention) -> MultiheadAttention:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def test_there_are_as_many_cases_as_we_think() -> None:
    assert len(samples(torch.float64, True)) == 64  # 32 combinations of constructor and masks, batch first or not


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", INFO.dtypes)
def test_forward_gives_what_the_reference_and_torch_give(dtype: torch.dtype, training: bool) -> None:
    for sample in samples(dtype, training):
        module = with_random_biases(build(sample, dtype, training))
        made = sample.constructor_input
        theirs = torch.nn.MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        theirs.load_state_dict(module.state_dict())
        found = run(module, sample)
        assert_close(found, run(theirs, sample))
        given = sample.forward_input
        assert_close(found, sample.reference_fn(module, *given.args, **given.kwargs))


def test_non_contiguous_inputs_give_the_same() -> None:
    for sample in samples(torch.float64, True):
        module = build(sample, torch.float64, True)
        apart = [torch.stack((t, t), -1)[..., 0] for t in sample.forward_input.args]
        assert not any(t.is_contiguous() for t in apart)
        assert_close(module(*apart, **sample.forward_input.kwargs), run(module, sample))


def test_gradients() -> None:
    for sample in samples(torch.float64, True, requires_grad=True)[::2]:  # batch_first changes nothing unbatched
        module = with_random_biases(build(sample, torch.float64, True))
        names, parameters = zip(*module.named_parameters())

        def call(*inputs: torch.Tensor, module=module, names=names, sample=sample) -> tuple:
            x, given = inputs[:3], dict(zip(names, inputs[3:]))
            return torch.func.functional_call(module, given, x, sample.forward_input.kwargs)

        assert torch.autograd.gradcheck(call, (*sample.forward_input.args, *parameters), fast_mode=True)


def test_gradients_of_gradients_on_the_reference_backend() -> None:
    for sample in samples(torch.float64, True, requires_grad=True)[::2]:
        module = with_random_biases(build(sample, torch.float64, True))

        def call(*x: torch.Tensor, module=module, sample=sample) -> tuple:
            with mh.backend("reference"):
                return module(*x, **sample.forward_input.kwargs)

        assert torch.autograd.gradgradcheck(call, sample.forward_input.args, fast_mode=True)


def test_saved_copied_moved_and_printed() -> None:
    for sample in samples(torch.float32, False)[::3]:
        module = with_random_biases(build(sample, torch.float32, False))
        expected = run(module, sample)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert_close(run(again, sample), expected, rtol=0, atol=0)
        assert_close(run(copy.deepcopy(module), sample), expected, rtol=0, atol=0)
        empty = build(sample, torch.float32, False).to("meta").to_empty(device="cpu")
        empty.load_state_dict(module.state_dict())
        assert_close(run(empty, sample), expected, rtol=0, atol=0)
        assert "out_proj" in repr(module) == str(module)
        assert module.double().out_proj.weight.dtype == module.in_proj_weight.dtype == torch.float64
