"""Child process: a command of `vllm-ascend-spec` on the double, its engine included.

Run as `python -m npu_double.command COMMAND ...`; VLLM_ASCEND_SRC names vllm-ascend's source.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import startup


def main() -> int:
    double = startup.install(Path(os.environ["VLLM_ASCEND_SRC"]))
    from vllm_ascend_spec import cli

    sys.argv[0] = "vllm-ascend-spec"
    status = 0
    with double:
        try:
            cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    assert not double.missing, double.missing
    return status


if __name__ == "__main__":
    found = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch_npu's own shutdown waits for threads that the double never started.
    os._exit(found)
