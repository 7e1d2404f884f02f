"""How names of models are read; no engine is started."""

from __future__ import annotations

import pytest

from vllm_ascend_spec.engine.generate import model_path, served_name
from vllm_ascend_spec.errors import UserError


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere", "../nowhere"])
def test_a_path_that_is_not_there_is_not_asked_of_a_hub(path: str):
    with pytest.raises(UserError, match="no directory"):
        model_path(path)


def test_names_of_a_hub_are_left_to_vllm():
    assert model_path("organisation/model") == "organisation/model"


def test_the_zoo_is_served_under_its_short_name():
    assert model_path("hybrid").endswith("hybrid")
    assert served_name("hybrid", ["--port", "1"])[-2:] == ["--served-model-name", "hybrid"]
    given = ["--served-model-name=mine"]
    assert served_name("hybrid", given) == given
    assert served_name("organisation/model", []) == []
