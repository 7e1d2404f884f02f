"""The trained tiny models: where they lie and how vLLM is told to draft with them.

One directory a checkpoint: `hybrid` (GDN and full attention 3:1, MTP weights inside), `dense` (the
control without GDN) and `<target>-<method>` for each drafter. `prompts.jsonl` holds held-out
prompts that no model was trained on. Importing this module loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_spec.drafters.methods import METHODS, method
from vllm_ascend_spec.errors import UserError

ROOT = Path(__file__).parent
TARGETS = ("hybrid", "dense")
DRAFT_TOKENS = 7  # K: a block of 8 for the parallel drafters
NGRAM_WINDOW = (3, 5)  # shortest and longest tail that n-gram looks up


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt; `schema` is the answer's JSON schema, None where it is free text."""

    id: str
    kind: str
    text: str
    schema: dict[str, Any] | None
    reference: str


@dataclass(frozen=True)
class Zoo:
    """The checkpoints under `root`; another root with the same layout serves as well."""

    root: Path = ROOT

    def target(self, name: str) -> Path:
        """Directory of the target model; UserError when it is unknown or not there."""
        if name not in TARGETS:
            raise UserError(f"unknown zoo model {name!r}: choose {' or '.join(TARGETS)}")
        return self._checkpoint(self.root / name)

    def drafter(self, target: str, method_name: str) -> Path | None:
        """Directory of the drafter, None for a method without weights apart from the target's."""
        if not method(method_name).own_checkpoint:
            return None
        return self._checkpoint(self.root / f"{target}-{method_name}")

    def speculative_config(
        self,
        target: str,
        method_name: str,
        draft_tokens: int = DRAFT_TOKENS,
        adaptive: bool = False,
    ) -> dict[str, Any] | None:
        """vLLM's `speculative_config` for Model Runner V2, or None for the method "none"."""
        if method_name == "none":
            return None
        chosen = method(method_name)
        if chosen.vllm_method is None:
            raise UserError(f"{chosen.title} does not run on Model Runner V2 yet")
        config: dict[str, Any] = {
            "method": chosen.vllm_method,
            "num_speculative_tokens": draft_tokens,
        }
        directory = self.drafter(target, method_name)
        if directory is not None:
            config["model"] = str(directory)
        if method_name == "ngram":
            config["prompt_lookup_min"], config["prompt_lookup_max"] = NGRAM_WINDOW
        if adaptive:
            config["enable_adaptive_verification"] = True
        return config

    def methods(self, target: str) -> list[str]:
        """Methods that can draft for `target` with what lies here, in the order of `METHODS`."""
        return [m.name for m in METHODS if m.vllm_method and self._has(target, m.name)]

    def prompts(self) -> list[Prompt]:
        """All held-out prompts; UserError when the file is not there."""
        path = self.root / "prompts.jsonl"
        if not path.is_file():
            raise UserError(f"{path} is missing: install from a complete checkout")
        with path.open(encoding="utf-8") as lines:
            return [Prompt(**json.loads(line)) for line in lines if line.strip()]

    def weight_bytes(self) -> int:
        """Size of all weight files under `root`."""
        return sum(path.stat().st_size for path in self._weights(self.root.rglob("*")))

    def _has(self, target: str, method_name: str) -> bool:
        if method_name == "mtp":
            config = self.root / target / "config.json"
            return config.is_file() and bool(
                json.loads(config.read_text(encoding="utf-8")).get("mtp_num_hidden_layers")
            )
        if not method(method_name).own_checkpoint:
            return True
        return (self.root / f"{target}-{method_name}" / "config.json").is_file()

    @staticmethod
    def _weights(paths: Iterator[Path]) -> Iterator[Path]:
        return (path for path in paths if path.suffix in (".safetensors", ".bin", ".pt"))

    @staticmethod
    def _checkpoint(directory: Path) -> Path:
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} has no config.json: the zoo is incomplete, "
                "install from a complete checkout"
            )
        return directory
