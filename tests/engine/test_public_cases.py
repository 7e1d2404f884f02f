"""Public failure cases of speculative decoding on hybrid models: which test stands for which.

C01 to C44 are the cases that must be tested; the links are the threads that they come from. What no
other test shows end to end is tested here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunArm
from harness import Batch, decode_steps, differences

from benchmarks.engine import sampled
from vllm_ascend_spec.zoo import Zoo

TESTS = Path(__file__).parents[1]
NAIVE, PLANNER = "kernels/test_gdn_verify_naive.py", "unit/test_budget_planner.py"
CHECKS, INPUTS = "unit/test_checks.py", "kernels/test_draft_inputs.py"
HERE = "engine/test_public_cases.py"

CASES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "C01": (
        "vllm#39273: a step without drafts after an acceptance reads stale state",
        {
            NAIVE: ("test_c01_step_without_drafts_starts_from_the_accepted_state",),
            "engine/test_recurrent_state.py": (
                "test_step_without_drafts_after_an_acceptance_is_right",
                "test_dropping_the_handling_of_draftless_rows_is_noticed",
            ),
        },
    ),
    "C03": (
        "vllm#51508: a row that emitted nothing indexes column -1",
        {NAIVE: ("test_c03_step_that_emitted_nothing_changes_nothing",)},
    ),
    "C05": (
        "vllm#34871: a last prompt chunk of one token beside rows that draft",
        {
            NAIVE: ("test_one_token_chunk_of_a_prompt_goes_on_from_its_state",),
            "engine/test_recurrent_state.py": ("test_last_chunk_of_one_token_is_right",),
            "unit/test_dispatcher.py": ("test_a_prompt_chunk_of_a_verify_rows_shape_is_mixed",),
        },
    ),
    "C09": (
        "vllm#49757: padding rows advance live state",
        {
            NAIVE: ("test_c09_padding_rows_with_stale_tables_touch_nothing",),
            INPUTS: ("test_padding_and_dummy_requests_own_nothing",),
        },
    ),
    "C14": (
        "vllm#53366: the compile cache misses the speculation settings",
        {
            "unit/test_choice.py": ("test_the_compile_cache_tells_speculation_apart",),
            HERE: ("test_c14_adaptive_and_fixed_engines_share_no_compile_cache",),
        },
    ),
    "C15": (
        "vllm#52436: a budget of zero beside grammar rows",
        {
            PLANNER: ("test_case_15_a_budget_of_zero_and_an_uneven_one",),
            HERE: ("test_c15_a_grammar_holds_where_drafts_are_trimmed_to_nothing",),
        },
    ),
    "C16": (
        "vllm#47808: rejection sampling is cut by the row counts before trimming",
        {
            PLANNER: ("test_case_16_a_step_is_never_larger_than_one_pass_over_the_logits",),
            HERE: ("test_c16_a_step_fits_in_one_pass_over_the_logits",),
        },
    ),
    "C18": (
        "sglang#34384: as many tokens in other rows than the graph has",
        {"unit/test_dispatcher.py": ("test_a_row_count_names_no_graph", "test_dispatch")},
    ),
    "C22": (
        "vllm#52057: costs measured at one context",
        {
            "unit/test_budget_simulation.py": (
                "test_case_22_the_budget_follows_a_context_that_was_not_measured",
                "test_case_22_an_outlier_bans_no_bucket_and_lifts_no_other",
            )
        },
    ),
    "C24": (
        "vllm#54933: no graph for the widest verify step",
        {
            "unit/test_budget_cost.py": (
                "test_an_uncaptured_size_is_priced_as_eager_and_not_across_the_cliff",
            ),
            "unit/test_budget_surface.py": (
                "test_the_widest_verify_step_without_a_graph_is_named",
            ),
        },
    ),
    "C27": (
        "vllm#41657: groups with blocks of different sizes share one pool",
        {
            "engine/test_shared_pages.py": (
                "test_pages_of_distinct_blocks_share_no_byte",
                "test_a_slot_lies_in_its_own_block",
                "test_requests_write_to_blocks_of_their_own_alone",
                "test_padding_that_points_at_the_null_block_is_noticed",
            )
        },
    ),
    "C29": (
        "vllm#42971: no blocks for the first drafts' look-ahead",
        {
            INPUTS: ("test_look_ahead_positions_need_pages_of_their_own",),
            "engine/test_cache.py": ("test_a_prefix_out_of_the_cache_changes_nothing",),
        },
    ),
    "C31": (
        "vllm-ascend#16153: a draft block that passes max_model_len",
        {
            INPUTS: ("test_a_block_that_passes_max_model_len_drafts_nothing",),
            HERE: ("test_c31_requests_end_at_max_model_len",),
        },
    ),
    "C34": (
        "vllm#54498: the drafter's slot from an M-RoPE coordinate",
        {INPUTS: ("test_slots_follow_the_index_and_rotary_positions_the_target",)},
    ),
    "C37": (
        "speculators#1098: norm weights that mean w, and norm weights that mean 1 + w",
        {
            "engine/test_norm_scales.py": ("test_norms_scale_as_their_checkpoint_means_it",),
            "unit/test_norm_weights.py": (
                "test_drafters_made_of_zero_centred_norms",
                "test_targets_of_the_other_convention",
                "test_trained_models_are_right_and_converted_ones_are_not",
            ),
        },
    ),
    "C38": (
        "vllm-ascend#11374: a reduced draft vocabulary without its table",
        {CHECKS: ("test_a_missing_table_of_a_reduced_vocabulary",)},
    ),
    "C40": (
        "vllm#52165: DSpark checkpoints that do not fit fail deep in the loader",
        {
            CHECKS: (
                "test_a_declared_confidence_head_without_weights",
                "test_a_drafter_without_confidence_head",
                "test_a_drafter_of_another_method_names_the_right_one",
            )
        },
    ),
    "C44": (
        "vllm#53029: NaN in logits or confidences",
        {
            "unit/test_budget_unknown.py": ("test_such_a_draft_ranks_before_all_others",),
            HERE: ("test_c44_nan_confidences_keep_drafts_whole_and_the_output_right",),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str):
    for file, tests in CASES[case][1].items():
        text = (TESTS / file).read_text(encoding="utf-8")
        assert not [name for name in tests if f"def {name}(" not in text], file


def test_no_case_is_forgotten():
    assert len(CASES) == 18


@pytest.mark.thorough
def test_c14_adaptive_and_fixed_engines_share_no_compile_cache(run_arm: RunArm):
    fixed, adaptive = (run_arm("hybrid", "dspark", adaptive=a)["compute_hash"] for a in (0, 1))
    other = run_arm("hybrid", "mtp")["compute_hash"]
    assert len({fixed, adaptive, other}) == 3


PATTERN = r"(yes|no), [0-9]{3} times[.]"


@pytest.mark.parametrize("rows", [0, pytest.param(6, marks=pytest.mark.thorough)])
def test_c15_a_grammar_holds_where_drafts_are_trimmed_to_nothing(rows: int, run_arm: RunArm):
    """Requests with a grammar beside free ones; no draft row at all, or fewer than requests."""
    text = "<|im_start|>user\nList the tools of a carpenter.<|im_end|>\n<|im_start|>assistant\n"
    grammar = {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False}
    batch = Batch(
        [{"text": text}] * 6,
        max_tokens=(40, 24),
        sampling={"detokenize": True},
        sampling_in_turn=(grammar, {}),
    )
    arm = {
        "asked": {"mixed": batch},
        "additional_config": {"ascend_spec": {"max_draft_rows": rows}},
    }
    trimmed = run_arm("hybrid", "dspark", adaptive=True, **arm)["batches"]["mixed"]
    whole = run_arm("hybrid", "dspark", asked={"mixed": batch})["batches"]["mixed"]
    assert [a["tokens"] for a in trimmed["answers"]] == [a["tokens"] for a in whole["answers"]]
    for answer in trimmed["answers"][::2]:
        assert re.fullmatch(PATTERN, answer["text"]), answer["text"]
    verified = [s["verified"] for steps in decode_steps(trimmed) for s in steps]
    assert max(verified) <= rows and (rows == 0 or max(verified) > 0)


@pytest.mark.parametrize("method", ["dspark", pytest.param("dflash", marks=pytest.mark.thorough)])
def test_c31_requests_end_at_max_model_len(method: str, run_arm: RunArm):
    """The last drafts of a request pass the limit; its neighbours do not notice."""
    limit = 80
    prompts = [{"ids": [17, 23, 5], "length": length} for length in (40, 72, 75, 79, 60)]
    asked = {"limit": Batch(prompts, max_tokens=(64,))}
    arm = {"asked": asked, "max_model_len": limit}
    fixed = run_arm("hybrid", method, **arm)["batches"]["limit"]
    adaptive = run_arm("hybrid", method, adaptive=True, **arm)["batches"]["limit"]
    assert differences(fixed, adaptive) == []
    for prompt, answer in zip(prompts, adaptive["answers"], strict=True):
        assert len(answer["tokens"]) == min(64, limit - prompt["length"])


def toy_run(arm: sampled.Arm, toy: Zoo, folder: Path, tokens: int = 1500) -> dict[str, Any]:
    request = sampled.request_of(arm, toy, "hybrid", tokens, folder / "run.npz")
    found = sampled.run(request, environment={"PYTHONPATH": str(Path(__file__).parent)})
    assert sampled.streams_agree(found)
    verdicts = sampled.verdicts(sampled.delivered(request, found, compare=False))
    assert min(v.p_value for v in verdicts.values()) > sampled.LIKELY, verdicts
    return found


def test_c16_a_step_fits_in_one_pass_over_the_logits(toy: Zoo, tmp_path: Path):
    """vLLM stops where a trimmed batch needs a second pass: it would be cut in the wrong places."""
    arm = sampled.Arm("mtp", requests=64, draft_rows=4, fault="sampling_faults:small_logits_chunks")
    found = toy_run(arm, toy, tmp_path)
    drafting = found["drafted"] > 0
    assert 0 < found["verified"][drafting].mean() < 1  # 36 draft rows for 64 requests


def test_c44_nan_confidences_keep_drafts_whole_and_the_output_right(toy: Zoo, tmp_path: Path):
    arm = sampled.Arm("dspark", requests=48, fault="sampling_faults:nan_confidences")
    found = toy_run(arm, toy, tmp_path)
    assert '"invalid": 0' not in str(found["counters"])
    whole = (found["verified"] == found["drafted"]) & (found["drafted"] == sampled.DRAFT_TOKENS)
    assert np.mean(whole) > 0.25  # a third of the requests, less their first and last steps


@pytest.mark.parametrize(
    "requests", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 256))]
)
def test_batches_of_every_size_are_trimmed_and_right(requests: int, toy: Zoo, tmp_path: Path):
    arm = sampled.Arm("dspark", requests=requests, draft_rows=2)
    # As many requests as fit at once: half of them at each temperature.
    tokens = max(requests // 2 * sampled.NEW_TOKENS, 100)
    found = toy_run(arm, toy, tmp_path, tokens=tokens)
    assert (found["verified"] < found["drafted"]).any() and (found["verified"] > 0).any()
