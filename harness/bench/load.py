"""The requests of a load, drawn from a seed."""

import random
from collections.abc import Sequence
from itertools import accumulate

from harness.bench.config import LoadConfig, Plan
from harness.bench.models import Vocabulary
from harness.engines.contract import GenerationRequest
from harness.engines.vllm.traffic import TimedRequest


def make_load(plan: Plan, vocabulary: Vocabulary) -> list[TimedRequest]:
    """Random prompts without special tokens, with lengths and arrivals as configured.

    The same plan gives the same load.
    """
    load = plan.config.load
    generator = random.Random(load.seed)
    arrivals = _arrivals(load, generator)
    inputs = plan.input_tokens.draw(generator, load.num_requests)
    outputs = plan.output_tokens.draw(generator, load.num_requests)
    stop = () if load.ignore_eos else vocabulary.stop
    return [
        TimedRequest(
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=generator.choices(vocabulary.ordinary, k=num_input),
                max_new_tokens=num_output,
                stop_token_ids=stop,
                ignore_eos=load.ignore_eos,
            ),
            at_s,
        )
        for number, (at_s, num_input, num_output) in enumerate(zip(arrivals, inputs, outputs, strict=True))
    ]


def warmup_load(plan: Plan, load: Sequence[TimedRequest]) -> list[TimedRequest]:
    """The first requests of the load, all at once, with short answers."""
    warmup = plan.config.warmup
    return [
        TimedRequest(
            GenerationRequest(
                request_id=timed.request.request_id,
                prompt_token_ids=timed.request.prompt_token_ids,
                max_new_tokens=min(warmup.output_tokens, timed.request.max_new_tokens),
                ignore_eos=True,
            )
        )
        for timed in load[: warmup.num_requests]
    ]


def _arrivals(load: LoadConfig, generator: random.Random) -> list[float]:
    """Seconds; the gaps of a Poisson process are exponential, and the first request opens the load."""
    if load.request_rate is None:
        return [0.0] * load.num_requests
    gaps = [generator.expovariate(load.request_rate) for _ in range(load.num_requests - 1)]
    return [0.0, *accumulate(gaps)]
