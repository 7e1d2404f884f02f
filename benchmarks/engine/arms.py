"""The arms of the speed benchmark: which engines are compared, and what each takes of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import acceptance, shapes
from benchmarks.engine.cases import Case
from benchmarks.engine.driver import engine_arguments
from benchmarks.engine.groups import ADAPTIVE, NONE, VLLM_ADAPTIVE

DRAFT_TOKENS = 7
METHODS = ("dspark", "dflash")
WITH_PREFIXES = 1.5  # times the cache of requests without prefix caching


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
    cases: list[Case]
    repeats: int
    folder: Path
    prefix_caching: bool = False
    shape: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """ValueError for a target, a method or a draft length that is not known."""
        known = {"hybrid": shapes.hybrid, "dense": shapes.dense}
        if self.target not in known:
            raise ValueError(f"--target is {self.target!r}, not hybrid or dense")
        if self.method not in METHODS:
            raise ValueError(f"--method is {self.method!r}, not {' or '.join(METHODS)}")
        if max(self.fixed) > DRAFT_TOKENS:
            raise ValueError(f"--fixed: drafters here draft at most {DRAFT_TOKENS} tokens")
        self.shape = known[self.target](self.layers)

    def options(self) -> dict[str, Options]:
        """No speculation, each fixed K as upstream has it, and the plugin's arms."""
        state = "replay" if self.target == "hybrid" else "native"
        found = {
            NONE: Options(0),
            **{f"K = {k}": Options(k) for k in self.fixed},
            ADAPTIVE: Options(DRAFT_TOKENS, True, state=state),
            VLLM_ADAPTIVE: Options(DRAFT_TOKENS, True, "vllm", state),
        }
        if self.target == "hybrid":
            found["adaptive with native states"] = Options(DRAFT_TOKENS, True)
            found["K = 7 with replay states"] = Options(DRAFT_TOKENS, state="replay")
        return found

    def upstream(self) -> list[str]:
        """The arms that the adaptive one must not lose to; vLLM's own one refuses GDN layers."""
        own = [VLLM_ADAPTIVE] if self.target == "dense" else []
        return [NONE, *(f"K = {k}" for k in self.fixed), *own]

    def cache_mib(self, options: Options, cases: Sequence[Case]) -> int:
        """Cache of an arm that serves any of the cases."""
        return max(self._case_mib(options, case) for case in cases)

    def memory_gib(self, name: str, cases: Sequence[Case]) -> tuple[float, float]:
        """GiB of a GPU that the arm takes if it serves the cases: besides its cache, and in all."""
        options = self.options()[name]
        most = max(case.load for case in cases)
        besides = shapes.engine_gib(self.shape, options.draft_tokens > 0, options.adaptive, most)
        return besides, besides + self.cache_mib(options, cases) / 1024

    def request(
        self, name: str, cases: Sequence[Case], environment: dict[str, str]
    ) -> dict[str, Any]:
        """What `benchmarks.engine.arm` builds the arm from."""
        options = self.options()[name]
        model = shapes.write(self.folder / "target", self.shape)
        most = max(case.load for case in cases)
        tokens = max(
            case.prompt_tokens + case.all_steps(self.repeats) * (options.draft_tokens + 1)
            for case in cases
        )
        engine = engine_arguments(
            self._speculative(options) if options.draft_tokens else None,
            kv_cache_mib=self.cache_mib(options, cases),
            planner=options.planner,
            gdn_state=options.state,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max(2048, -(-tokens // 1024) * 1024),
            max_num_seqs=most,
            largest_graph=min(2048, most * (options.draft_tokens + 1)),
            enable_cumem_allocator=True,
            enable_prefix_caching=self.prefix_caching,
        )
        return {
            "model": str(model),
            "engine": engine,
            "acceptance": options.draft_tokens > 0,
            "turns": True,
            "environment": environment,
        }

    def _case_mib(self, options: Options, case: Case) -> int:
        # Easy requests grow beyond the mean, hard ones stay below it.
        grown = case.all_steps(self.repeats) * acceptance.emitted(options.draft_tokens)
        mib = shapes.cache_mib(
            self.shape,
            case.load,
            case.prompt_tokens + int(grown),
            options.draft_tokens,
            options.state == "replay",
        )
        # A block's state is held until the next block has its own; what is done can be evicted.
        return int(mib * WITH_PREFIXES) if self.prefix_caching else mib

    def _speculative(self, options: Options) -> dict[str, Any]:
        drafter = shapes.drafter(self.method, self.layers)
        return {
            "method": self.method,
            "model": str(shapes.write(self.folder / "drafter", drafter)),
            "num_speculative_tokens": options.draft_tokens,
            "enable_adaptive_verification": options.adaptive,
            **acceptance.speculative_options(options.draft_tokens),
        }
