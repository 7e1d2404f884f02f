"""Child process of `test_profile_command.py`: `vllm-ascend-spec profile`, under a clock.

Run as `python profile_case.py ANSWER.json ARGUMENTS...`; the arguments are the command's, and
`--out` must be among them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_ascend_spec.cli import app
from vllm_ascend_spec.engine import launch
from vllm_ascend_spec.errors import UserError


class Clock:
    """When the manager of the engine's runner began to measure, and when it had its surface."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.manager: Any = None

    def watch(self, manager_class: Any) -> None:
        """Look at every manager of this class."""
        batches, build = (
            manager_class.batches_to_profile,
            manager_class.set_initial_cost_curves,
        )

        def batches_to_profile(manager: Any, sizes: list[int]) -> Any:
            self.began = time.monotonic()
            yield from batches(manager, sizes)

        def set_initial_cost_curves(manager: Any, samples: list[Any]) -> None:
            build(manager, samples)
            self.ended, self.manager = time.monotonic(), manager

        manager_class.batches_to_profile = batches_to_profile
        manager_class.set_initial_cost_curves = set_initial_cost_curves


def main(answer: str, *arguments: str) -> None:
    launch.set_up()
    from vllm_ascend_spec.engine import profiling
    from vllm_ascend_spec.engine.adaptive import BudgetManager

    clock = Clock()
    clock.watch(BudgetManager)
    began = time.monotonic()
    status = app(["profile", *arguments], standalone_mode=False)
    out = Path(arguments[arguments.index("--out") + 1])
    runner, ladder = clock.manager._runner, clock.manager._ladder

    def taken(path: Path) -> str | None:
        """None where this engine would start with the file; else why not."""
        try:
            profiling.load_surface(runner, ladder, path)
        except UserError as error:
            return str(error)
        return None

    foreign = out.with_name("foreign.json")
    foreign.write_text(out.read_text().replace('"ranks": 1', '"ranks": 2'))
    found = {
        "status": status,
        "seconds": clock.ended - clock.began,
        "all_seconds": time.monotonic() - began,
        "ladder": ladder,
        "max_requests": runner.max_num_reqs,
        "max_rows": runner.max_num_tokens,
        "refused": taken(out),
        "foreign_refused": taken(foreign),
    }
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
