"""What is compared in bfloat16 on FlashAttention: one request at a time without graphs, and all at once with them."""

from dataclasses import replace

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.settings import EvictionSettings
from policies import Phase
from tests.gpu.near_ties import Answers, answers_of, compare
from tests.tiny_llama import random_prompt

BUDGET = 256
CHUNKED = {"prefill": "chunked", "prefill_chunk": 512}
SETTINGS = {
    "paged_eviction": ("paged_eviction", {}),  # full graphs
    "h2o": ("h2o", {}),  # piecewise graphs
    "snapkv": ("snapkv", {"window": 32}),
    "streaming_llm": ("streaming_llm", {"position_mode": "cache"}),
    "random in chunks": ("random", CHUNKED),
    "keydiff in chunks": ("keydiff", CHUNKED),
}
BY_POSITION = ("streaming_llm", "random in chunks")
BY_KEYS_AND_VALUES = ("paged_eviction", "keydiff in chunks")


def requests_of(lengths: list[int], num_new: int) -> list[GenerationRequest]:
    """Prompts of these lengths."""
    return [
        GenerationRequest(f"r{index}", random_prompt(length, index), num_new, ignore_eos=True)
        for index, length in enumerate(lengths)
    ]


def two_ways(
    shape: EngineShape, name: str, requests: list[GenerationRequest], graphs: bool = True
) -> tuple[Answers, Answers]:
    """Answers one at a time, eager and in order; and of all at once, in graphs and with overlapping steps."""
    policy, options = SETTINGS[name]
    settings = EvictionSettings(policy, BUDGET, options)
    alone = replace(shape, max_num_seqs=1, enforce_eager=True, async_scheduling=False)
    together = replace(shape, max_num_seqs=32, enforce_eager=not graphs, async_scheduling=True)
    recompute = name in BY_KEYS_AND_VALUES
    return answers_of(alone, settings, requests), answers_of(together, settings, requests, recompute)


def check(name: str, alone: Answers, together: Answers) -> str:
    """A note on how they agree.

    Raises:
        AssertionError: a text parts where nothing was near, or other positions stay than should.
    """
    note, apart = compare(alone, together)
    assert not apart, f"{note}; apart: {'; '.join(apart)}"
    assert together.stats.num_evictions >= alone.stats.num_evictions > 0
    assert together.stats.free_blocks_at_end == together.stats.num_blocks - 1
    if together.recomputed is not None:
        wrong, compared = together.recomputed.wrong, together.recomputed.num_compared
        assert not wrong, f"{len(wrong)} of {compared} choices are not those of the CPU, the first: {wrong[0]}"
        note += f"; {compared} choices as on the CPU"
    if name in BY_POSITION:
        for request, decisions in alone.decisions.items():
            prompt = [one for one in decisions if one.phase is not Phase.DECODE]
            assert prompt == together.decisions[request][: len(prompt)], f"positions kept of {request}"
    return note
