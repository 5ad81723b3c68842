"""Every wrong implementation that the doctor is shown is counted, and whether it was named: see the root conftest."""

from typing import Any

import pytest

import multihead as mh


@pytest.fixture(autouse=True)
def _count_the_wrong_ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("wrong") is None:
        return
    diagnose = mh.diagnose

    def counted(*given: Any, **options: Any) -> Any:
        report = diagnose(*given, **options)
        request.node.user_properties.append(("wrong implementation", report.verdict == "diagnosed"))
        return report

    monkeypatch.setattr(mh, "diagnose", counted)
