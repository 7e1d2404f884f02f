"""vllm-ascend's platform with the plugin's options; importing this module imports neither."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.graphs import acl
from vllm_ascend_spec.options import Options

logger = logging.getLogger("vllm.ascend_spec.ascend")


def extend(upstream: Any) -> Any:
    """A platform class derived from vllm-ascend's `NPUPlatform`."""

    class AscendSpecPlatform(upstream):
        """vllm-ascend's platform; `check_and_update_config` also checks the plugin's options."""

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """As upstream, after the plugin's options were checked.

            Raises:
                UserError: an unknown or contradictory option under `ascend_spec`, or a drafter
                    that does not fit the target.
            """
            if vllm_config.model_config is None:
                super().check_and_update_config(vllm_config)
                return
            options = Options.from_additional_config(vllm_config.additional_config)
            _check(vllm_config, options)
            _state_rotary_share(vllm_config.model_config.hf_text_config)
            super().check_and_update_config(vllm_config)
            _log_lane(vllm_config)

    AscendSpecPlatform.__module__ = __name__
    AscendSpecPlatform.__qualname__ = "AscendSpecPlatform"
    return AscendSpecPlatform


def _check(vllm_config: Any, options: Options) -> None:
    from vllm_ascend_spec.engine import checks

    check_layout(options)
    speculative = checks.speculative_of(vllm_config.speculative_config)
    checks.check(checks.Plan(vllm_config.model_config.model, speculative, options))
    if options.adaptive:
        check_adaptive(vllm_config, options)


def check_layout(options: Options) -> None:
    """Refuse a layout of recurrent states, and draft lengths, that vllm-ascend does not have."""
    if options.draft_lengths:
        raise UserError(
            "ascend_spec.draft_lengths: vllm-ascend's drafters always draft "
            "num_speculative_tokens. Leave it out."
        )
    if options.gdn_state == "replay":
        raise UserError(
            'ascend_spec.gdn_state is "replay", and vllm-ascend keeps a state for each row: only '
            'the engine for CUDA has that layout. Leave it at "auto".'
        )


def check_adaptive(vllm_config: Any, options: Options) -> None:
    """Refuse what adaptive verification cannot do on vllm-ascend."""
    if options.confidence == "head":
        raise UserError(
            'ascend_spec.confidence is "head", and the vLLM below this vllm-ascend loads no '
            'confidence head. Leave it at "auto": the largest softmax of each draft token.'
        )
    if options.planner == "vllm":
        raise UserError(
            'ascend_spec.planner is "vllm", and the vLLM below this vllm-ascend has no adaptive '
            'verification of its own. Leave it at "plugin".'
        )
    draft_tokens = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)
    if draft_tokens + 1 > acl.LONGEST_ROW:
        raise UserError(
            f"num_speculative_tokens of --speculative-config is {draft_tokens}, and attention in "
            f"an ACL graph takes {acl.LONGEST_ROW} rows of a request. Set it to "
            f"{acl.LONGEST_ROW - 1} or less, or ascend_spec.adaptive to false."
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise UserError(
            f"ascend_spec.adaptive is true with --pipeline-parallel-size {stages}: only the last "
            "stage knows the confidences. Set it to 1, or adaptive to false."
        )
    if getattr(vllm_config.speculative_config, "use_local_argmax_reduction", False):
        raise UserError(
            "use_local_argmax_reduction of --speculative-config leaves no logits to take a "
            "confidence from. Drop it, or set ascend_spec.adaptive to false."
        )


def _state_rotary_share(text_config: Any) -> None:
    """vllm-ascend sizes its rotary buffer by the top-level key, where transformers 5 has none."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor")
    if share is not None and getattr(text_config, "partial_rotary_factor", None) != share:
        text_config.partial_rotary_factor = share


def _log_lane(vllm_config: Any) -> None:
    from vllm_ascend_spec.engine import ascend_lanes

    choice = ascend_lanes.choose(ascend_lanes.probe(), ascend_lanes.asks_for_graphs(vllm_config))
    logger.info("Lane %s: %s", choice.lane.value, choice.reason)
