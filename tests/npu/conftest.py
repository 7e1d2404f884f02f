"""What the double's tests share: each case runs once a session, and all of them fill one record."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness, judge
from npu_double.cases import Ran, RunCase
from npu_double.harness import Case
from npu_double.record import Record


@pytest.fixture(scope="session")
def record() -> Record:
    return Record()


@pytest.fixture(scope="session")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("surfaces")


@pytest.fixture(scope="session")
def run_case(tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """Answer and judgement of a case; run once a session. No judgement where it raised."""
    known: dict[str, Ran] = {}

    def run_case(case: Case) -> Ran:
        key = repr(case)
        if key not in known:
            answer = harness.run(case, tmp_path_factory.mktemp("double"))
            known[key] = (answer, None if answer["error"] else judge.judge(case.model, answer))
        return known[key]

    return run_case
