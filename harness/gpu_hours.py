"""Hours of one A100 for so many tokens: a plain calculation, not a measurement.

Reading a prompt costs two operations a weight and token at 120 TFLOP/s; each step of generation reads all weights once
at 1 TB/s, for as many requests as run at once. Reading the KV cache is left out.
"""

from dataclasses import dataclass

FLOPS = 120e12
BYTES_PER_S = 1e12
START_S = 60.0


@dataclass(frozen=True)
class Work:
    """What a run reads and writes, in tokens."""

    prompt_tokens: float
    output_tokens: float


def hours(work: Work, weights_gib: float, num_at_once: int) -> float:
    """Hours of one run, its start included; weights of two bytes."""
    weight_bytes = weights_gib * 2**30
    reading = work.prompt_tokens * weight_bytes / FLOPS  # two bytes and two operations a weight
    writing = work.output_tokens / num_at_once * weight_bytes / BYTES_PER_S
    return (START_S + reading + writing) / 3600
