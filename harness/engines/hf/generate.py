"""Greedy generation of one request under a policy, slow and obvious: the oracle for the vLLM engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from harness.engines.hf.attention import reference_attention
from harness.engines.hf.cache import CacheShape, ReferenceCache
from harness.engines.hf.ragged import choose_kept_ragged
from harness.engines.hf.reading import Reader
from harness.engines.hf.rotary import Rotary
from harness.engines.hf.selection import choose_kept
from harness.engines.hf.signals import build_view
from harness.engines.hf.trace import Decision, ReferenceTrace, Retained, Step
from harness.errors import UserError
from policies.base import Phase, Policy, Signal
from policies.prompt_share import for_model

QUERY_SIGNALS = frozenset({Signal.NEWEST_ATTENTION, Signal.WINDOW_QUERIES, Signal.QUERY_MOMENTS})


def run_reference(
    model: PreTrainedModel,
    policy: Policy,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    retention: bool = False,
) -> ReferenceTrace:
    """Continue one prompt greedily, evicting as the policy says.

    The first token is chosen before the prompt is pruned (in "chunked" mode: before the eviction after its last
    chunk). Positions stay logical. Nothing is evicted once the last token is chosen.

    Args:
        model: a causal LM whose layers attend through transformers' `AttentionInterface`.
        policy: plan and scores.
        prompt_token_ids, max_new_tokens, stop_token_ids, min_new_tokens, ignore_eos: as in `GenerationRequest`.
        retention: note what was retained.

    Raises:
        UserError: empty prompt, no token to generate, or a model that the reference does not cover.
    """
    if not prompt_token_ids or max_new_tokens < 1:
        raise UserError(
            f"a prompt of {len(prompt_token_ids)} tokens with max_new_tokens={max_new_tokens} cannot be continued. "
            "Give at least one prompt token and max_new_tokens=1."
        )
    stop = frozenset() if ignore_eos else frozenset(stop_token_ids)
    request = _Request(model, policy, len(prompt_token_ids))
    with torch.no_grad(), reference_attention(model):
        logits = request.prefill(list(prompt_token_ids))
        token_ids, finish_reason, chosen_from = _decode(request, logits, max_new_tokens, stop, min_new_tokens)
    trace = ReferenceTrace(
        token_ids=token_ids,
        finish_reason=finish_reason,
        decisions=list(request.decisions),
        resident_positions=request.cache.positions(),
        logits=torch.stack(chosen_from),
        steps=request.steps,
        ttft_s=request.ttft_s,
        eviction_s=request.eviction_s,
        **({} if request.cache.reader is None else request.cache.reader.record()),
    )
    return replace(trace, retained=request.retained()) if retention else trace


def _decode(
    request: "_Request", logits: torch.Tensor, max_new_tokens: int, stop: frozenset[int], min_new_tokens: int
) -> tuple[list[int], str, list[torch.Tensor]]:
    """From the prompt's last logits to the end: tokens, finish reason, and the logits of each choice."""
    token_ids: list[int] = []
    chosen_from = []
    phase = Phase.PREFILL_END
    while True:
        if len(token_ids) < min_new_tokens:
            logits[list(stop)] = float("-inf")
        chosen_from.append(logits)
        token = int(logits.argmax())
        if token in stop:
            return token_ids, "stop", chosen_from
        token_ids.append(token)
        if len(token_ids) == max_new_tokens:
            return token_ids, "length", chosen_from
        request.evict(phase)
        phase = Phase.DECODE
        logits = request.forward([token])


@dataclass
class _Request:
    """The running request: model, policy and cache, and the record of what was done."""

    model: PreTrainedModel
    policy: Policy
    num_prompt_tokens: int
    cache: ReferenceCache = field(init=False)
    rotary: Rotary | None = field(init=False, default=None)
    decisions: list[Decision] = field(init=False, default_factory=list)
    steps: list[Step] = field(init=False, default_factory=list)
    ttft_s: float = field(init=False, default=0.0)
    eviction_s: float = field(init=False, default=0.0)
    prompt_positions: list[list[list[int]]] | None = field(init=False, default=None)
    start_s: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Make an empty cache of the model's shape."""
        keep_queries = bool(self.policy.signals & QUERY_SIGNALS)
        shape = CacheShape.of(self.model.config)
        self.policy = for_model(self.policy.for_prompt(self.num_prompt_tokens), shape.num_layers, shape.num_kv_heads)
        first_squared = self.num_prompt_tokens - self.policy.query_window
        self.cache = ReferenceCache.empty(shape, self.num_prompt_tokens, keep_queries, first_squared)
        if Signal.QUERY_MOMENTS in self.policy.signals or self.policy.cache_positions:
            self.rotary = Rotary.of(self.model, shape.head_size)
        self.cache.lenders = self.policy.lenders
        if self.policy.reads_less:
            self.cache.reader = Reader(self.policy, self.num_prompt_tokens, shape.num_layers, shape.num_kv_heads)

    def prefill(self, prompt_token_ids: list[int]) -> torch.Tensor:
        """Attend the prompt, whole or in chunks with an eviction between them; logits [V] of the first token."""
        chunk = self.policy.prefill_chunk if self.policy.prefill == "chunked" else len(prompt_token_ids)
        logits = self.forward(prompt_token_ids[:chunk])
        for start in range(chunk, len(prompt_token_ids), chunk):
            self.evict(Phase.PREFILL_CHUNK)
            logits = self.forward(prompt_token_ids[start : start + chunk])
        self.ttft_s = self.steps[-1].end_s
        return logits

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """Attend new tokens at the next positions and return the last one's logits, float32 [V].

        Raises:
            UserError: the model's attention bypassed the cache.
        """
        num_expected = self.cache.num_resident + len(token_ids)
        first = self.cache.num_resident if self.policy.cache_positions else self.cache.num_seen
        positions = torch.arange(first, first + len(token_ids), device=self.model.device)
        if self.cache.reader is not None:
            self.cache.reader.begin(token_ids)
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.model.device),
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            reference_cache=self.cache,
        )
        if self.cache.num_resident != num_expected:
            raise UserError(
                f"model={type(self.model).__name__} does not attend through transformers' AttentionInterface. "
                "Use a model that does (Llama family)."
            )
        self.cache.num_seen += len(token_ids)
        self.steps.append(Step(time.perf_counter() - self.start_s, num_expected))
        return output.logits[0, -1].float()

    def evict(self, phase: Phase) -> None:
        """Let go what is due; note what is left of a prompt."""
        self._evict(phase)
        if phase is Phase.PREFILL_END:
            self.prompt_positions = self._sorted_positions()

    @torch.no_grad()
    def retained(self) -> Retained:
        """To be asked at the end; evicts once more."""
        self.evict(Phase.DECODE if self.prompt_positions else Phase.PREFILL_END)
        return Retained(self.prompt_positions, self._sorted_positions())

    def _sorted_positions(self) -> list[list[list[int]]]:
        return [[sorted(positions) for positions in heads] for heads in self.cache.positions()]

    def _evict(self, phase: Phase) -> None:
        """Ask the policy how many tokens stay and which, and let the others go; all may stay where the data decide."""
        num_resident = self.cache.num_resident
        num_keep = self.policy.plan(phase, num_resident, self.cache.num_seen)
        if num_keep == num_resident:
            return
        start_s = time.perf_counter()
        choose = self._choose_ragged if self.policy.allocation == "ragged" else self._choose
        scores, positions, kept_slots = choose(phase, num_keep)
        if phase in self.policy.rewrite_phases:
            self._rewrite(phase, kept_slots)
        for layer, rows in zip(self.cache.layers, kept_slots, strict=True):
            for index, head in enumerate(layer.heads):
                kept = rows[index if self.policy.per_head else 0]
                if self.policy.cache_positions:
                    head.renumber(kept, self.rotary)
                head.evict(kept, phase)
        num_keep = self.cache.num_resident
        if num_keep < num_resident:
            kept = self._sorted_positions()
            decision = Decision(phase, self.cache.num_seen, num_resident, num_keep, kept, scores, positions)
            self.decisions.append(decision)
        self.eviction_s += time.perf_counter() - start_s

    def _rewrite(self, phase: Phase, kept_slots: list[list[set[int]]]) -> None:
        """Let the policy change keys and values of the tokens that stay."""
        for index, (layer, rows) in enumerate(zip(self.cache.layers, kept_slots, strict=True)):
            keys, values = (
                torch.stack([getattr(h, states) for h in layer.heads])[None] for states in ("keys", "values")
            )
            view = replace(build_view(self.policy, self.cache, index, phase, self.rotary), keys=keys, values=values)
            keep = torch.tensor(
                [[[slot in kept for slot in range(keys.shape[2])] for kept in rows]], device=keys.device
            )
            keys, values = self.policy.rewrite(view, keep)
            for head, head_keys, head_values in zip(layer.heads, keys[0], values[0], strict=True):
                head.keys, head.values = head_keys, head_values

    def _choose(self, phase: Phase, num_keep: int) -> tuple[list, list, list[list[set[int]]]]:
        """Scores and positions by layer, and the slots that stay, where all rows keep equally many."""
        views = [
            build_view(self.policy, self.cache, index, phase, self.rotary) for index in range(len(self.cache.layers))
        ]
        scores = [self.policy.score(view)[0] for view in views]
        positions = [view.positions[0] for view in views]
        return scores, positions, choose_kept(self.policy, phase, scores, positions, self.cache.num_seen, num_keep)

    def _choose_ragged(self, phase: Phase, num_keep: int) -> tuple[list, list, list[list[set[int]]]]:
        """The same by layer and KV head."""
        scores = [self._scores_by_head(phase, index) for index in range(len(self.cache.layers))]
        positions = self.cache.positions()
        kept = choose_kept_ragged(self.policy, phase, scores, positions, self.cache.num_seen, num_keep)
        return scores, [[torch.tensor(p) for p in heads] for heads in positions], kept

    def _scores_by_head(self, phase: Phase, index: int) -> list[torch.Tensor]:
        """Scores [T] of each KV head of a layer; those that hold unequally many tokens are shown one by one."""
        num_heads = len(self.cache.layers[index].heads)
        if len({len(head.positions) for head in self.cache.layers[index].heads}) == 1:
            rows = self.policy.score(build_view(self.policy, self.cache, index, phase, self.rotary))[0]
            return list(rows.expand(num_heads, -1))
        views = [build_view(self.policy, self.cache, index, phase, self.rotary, head) for head in range(num_heads)]
        return [self.policy.score(view)[0, 0] for view in views]
