"""Options: refused by name, with the nearest known one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options


def test_nothing_given_is_the_defaults():
    for config in (None, {}, {"someone_else": {"x": 1}}, object()):
        assert Options.from_additional_config(config) == Options()


def test_given_values_arrive():
    options = Options.from_additional_config(
        {"ascend_spec": {"adaptive": True, "cpu": {"verify_cost_ms": [[1, 2.0], [4, 3]]}}}
    )
    assert options.adaptive is True
    for given in (True, False, "auto", None):
        chosen = Options.from_additional_config({"ascend_spec": {"adaptive": given}})
        assert chosen.adaptive is given or chosen.adaptive == given == "auto"
    assert options.cpu.verify_cost_ms == [(1, 2.0), (4, 3.0)]


@pytest.mark.parametrize(
    ("given", "named", "mend"),
    [
        ({"adaptve": True}, "'ascend_spec.adaptve'", "did you mean 'adaptive'?"),
        ({"cpu": {"verify_costs": []}}, "'ascend_spec.cpu.verify_costs'", "'verify_cost_ms'?"),
        ({"zzz": 1}, "'ascend_spec.zzz'", "known: adaptive, confidence, cost_surface"),
        ({"adaptive": "often"}, "ascend_spec.adaptive", 'true, false or "auto"'),
        ({"cpu": {"verify_cost_ms": [[1, 1.0]]}}, "ascend_spec.cpu.verify_cost_ms", "2 items"),
        (
            {"cpu": {"verify_cost_ms": [[4, 1.0], [2, 1.0]]}},
            "ascend_spec.cpu.verify_cost_ms",
            "sizes must rise",
        ),
        (
            {"cpu": {"draft_cost_ms": [[0, 1.0], [2, 1.0]]}},
            "cpu.draft_cost_ms.0.0",
            "or equal to 1",
        ),
    ],
)
def test_bad_input_names_the_key_and_the_mend(given: dict[str, Any], named: str, mend: str):
    with pytest.raises(UserError) as error:
        Options.from_additional_config({"ascend_spec": given})
    assert named in str(error.value)
    assert mend in str(error.value)
    assert "--additional-config" in str(error.value)


def test_every_problem_is_reported():
    with pytest.raises(UserError) as error:
        Options.from_additional_config({"ascend_spec": {"adaptve": True, "cpus": {}}})
    assert "adaptve" in str(error.value) and "cpus" in str(error.value)


@pytest.mark.parametrize("key", ["ascend_specs", "ascend-spec", "ascendspec"])
def test_misspelt_section_is_refused(key: str):
    with pytest.raises(UserError, match=rf"unknown key '{key}', did you mean 'ascend_spec'"):
        Options.from_additional_config({key: {}})


def test_section_must_be_an_object():
    with pytest.raises(UserError, match="ascend_spec must be an object"):
        Options.from_additional_config({"ascend_spec": True})


def test_importing_options_imports_no_engine():
    code = (
        "import sys, vllm_ascend_spec.options;"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
