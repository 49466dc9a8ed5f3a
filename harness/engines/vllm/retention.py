"""Writes down which positions stayed resident, for runs that ask for it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.plan import Eviction
from harness.retention import Phase as Moment
from harness.retention import RetentionRecord, append_retention
from policies import Phase, Policy


@dataclass(frozen=True, eq=False)
class Resident:
    """What a request has in the cache.

    Attributes:
        request_id: the engine's, "<id of the caller>-<random>"; the caller's id is what is written down.
        block_ids: its blocks, in order.
        num_resident: tokens in them.
        num_seen: tokens computed so far, evicted ones included.
    """

    request_id: str
    num_prompt_tokens: int
    block_ids: Sequence[int]
    num_resident: int
    num_seen: int


class RetentionLog:
    """Appends to a run folder's `retention.jsonl`: what is left of a prompt once it was read, and at the end.

    Every process of a tensor-parallel group has one, because all of them evict together; one writes, its own heads.
    """

    def __init__(self, folder: str | None, compactor: Compactor, policy: Policy) -> None:
        """Begin the log; `folder` is None in a process that writes nothing."""
        self._folder = None if folder is None else Path(folder)
        self._compactor = compactor
        self._policy = policy
        self._prompts: set[str] = set()

    def read_prompt(self, request_id: str) -> None:
        """The step that is about to run reads the end of this prompt."""
        self._prompts.add(request_id)

    def forget(self, request_id: str) -> None:
        """The request was preempted, and its prompt will be read again."""
        self._prompts.discard(request_id)

    @property
    def prompts(self) -> frozenset[str]:
        """Requests whose prompt has been read and not been written down."""
        return frozenset(self._prompts)

    def prompt(self, request: Resident) -> None:
        """Write down what is left of a prompt, unless an eviction is due first."""
        policy = self._policy.for_prompt(request.num_prompt_tokens)
        if policy.plan(Phase.PREFILL_END, request.num_resident, request.num_seen) == request.num_resident:
            self.prompt_evicted(request)

    def prompt_evicted(self, request: Resident) -> None:
        """Write down what is left of a prompt after its eviction."""
        self._prompts.discard(request.request_id)
        self._write(request, "prefill_end", request.num_resident)

    def end(self, requests: Iterable[Resident]) -> None:
        """Write down what is left of finished requests, after the eviction that their last token made due.

        The engine never carries that one out, as it frees all blocks instead; nothing else is in them yet.
        """
        kept: dict[Resident, int] = {}
        victims: dict[Resident, Victim] = {}
        for one in requests:
            phase = Phase.PREFILL_END if one.request_id in self._prompts else Phase.DECODE
            policy = self._policy.for_prompt(one.num_prompt_tokens)
            num_keep = policy.plan(phase, one.num_resident, one.num_seen)
            if num_keep < one.num_resident:
                eviction = Eviction(phase, one.num_resident, num_keep, one.num_seen, budget=policy.budget)
                blocks = one.block_ids[: math.ceil(one.num_resident / policy.block_size)]
                victims[one] = Victim(one.request_id, eviction, tuple(blocks))
            kept[one] = num_keep
        if victims:
            self._compactor.evict(list(victims.values()))
            kept |= {one: self._compactor.num_kept(victim) for one, victim in victims.items()}
        for one, num_keep in kept.items():
            if one.request_id in self._prompts:
                self._prompts.discard(one.request_id)
                self._write(one, "prefill_end", num_keep)
            self._write(one, "end", num_keep)

    def _write(self, request: Resident, moment: Moment, num_resident: int) -> None:
        """Append the positions of the request's first `num_resident` slots. Waits for the device."""
        if self._folder is None:
            return
        positions = self._compactor.resident_positions(request.request_id, request.block_ids, num_resident)
        sample_id = request.request_id.rpartition("-")[0]
        record = RetentionRecord(sample_id, request.num_prompt_tokens, moment, positions)
        append_retention(self._folder, [record])
