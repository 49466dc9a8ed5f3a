"""What the experiment and an engine say to each other. No engine is imported here.

An engine turns `GenerationRequest`s into `GenerationResult`s in the order in which they finish.
`harness.engines.vllm` (vLLM) and `harness.engines.hf` (Hugging Face) implement `Engine`; tests use a scripted one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Protocol


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue greedily.

    Attributes:
        request_id: unique within the run.
        prompt_token_ids: the whole prompt, BOS and chat template included.
        max_new_tokens: the most tokens to generate.
        stop_token_ids: generation ends after any of these; the stop token is not part of the result.
        min_new_tokens: no stop token is accepted before this many tokens.
        ignore_eos: generate exactly `max_new_tokens` (load tests).
    """

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class EvictionRecord:
    """What eviction did to one request. All counts are tokens of one layer unless named blocks."""

    num_evictions: int = 0
    num_evicted_tokens: int = 0
    peak_resident_tokens: int = 0
    final_resident_tokens: int = 0
    peak_blocks: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        token_ids: generated tokens without the stop token.
        finish_reason: "stop" or "length".
        ttft_s, e2e_s: seconds from arrival in the engine to the first token, to the end.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    eviction: EvictionRecord = field(default_factory=EvictionRecord)
    ttft_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True)
class BlockUsageSample:
    """KV blocks in use after one engine step.

    Attributes:
        t_s: seconds after the first step.
        running: requests in the step; 0 where one has handed its blocks back after it.
        prefilling: those of them that read prompt tokens.
    """

    t_s: float
    blocks: int
    running: int
    prefilling: int = 0


@dataclass(frozen=True)
class KeptTokens:
    """Tokens that layers and KV heads kept of the prompts that were evicted from.

    Attributes:
        num_prompts: how many these are.
        mean, least, most: over prompts, by layer and KV head.
    """

    num_prompts: int
    mean: list[list[float]]
    least: list[list[int]]
    most: list[list[int]]

    @classmethod
    def over(cls, prompts: Sequence[Sequence[Sequence[int]]]) -> "KeptTokens | None":
        """From the counts of each prompt, by layer and KV head; None without prompts."""
        if not prompts:
            return None

        def reduce(function: Callable[[Sequence[int]], float]) -> list[list]:
            layers = (zip(*layer, strict=True) for layer in zip(*prompts, strict=True))
            return [[function(counts) for counts in heads] for heads in layers]

        return cls(len(prompts), reduce(fmean), reduce(min), reduce(max))


@dataclass(frozen=True)
class ReadTokens:
    """Tokens that attention read in decode steps, where a policy reads less than it keeps.

    Attributes:
        num_steps: decode steps of all requests.
        read, resident: tokens that were read and that were there, summed over these, by layer and KV head.
    """

    num_steps: int
    read: list[list[int]]
    resident: list[list[int]]

    def __add__(self, other: "ReadTokens") -> "ReadTokens":
        """Both together."""
        sums = (
            [[a + b for a, b in zip(*heads, strict=True)] for heads in zip(mine, others, strict=True)]
            for mine, others in ((self.read, other.read), (self.resident, other.resident))
        )
        return ReadTokens(self.num_steps + other.num_steps, *sums)


@dataclass(frozen=True)
class EngineStats:
    """Memory and work of a whole run, read from the engine's own pool, not from a formula.

    Attributes:
        mean_blocks: KV blocks in use over time, see `mean_over_time`.
        measured_s: seconds over which it is the mean.
        eviction_time_s, decode_eviction_time_s: host time of evictions and of watching attention for them; and of that,
            in steps that read no prompt.
        score_bits: significant bits at which scores of tokens were compared; None if another implementation chose.
        kept: where layers and heads keep unequally many tokens; None elsewhere.
        read: where a policy reads less than it keeps; None elsewhere.
    """

    block_size: int
    num_blocks: int
    bytes_per_block: int
    peak_blocks: int
    mean_blocks: float
    free_blocks_at_end: int
    num_steps: int
    num_evictions: int
    num_evicted_tokens: int
    num_preemptions: int
    eviction_time_s: float
    measured_s: float = 0.0
    decode_eviction_time_s: float = 0.0
    block_usage: list[BlockUsageSample] = field(default_factory=list)
    score_bits: int | None = None
    kept: KeptTokens | None = None
    read: ReadTokens | None = None


def mean_over_time(usage: Sequence[BlockUsageSample]) -> tuple[float, float]:
    """Mean KV blocks over time, each step's number holding until the next, and the seconds that this covers."""
    spans = [(step.blocks, later.t_s - step.t_s) for step, later in pairwise(usage)]
    whole = sum(seconds for _, seconds in spans)
    if not whole:
        return (max((step.blocks for step in usage), default=0) * 1.0, 0.0)
    return sum(blocks * seconds for blocks, seconds in spans) / whole, whole


class Engine(Protocol):
    """Continues prompts. `generate` may be called more than once before `close`."""

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield one result a request, in the order in which they finish."""
        ...

    def stats(self) -> EngineStats:
        """Counts since the engine was built."""
        ...

    def close(self) -> None:
        """Release the model and the KV pool."""
        ...
