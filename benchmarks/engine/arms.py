"""The arms of the speed benchmark: which engines are compared, and what each takes of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import acceptance, shapes
from benchmarks.engine.driver import engine_arguments

DRAFT_TOKENS = 7
SKIP, STEPS = 24, 64
EMITTED = 4.0  # tokens a step and request, mean over the acceptance model's requests at K = 7
NONE, ADAPTIVE = "no speculation", "adaptive"


@dataclass(frozen=True)
class Options:
    """state: layout of GDN states, vLLM's unless said otherwise."""

    draft_tokens: int
    adaptive: bool = False
    planner: str = "plugin"
    state: str = "native"


@dataclass
class Setting:
    """What all arms of a run have in common; `folder` takes their checkpoints without weights."""

    target: str
    method: str
    layers: int
    fixed: list[int]
    loads: list[int]
    prompt_tokens: int
    folder: Path
    shape: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """ValueError for a target that is not known."""
        known = {"hybrid": shapes.hybrid, "dense": shapes.dense}
        if self.target not in known:
            raise ValueError(f"--target is {self.target!r}, not hybrid or dense")
        self.shape = known[self.target](self.layers)

    def options(self) -> dict[str, Options]:
        """No speculation, each fixed K as upstream has it, and the plugin's arms."""
        state = "replay" if self.target == "hybrid" else "native"
        found = {
            NONE: Options(0),
            **{f"K = {k}": Options(k) for k in self.fixed},
            ADAPTIVE: Options(DRAFT_TOKENS, True, state=state),
            "adaptive with vLLM's planner": Options(DRAFT_TOKENS, True, "vllm", state),
        }
        if self.target == "hybrid":
            found["adaptive with native states"] = Options(DRAFT_TOKENS, True)
            found["K = 7 with replay states"] = Options(DRAFT_TOKENS, state="replay")
        return found

    def upstream(self) -> list[str]:
        """The arms that the adaptive one must not lose to."""
        return [NONE, *(f"K = {k}" for k in self.fixed)]

    def cache_mib(self, options: Options, most: int) -> int:
        """Cache of an arm that serves up to `most` requests."""
        # The largest load alone matters; easy requests grow beyond the mean.
        grown = int((SKIP + STEPS) * min(options.draft_tokens + 1, EMITTED))
        return shapes.cache_mib(
            self.shape,
            most,
            self.prompt_tokens + grown,
            options.draft_tokens,
            options.state == "replay",
        )

    def memory_gib(self, name: str, most: int) -> float:
        """GiB of a GPU that the arm takes if it serves up to `most` requests."""
        options = self.options()[name]
        besides = shapes.engine_gib(self.shape, options.draft_tokens > 0, options.adaptive, most)
        return self.cache_mib(options, most) / 1024 + besides

    def request(self, name: str, most: int, environment: dict[str, str]) -> dict[str, Any]:
        """What `benchmarks.engine.arm` builds the arm from."""
        options = self.options()[name]
        model = shapes.write(self.folder / "target", self.shape)
        # Prompt, then for every load its steps, each of up to K + 1 tokens.
        tokens = self.prompt_tokens + len(self.loads) * (SKIP + STEPS) * (DRAFT_TOKENS + 1)
        engine = engine_arguments(
            self._speculative(options) if options.draft_tokens else None,
            kv_cache_mib=self.cache_mib(options, most),
            planner=options.planner,
            gdn_state=options.state,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max(2048, -(-tokens // 1024) * 1024),
            max_num_seqs=most,
            largest_graph=min(2048, most * (options.draft_tokens + 1)),
        )
        return {
            "model": str(model),
            "engine": engine,
            "acceptance": options.draft_tokens > 0,
            "waits": options.adaptive,
            "environment": environment,
        }

    def _speculative(self, options: Options) -> dict[str, Any]:
        drafter = shapes.drafter(self.method, self.layers)
        return {
            "method": self.method,
            "model": str(shapes.write(self.folder / "drafter", drafter)),
            "num_speculative_tokens": options.draft_tokens,
            "enable_adaptive_verification": options.adaptive,
            **acceptance.speculative_options(options.draft_tokens),
        }
