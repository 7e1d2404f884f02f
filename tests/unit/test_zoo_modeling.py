"""The training model must be transformers' model, and its decoder the training model."""

from __future__ import annotations

import pytest

from vllm_ascend_spec.engine.packages import hide_mismatched

torch = pytest.importorskip("torch")
hide_mismatched()
pytest.importorskip("transformers")

from tools.zoo.config import IM_END_ID, TARGET_KINDS, hf_config, target_shape  # noqa: E402
from tools.zoo.generate import greedy_answers  # noqa: E402
from tools.zoo.modeling import Target, chunked_gated_delta_rule, l2_normalise  # noqa: E402


def _reference(kind: str) -> torch.nn.Module:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    cls = Qwen3ForCausalLM if kind == "dense" else Qwen3_5ForCausalLM
    return cls(hf_config(kind)).float().eval()


def _target(kind: str) -> Target:
    torch.manual_seed(3)
    model = Target(target_shape(kind)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


@pytest.mark.parametrize("kind", TARGET_KINDS)
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_logits_equal_transformers(kind: str, length: int) -> None:
    model, reference = _target(kind), _reference(kind)
    assert set(model.state_dict()) == set(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 1024, (2, length))
    with torch.no_grad():
        expected = reference(tokens, output_hidden_states=True)
        got = model(tokens)
    assert got.logits.std() > 0.1
    assert (got.logits - expected.logits).abs().max() < 1e-4
    for ours, theirs in zip(got.hidden[:-1], expected.hidden_states[:-1], strict=True):
        assert (ours - theirs).abs().max() < 1e-4
    assert (got.final - expected.hidden_states[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_packed_documents_do_not_see_each_other(kind: str) -> None:
    model = _target(kind)
    first, other = torch.randint(8, 1024, (2, 1, 70))
    second = torch.randint(8, 1024, (1, 40))
    segments = torch.tensor([[0] * 70 + [1] * 40])
    with torch.no_grad():
        one = model(torch.cat([first, second], 1), segments).logits[:, 70:]
        two = model(torch.cat([other, second], 1), segments).logits[:, 70:]
        leaking = model(torch.cat([other, second], 1)).logits[:, 70:]
    assert (one - two).abs().max() < 1e-4
    assert (one - leaking).abs().max() > 1e-2


def test_chunked_rule_survives_repeated_keys_and_has_right_gradients() -> None:
    torch.manual_seed(0)
    key = l2_normalise(torch.randn(1, 1, 1, 64)).expand(1, 1, 130, 64)
    value = torch.randn(1, 1, 130, 64)
    zeros, ones = torch.zeros(1, 1, 130), torch.ones(1, 1, 130)
    out = chunked_gated_delta_rule(key, key, value, zeros, ones)
    assert (out - value / 8).abs().max() < 1e-3  # the newest value replaces the stored one

    inputs = [torch.randn(1, 1, 66, 8, dtype=torch.double) for _ in range(3)]
    q, k, v = l2_normalise(inputs[0]), l2_normalise(inputs[1]), inputs[2]
    g = -torch.rand(1, 1, 66, dtype=torch.double)
    beta = torch.rand(1, 1, 66, dtype=torch.double)
    arguments = [x.requires_grad_() for x in (q, k, v, g, beta)]
    assert torch.autograd.gradcheck(chunked_gated_delta_rule, arguments, fast_mode=True)


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_greedy_answers_follow_the_full_forward(kind: str) -> None:
    model = _target(kind)
    prompts = [torch.randint(5, 1024, (n,)).tolist() for n in (9, 3, 14)]
    answers = greedy_answers(model, prompts, max_new_tokens=20, batch=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for token in answer:
            logits = model(torch.tensor([tokens])).logits[0, -1]
            assert logits[token] > logits.max() - 1e-3
            tokens.append(token)
        assert len(answer) == 20 or answer[-1] == IM_END_ID
