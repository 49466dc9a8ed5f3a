"""Texts that may part where two tokens are equally likely, and nowhere else."""

from dataclasses import dataclass, field

from vllm import SamplingParams

from harness.engines.contract import EngineStats, GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import sampling_params
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import LiveDecision, live_engine, record_decisions
from tests.gpu.recomputed import Recomputed

NEAR = 0.25  # of a logprob: bfloat16 logits of size 16 to 32 lie 0.125 apart


@dataclass(frozen=True)
class Answer:
    """Tokens, and beside each by how much its logprob exceeded the next one's."""

    tokens: list[int]
    leads: list[float]


@dataclass
class Answers:
    """Of one engine, by request."""

    answers: dict[str, Answer] = field(default_factory=dict)
    decisions: dict[str, list[LiveDecision]] = field(default_factory=dict)
    stats: EngineStats | None = None
    recomputed: Recomputed | None = None


def answers_of(
    shape: EngineShape, settings: EvictionSettings, requests: list[GenerationRequest], recompute: bool = False
) -> Answers:
    """Run all requests together; with `recompute` every choice is made again on the CPU."""
    found = Answers()
    with live_engine(shape, settings) as engine:
        found.decisions = record_decisions(engine)
        found.recomputed = Recomputed(engine) if recompute else None
        llm = engine.llm_engine
        for request in requests:
            params: SamplingParams = sampling_params(request)
            params.logprobs = 2
            llm.add_request(request.request_id, {"prompt_token_ids": request.prompt_token_ids}, params)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    (completion,) = output.outputs
                    leads = [lead_of(candidates) for candidates in completion.logprobs]
                    found.answers[output.request_id] = Answer(list(completion.token_ids), leads)
        found.stats = engine.stats()
    return found


def lead_of(candidates: dict) -> float:
    """Logprob of the best candidate less that of the second."""
    best, second = sorted((candidate.logprob for candidate in candidates.values()), reverse=True)[:2]
    return best - second


def parting(one: Answer, other: Answer) -> tuple[int, float] | None:
    """Where two answers part, and the smaller of the two leads there; None if they never do."""
    for place, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if left != right:
            return place, min(one.leads[place], other.leads[place])
    if len(one.tokens) != len(other.tokens):
        return min(len(one.tokens), len(other.tokens)), float("inf")
    return None


def compare(one: Answers, other: Answers) -> tuple[str, list[str]]:
    """A note on how two engines agree, and the requests that part where nothing was near."""
    assert one.answers.keys() == other.answers.keys()
    partings = {name: parting(answer, other.answers[name]) for name, answer in one.answers.items()}
    near = {name: found for name, found in partings.items() if found is not None}
    apart = [f"{name} at token {place}, lead {lead:.3f}" for name, (place, lead) in near.items() if lead > NEAR]
    equal = len(partings) - len(near)
    return f"{equal} of {len(partings)} texts equal, {len(near) - len(apart)} part at a near-tie", apart
