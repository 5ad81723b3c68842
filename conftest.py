"""What every test and every documentation example starts from."""

import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # bf16 products die where CPUID hides the AMX leaves

import pytest
import torch

import multihead as mh


@pytest.fixture(autouse=True)
def _names_of_the_examples(doctest_namespace: dict) -> None:
    doctest_namespace.update(torch=torch, mh=mh)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what other tests have compiled does not count against this one
