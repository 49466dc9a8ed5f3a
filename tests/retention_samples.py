"""Requests below, at and above a budget, whose retained positions are easy to foresee under StreamingLLM."""

from harness.engines.contract import GenerationRequest
from tests.tiny_llama import random_prompt

BUDGET, SINKS = 64, 4
LENGTHS = {  # name: (prompt tokens, answer tokens)
    "fits": (40, 10),
    "fits-then-grows": (40, 50),
    "exact": (64, 20),
    "long": (200, 30),
    "long-one-token": (200, 1),
    "fits-one-token": (50, 1),
}
REQUESTS = [
    GenerationRequest(name, random_prompt(prompt, prompt), answer, ignore_eos=True)
    for name, (prompt, answer) in LENGTHS.items()
]


def window(name: str, phase: str) -> list[int]:
    """What StreamingLLM keeps of a request; the last token of an answer is not attended."""
    prompt, answer = LENGTHS[name]
    num_tokens = prompt if phase == "prefill_end" else prompt + answer - 1
    return [*range(SINKS), *range(max(SINKS, num_tokens - BUDGET + SINKS), num_tokens)]
