"""The support matrix and the doctor's verdict."""

from __future__ import annotations

import json

import pytest

from benchmarks.results import RESULTS, Result
from vllm_ascend_spec import doctor
from vllm_ascend_spec.drafters import METHODS, method
from vllm_ascend_spec.drafters.support import Feature, Host, verdict
from vllm_ascend_spec.engine import versions

CPU, HOPPER, AMPERE = Host("cpu"), Host("cuda", (9, 0)), Host("cuda", (8, 0))


@pytest.mark.parametrize("host", [CPU, HOPPER, AMPERE, Host("ascend")])
def test_every_no_has_its_reason(host: Host) -> None:
    for candidate in METHODS:
        for feature in Feature:
            answer = verdict(candidate, feature, host)
            assert answer.ok or answer.reason


@pytest.mark.parametrize(
    ("name", "feature", "host", "ok"),
    [
        ("dspark", Feature.ADAPTIVE_HYBRID, CPU, True),
        ("dspark", Feature.ADAPTIVE, HOPPER, True),
        ("dspark", Feature.ADAPTIVE_HYBRID, HOPPER, True),
        ("dspark", Feature.ADAPTIVE_HYBRID, AMPERE, False),
        ("dspark", Feature.ADAPTIVE, AMPERE, False),
        ("ngram", Feature.ADAPTIVE, CPU, True),
        ("ngram", Feature.ADAPTIVE, HOPPER, True),
        ("ngram", Feature.ADAPTIVE_HYBRID, AMPERE, False),
        ("suffix", Feature.MRV2, HOPPER, False),
        ("mtp", Feature.HYBRID, HOPPER, True),
        ("mtp", Feature.MRV2, Host("ascend"), True),
        ("dspark", Feature.ADAPTIVE_HYBRID, Host("ascend"), True),
        ("ngram", Feature.MRV2, Host("ascend"), False),
        ("dflash2", Feature.HYBRID, Host("ascend"), False),
    ],
)
def test_verdicts(name: str, feature: Feature, host: Host, ok: bool) -> None:
    assert verdict(method(name), feature, host).ok is ok


def test_what_is_offered_on_a_gpu_was_compared_there() -> None:
    """Committed figures of a GPU hold the exactness of every method that adapts on GDN models."""
    files = (RESULTS / "engine").glob("adaptive_exact*.json")
    results = [Result.model_validate_json(path.read_text("utf-8")) for path in files]
    seen = {
        row.case.split()[0].lower()
        for result in results
        if "NVIDIA" in result.device
        for row in result.rows
        if row.metric.startswith("largest top-2 gap") and "adaptive against" in row.case
    }
    offered = {m.name for m in METHODS if verdict(m, Feature.ADAPTIVE_HYBRID, HOPPER).ok}
    assert len(offered) == 7
    assert offered <= seen


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'dspark'"):
        method("dspakr")


@pytest.mark.parametrize(("name", "rows"), [("dspark", 7), ("dflash", 8), ("mtp", 1), ("ngram", 0)])
def test_rows_per_request(name: str, rows: int) -> None:
    assert method(name).rows_per_request(7) == rows


def test_without_an_engine_it_exits_1_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "find_engine", lambda: None)
    assert doctor.run(as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["usable"]
    assert "Install `vllm-ascend-spec[" in report["problems"][0]


def test_with_an_engine_the_json_holds_the_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    if versions.find_engine() is None:
        pytest.skip("no vLLM in this environment")
    code = doctor.run(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["usable"] else 1)
    assert len(report["matrix"]) == len(METHODS) * len(Feature)
