"""A serving load and what comes back from it. No vLLM is imported here."""

from dataclasses import dataclass

from harness.engines.contract import GenerationRequest


@dataclass(frozen=True)
class TimedRequest:
    """A request that arrives `at_s` seconds after the load begins."""

    request: GenerationRequest
    at_s: float = 0.0


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request.

    Attributes:
        t_s: seconds since the load began.
        num_tokens: tokens that came together.
        finished: whether they are the request's last.
    """

    request_id: str
    t_s: float
    num_tokens: int
    finished: bool
