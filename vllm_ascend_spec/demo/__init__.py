"""Every drafting method on a trained tiny model in real vLLM, side by side.

Nothing heavy is imported here: the arms are processes of their own.
"""

from __future__ import annotations

from pathlib import Path


def run(
    methods: list[str] | None,
    prompts: int | None,
    json_path: Path | None,
    html_path: Path | None,
    model: str = "hybrid",
) -> int:
    """Run the demo, print its table and write the files that were asked for.

    methods: arms to run, all when None; the arm without speculation always runs. prompts: held-out
    prompts an arm. model: a target of the zoo.

    Returns 0, or 1 when an arm failed or an answer really differs from no speculation.

    Raises:
        UserError: unknown method or model, too many prompts, or a file that cannot be written.
    """
    from vllm_ascend_spec.demo import session

    return session.run(methods, prompts, json_path, html_path, model)
