"""What the tests of Hugging Face models start from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.kernel import eligible


@pytest.fixture(scope="module")
def quiet_and_on_one_thread() -> Iterator[None]:
    import transformers

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for models this small, threads only wait for each other
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def finite_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eager` hides by the smallest float32, so that in float64 nothing overflows and no row becomes NaN."""
    from transformers import masking_utils

    def eager_mask(**given: Any) -> Tensor | None:
        return masking_utils.eager_mask(**{**given, "dtype": torch.float32})

    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "eager", eager_mask)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each product of an `nn.Linear` that was asked for ran on the kernel."""
    asked: list[bool] = []

    def projection(*args: Any, **given: Any) -> Any:
        read = original(*args, **given)
        asked.append(not isinstance(read, eligible.Reason))
        return read

    original = eligible.projection
    monkeypatch.setattr(eligible, "projection", projection)
    return asked
