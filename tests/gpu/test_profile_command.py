"""`vllm-ascend-spec profile` on a GPU: measures in under a minute, and a later start takes it.

Skipped without CUDA. An engine at a time, for times that mean something.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.driver import engine_arguments
from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.cost import UNPRICED, CostModel
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.zoo import DRAFT_TOKENS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

MOST_SECONDS = 60.0
LENGTHS = {"dspark": (), "mtp": (1, 2, 4)}
PLOTS = importlib.util.find_spec("plotly") is not None


@dataclass(frozen=True)
class Profiled:
    """A run of the command: its files, and what the child process saw."""

    method: str
    file: Path
    page: Path
    seen: dict[str, Any]
    printed: str

    @property
    def surface(self) -> Surface:
        return surfaces.load(self.file)


@pytest.fixture(scope="module", params=LENGTHS)
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    method, folder = request.param, tmp_path_factory.mktemp(request.param)
    engine = engine_arguments(None, kv_cache_mib=8192, max_model_len=1024)
    del engine["speculative_config"]
    engine["additional_config"]["ascend_spec"] = {
        "gdn_state": "replay",
        "draft_lengths": LENGTHS[method],
    }
    arguments = [
        "hybrid", "--method", method, "--out", str(folder / "surface.json"),
        "--engine-args", json.dumps(engine),
    ]  # fmt: skip
    if PLOTS:
        arguments += ["--html", str(folder / "surface.html")]
    case = Path(__file__).with_name("profile_case.py")
    done = subprocess.run(
        [sys.executable, str(case), str(folder / "seen.json"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    seen = json.loads((folder / "seen.json").read_text())
    print(
        f"{method}: measured in {seen['seconds']:.1f} s, {seen['all_seconds']:.0f} s with the "
        f"engine's start, {len(seen['ladder'])} graphs"
    )
    return Profiled(method, folder / "surface.json", folder / "surface.html", seen, done.stdout)


def test_a_loaded_engine_is_measured_in_under_a_minute(profiled: Profiled):
    assert profiled.seen["status"] in (0, None)
    assert 0 < profiled.seen["seconds"] < MOST_SECONDS
    print(f"{profiled.method}: {profiled.seen['seconds']:.1f} s")


def test_every_graph_and_every_draft_length_has_a_price(profiled: Profiled):
    surface, seen = profiled.surface, profiled.seen
    assert list(surface.key.full_ladder) == seen["ladder"]
    full = {point.rows for point in surface.target if point.kind is StepKind.FULL}
    assert {min(seen["ladder"]), max(seen["ladder"])} <= full <= set(seen["ladder"])
    assert any(point.kind is StepKind.EAGER for point in surface.target)
    depths = {point.depth for point in surface.drafter}
    assert depths == {*LENGTHS[profiled.method], DRAFT_TOKENS}
    requests = seen["max_requests"]
    cost = CostModel(surface, requests, seen["max_rows"])
    prices = cost.verify(
        StepKind.FULL, requests, requests, requests * DRAFT_TOKENS, requests, 512.0
    )
    assert 0 < prices.min() <= prices.max() < UNPRICED


def test_longer_drafts_cost_more(profiled: Profiled):
    """Where a token is a pass; short graphs that ran all passes would cost what the longest do."""
    lengths = LENGTHS[profiled.method]
    if not lengths:
        pytest.skip("a block is drafted whole")
    requests = profiled.seen["max_requests"]
    cost = CostModel(profiled.surface, requests, profiled.seen["max_rows"])
    found = {
        depth: float(cost.drafter.prices(depth, 512.0)[1:].mean()) / 1e6
        for depth in (*lengths, DRAFT_TOKENS)
    }
    assert max(found[1], found[2]) < found[DRAFT_TOKENS], found


def test_the_file_is_taken_by_the_engine_that_it_was_measured_on(profiled: Profiled):
    assert profiled.seen["refused"] is None
    assert "ranks is 1 here and 2 in the surface" in profiled.seen["foreign_refused"]
    assert surfaces.dumps(profiled.surface) == profiled.file.read_text(encoding="utf-8")


@pytest.mark.skipif(not PLOTS, reason="no plotly")
def test_the_page_shows_when_a_position_pays(profiled: Profiled):
    assert "Survival above which a position pays" in profiled.page.read_text(encoding="utf-8")
