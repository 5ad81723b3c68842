"""What every test and every documentation example starts from."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # bf16 products die where CPUID hides the AMX leaves

import pytest
import torch

import multihead as mh


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The explorer's token of whoever runs the tests stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _names_of_the_examples(doctest_namespace: dict) -> None:
    doctest_namespace.update(torch=torch, mh=mh, heads=mh.heads)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what other tests have compiled does not count against this one


WAIT = ("test_notebook.py", "test_packaging.py", "test_notebooks.py", "test_failures.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What mostly waits for other programs starts first, so that no process is left with it at the end."""
    items.sort(key=lambda item: item.path.name not in WAIT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many wrong implementations the doctor named, and how many of torch's own tests pass, of those that ran."""
    reports = [r for how in ("passed", "failed") for r in terminalreporter.stats.get(how, []) if r.when == "call"]
    shown = [
        named and report.outcome == "passed"
        for report in reports
        for what, named in report.user_properties
        if what == "wrong implementation"
    ]
    for said in (said for r in reports for what, said in r.user_properties if what == "of torch's own tests"):
        terminalreporter.write_line(f"of torch's own tests of its layer, {said}")
    if shown:
        terminalreporter.write_line(f"the doctor named {sum(shown)} of {len(shown)} wrong implementations")
