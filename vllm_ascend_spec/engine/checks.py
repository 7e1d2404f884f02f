"""Checks of a configuration before any weight is loaded, with the key or file in the message.

vLLM finds most of these mistakes too, but after minutes of loading, as a size assertion deep in a
model, or not at all: a drafter for another target drafts rubbish and only costs speed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from vllm_ascend_spec.drafters.support import Host
from vllm_ascend_spec.engine import choice
from vllm_ascend_spec.engine.checkpoint import Checkpoint
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options

logger = logging.getLogger("vllm.ascend_spec.checks")

_TARGET = "--model"
_DRAFTER = "--speculative-config model"

# Part of the architecture's name that a method's drafters carry.
_FAMILY = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_WITHOUT_CONFIDENCE = ("suffix",)
_NGRAM = ("ngram", "ngram_gpu")
# Norms of the target, by the start of its architecture's name: x * (1 + w), and x * w. The gated
# norm of a GDN layer and every norm of a drafter are plain. Others are not judged.
_ZERO_CENTRED = ("Qwen3_5", "Qwen3Next")
_PLAIN = ("LlamaFor", "MistralFor", "Qwen2For", "Qwen3For", "Qwen3MoeFor")
_GATED = "linear_attn"


@dataclass(frozen=True)
class Plan:
    """The parts of a configuration that are checked; directories may be hub names."""

    model: str
    speculative: dict[str, Any] | None
    options: Options

    @property
    def method(self) -> str | None:
        return None if self.speculative is None else str(self.speculative.get("method") or "")

    @property
    def adaptive(self) -> bool:
        """What is demanded: "auto" demands nothing."""
        if isinstance(self.options.adaptive, bool):
            return self.options.adaptive
        return bool((self.speculative or {}).get("enable_adaptive_verification"))


def check(plan: Plan) -> None:
    """Check options against each other, and the drafter against the target.

    Raises:
        UserError: names the option, key or file, and the mend.
    """
    _check_options(plan)
    target = Checkpoint.find(plan.model, _TARGET)
    if target is not None:
        _ = target.weights
        _check_target_norms(target)
    if plan.speculative is None or target is None:
        return
    if plan.method == "mtp":
        _check_mtp(target)
    family = _FAMILY.get(plan.method or "")
    if family is None:
        return
    drafter = _drafter(plan)
    if drafter is None:
        return
    _check_family(plan, drafter, family)
    _check_norms(drafter, drafter.norms, zero_centred=False)
    _check_sizes(target, drafter)
    _check_layers(target, drafter)
    _check_block(plan, drafter)
    if plan.method == "dspark":
        _check_confidence_head(plan, drafter)


def speculative_of(config: Any) -> dict[str, Any] | None:
    """vLLM's speculative config object as `Plan` takes it; vLLM 0.27 knows no adaptive flag."""
    if config is None:
        return None
    return {
        "method": config.method,
        "model": config.model,
        "num_speculative_tokens": config.num_speculative_tokens,
        "enable_adaptive_verification": getattr(config, "enable_adaptive_verification", None)
        or None,
    }


def check_and_apply(vllm_config: Any, options: Options) -> None:
    """Check vLLM's own configuration object, then apply the options to it."""
    config = vllm_config.speculative_config
    speculative = speculative_of(config)
    if vllm_config.model_config is not None and vllm_config.load_config.load_format != "dummy":
        check(Plan(vllm_config.model_config.model, speculative, options))
    if config is None:
        return
    if options.adaptive == "auto":
        verdict = choice.adaptive(vllm_config, Host(*_platform()))
        config.enable_adaptive_verification = verdict.ok
        logger.info(
            'ascend_spec.adaptive "auto": adaptive verification is %s%s',
            "on" if verdict.ok else "off",
            f" ({verdict.reason})" if verdict.reason else "",
        )
    elif options.adaptive is not None:
        config.enable_adaptive_verification = options.adaptive
    if config.enable_adaptive_verification and config.method in _NGRAM and not scores_matches():
        raise UserError(
            f"Method {config.method!r} has no confidences on this engine: set ascend_spec.adaptive "
            "to false."
        )
    choice.show_to_compute_hash(vllm_config)


def scores_matches() -> bool:
    """Whether this process gives n-gram drafts a confidence."""
    replaced = sys.modules.get("vllm_ascend_spec.engine.ngram")
    return replaced is not None and bool(replaced.declared())


def _platform() -> tuple[str, tuple[int, int] | None]:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "cpu", None
    capability = current_platform.get_device_capability()
    return "cuda", None if capability is None else (capability.major, capability.minor)


def _check_options(plan: Plan) -> None:
    given = (plan.speculative or {}).get("enable_adaptive_verification")
    wanted = plan.options.adaptive
    if isinstance(wanted, bool) and given is not None and wanted != given:
        raise UserError(
            f"ascend_spec.adaptive is {str(wanted).lower()}, and enable_adaptive_verification of "
            f"--speculative-config is {str(given).lower()}. Give one of them."
        )
    if wanted is True and plan.speculative is None:
        raise UserError(
            "ascend_spec.adaptive is true, and nothing drafts. Add --speculative-config."
        )
    if plan.adaptive and plan.method in _WITHOUT_CONFIDENCE:
        raise UserError(
            f"Adaptive verification needs a confidence for each draft token, and method "
            f"{plan.method!r} has none. Leave it off, or choose ngram_gpu, mtp, eagle3, dflash or "
            "dspark."
        )
    if plan.options.confidence == "head" and not (plan.adaptive and plan.method == "dspark"):
        raise UserError(
            'ascend_spec.confidence is "head", which only adaptive verification with method '
            '"dspark" has. Turn ascend_spec.adaptive on, or leave confidence at "auto".'
        )


def _check_mtp(target: Checkpoint) -> None:
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    if not any(target.config.get(key) for key in keys):
        raise UserError(
            f'--speculative-config method is "mtp", and {target.config_path} declares no MTP layer '
            f"({' or '.join(keys)}). Choose another method, or a target trained with MTP."
        )
    if "mtp_num_hidden_layers" in target.config and target.has_weight("mtp.") is False:
        raise UserError(
            f"{target.config_path} declares an MTP layer (mtp_num_hidden_layers), and the weight "
            f"files in {target.directory} hold no mtp.* weight. Copy the whole checkpoint."
        )


def _drafter(plan: Plan) -> Checkpoint | None:
    assert plan.speculative is not None
    name = plan.speculative.get("model")
    if not name:
        raise UserError(
            f'--speculative-config: method "{plan.method}" needs "model", the drafter\'s directory.'
        )
    return Checkpoint.find(str(name), _DRAFTER)


def _check_family(plan: Plan, drafter: Checkpoint, family: str) -> None:
    name = drafter.architecture
    if family in name.lower():
        return
    right = next((m for m, part in _FAMILY.items() if part in name.lower()), None)
    mend = f'Set method to "{right}"' if right else f'Give a drafter for "{plan.method}"'
    raise UserError(
        f'--speculative-config method is "{plan.method}", and {drafter.config_path} describes '
        f"{name} (architectures). {mend}."
    )


def _check_sizes(target: Checkpoint, drafter: Checkpoint) -> None:
    hidden = target.config.get("hidden_size")
    expected = drafter.config.get("target_hidden_size") or drafter.config.get("hidden_size")
    if expected and expected != hidden:
        _refuse(target, drafter, "target_hidden_size", expected, "hidden_size", hidden)
    vocabulary, known = target.config.get("vocab_size"), drafter.config.get("vocab_size")
    if known and known != vocabulary:
        _refuse(target, drafter, "vocab_size", known, "vocab_size", vocabulary)
    reduced = drafter.config.get("draft_vocab_size") or known
    if reduced != known and drafter.has_weight("d2t") is False:
        raise UserError(
            f"{drafter.config_path} has draft_vocab_size {reduced} of {known}, and the weights in "
            f"{drafter.directory} hold no d2t table from draft to target tokens. Copy it too, or "
            "export the drafter anew."
        )


def _check_layers(target: Checkpoint, drafter: Checkpoint) -> None:
    layers = int(target.config.get("num_hidden_layers") or 0)
    key, ids, last = _feature_layers(drafter, layers)
    wrong = [i for i in ids if not (isinstance(i, int) and 0 <= i <= last)]
    if wrong and layers:
        raise UserError(
            f"{drafter.config_path}: {key} names layers {wrong}, and the target "
            f"{target.config_path} has {layers} layers. This drafter belongs to another target."
        )
    features = drafter.shapes.get("fc.weight")
    width = len(ids) * int(target.config.get("hidden_size") or 0)
    if ids and features and features[-1] != width:
        raise UserError(
            f"{drafter.directory}: fc.weight takes {features[-1]} features, and {len(ids)} layers "
            f"({key}) of the target have {width}. This drafter belongs to another target."
        )


def _feature_layers(drafter: Checkpoint, layers: int) -> tuple[str, list[Any], int]:
    """Key, ids and largest id of the target layers that the drafter reads.

    EAGLE-3 counts the embedding as layer 0; DFlash and DSpark count from the first layer.
    """
    config = drafter.config
    nested: Iterable[tuple[str, Any, int]] = (
        (
            "eagle_aux_hidden_state_layer_ids",
            config.get("eagle_aux_hidden_state_layer_ids"),
            layers,
        ),
        (
            "dflash_config.target_layer_ids",
            (config.get("dflash_config") or {}).get("target_layer_ids"),
            layers - 1,
        ),
        ("target_layer_ids", config.get("target_layer_ids"), layers - 1),
    )
    return next(((k, list(ids), last) for k, ids, last in nested if ids), ("", [], layers))


def _check_block(plan: Plan, drafter: Checkpoint) -> None:
    assert plan.speculative is not None
    block, wanted = drafter.config.get("block_size"), plan.speculative.get("num_speculative_tokens")
    if not block or not wanted:
        return
    # DFlash's block holds the anchor and K masks; DSpark reads its first draft at the anchor.
    most = block if plan.method == "dspark" else block - 1
    if wanted > most:
        _warn_once(
            f"num_speculative_tokens is {wanted}, and {drafter.config_path} was trained for blocks "
            f"of {block} (block_size): draft tokens after the {most}th are guesses. Set it to "
            f"{most} or less"
        )


def _check_target_norms(target: Checkpoint) -> None:
    zero_centred = target.architecture.startswith(_ZERO_CENTRED)
    if not zero_centred and not target.architecture.startswith(_PLAIN):
        return
    gated = {name: weight for name, weight in target.norms.items() if _GATED in name}
    others = {name: weight for name, weight in target.norms.items() if name not in gated}
    _check_norms(target, gated, zero_centred=False)
    _check_norms(target, others, zero_centred)


def _check_norms(found: Checkpoint, norms: dict[str, Any], zero_centred: bool) -> None:
    """Warn of norms that are stored for the other of two conventions (speculators#1098).

    Trained norms wander, so no mean of one tensor decides: in the zoo those of right checkpoints
    lie between 0.10 and 1.58 where the scale is w, between -0.76 and 0.67 where it is 1 + w. Signs
    of all norms together do: a plain scale starts at 1 and keeps its sign (none of the zoo's is
    0 or less; 7 to 64 % are once 1 is subtracted), a zero-centred one has both (57 %; none once
    1 is added). A warning and not an error, for this is evidence and no proof.
    """
    if not norms:
        return
    every = np.concatenate(list(norms.values()))
    mean, not_positive = float(every.mean()), float((every <= 0).mean())
    if zero_centred:
        wrong, expected, stored = not_positive < 0.001 and mean > 0.5, "1 + w", "w"
    else:
        wrong, expected, stored = not_positive > 0.05 and mean < 0.5, "w", "1 + w"
    if not wrong:
        return
    means = {name: float(weight.mean()) for name, weight in norms.items()}
    usual = 1.0 if zero_centred else 0.0
    name = min(means, key=lambda n: abs(means[n] - usual))
    suffering = "drafts" if found.option == _DRAFTER else "answers"
    _warn_once(
        f"{found.weights[name].path} holds norm weights that look made for a scale of {stored} "
        f"(mean {mean:.2f} over {len(norms)} norms, {100 * not_positive:.0f} % not positive; "
        f"{name}: mean {means[name]:.2f}), and {found.architecture} scales by {expected}: its "
        f"{suffering} will be poor. {'Subtract' if zero_centred else 'Add'} 1 when the checkpoint "
        f"is exported, or correct architectures in {found.config_path}"
    )


@cache
def _warn_once(line: str) -> None:
    """A configuration is checked before vLLM is imported, and again where vLLM completes it."""
    logger.warning(line)


def _check_confidence_head(plan: Plan, drafter: Checkpoint) -> None:
    declared = bool(drafter.config.get("enable_confidence_head"))
    found = drafter.has_weight("confidence_head")
    if not plan.adaptive or (declared and found is not False):
        return
    what = (
        f"{drafter.config_path} declares a confidence head (enable_confidence_head), and the "
        f"weights in {drafter.directory} hold none"
        if declared
        else f"{drafter.config_path} has no confidence head (enable_confidence_head)"
    )
    if declared or plan.options.confidence == "head":
        raise UserError(
            f"{what}, which adaptive verification was to use. Give a drafter with one, or set "
            'enable_confidence_head to false and ascend_spec.confidence to "auto" for an estimate.'
        )
    logger.info("%s: adaptive verification estimates confidence from the draft's softmax", what)


def _refuse(
    target: Checkpoint, drafter: Checkpoint, key: str, found: Any, target_key: str, expected: Any
) -> None:
    raise UserError(
        f"{drafter.config_path}: {key} is {found}, and the target {target.config_path} has "
        f"{target_key} {expected}. This drafter belongs to another target."
    )
