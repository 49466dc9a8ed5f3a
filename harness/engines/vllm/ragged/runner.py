"""Runner side of policies whose layers and heads keep unequally many tokens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from harness.engines.vllm.compaction import Compactor
from harness.engines.vllm.groups import Victim
from harness.engines.vllm.kv_cache import EvictingAttentionSpec
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.plan import StepPlan
from harness.engines.vllm.ragged.attention import by_head
from harness.engines.vllm.ragged.bounds import PageBounds
from harness.engines.vllm.ragged.compaction import RaggedCompactor
from harness.engines.vllm.ragged.reading import Reading
from harness.engines.vllm.ragged.refusals import refuse_ragged
from harness.engines.vllm.ragged.sentences import Sentences, token_texts
from harness.engines.vllm.ragged.steps import HeadSteps
from harness.engines.vllm.ragged.table import PageTable
from harness.engines.vllm.runner import EvictionRunning
from policies.views import ReadSignal


class RaggedRunning(EvictionRunning):
    """Gives attention a table, a length and slots for each layer and KV head.

    Scheduler, plan and block lists stay those of the equal case: they count blocks, and a request's blocks are a bag of
    pages that the worker gives to any layer and head.
    """

    _steps: HeadSteps | None = None
    reading: Reading | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._measured: dict[str, int] = {}

    def _prepare_layers(self, layers: Sequence[torch.nn.Module], layout: CacheLayout) -> None:
        """Call the attention of every layer by head. What watches attention goes around that, and sees whole tokens."""
        (groups,) = self.attn_groups
        policy = self.eviction_policy
        refuse_ragged(policy, layers, groups, layout, self.compilation_config.cudagraph_mode)
        table = PageTable(layout.grid, self.max_num_reqs, self._width(policy.block_size))
        self._steps = HeadSteps(table, self.max_num_tokens, policy.block_size, self._make_buffer, policy.lenders)
        if policy.reads_less:
            self.eviction_policy = policy = policy.for_vocabulary(lambda: token_texts(self.model_config))
            self.reading = self._make_reading(layout)
        for index, layer in enumerate(layers):
            writes = policy.lenders is None or policy.lenders[index] == index
            layer.impl = by_head(layer.impl, index, layout.pages[:, None], self._steps, self.reading, writes=writes)
        self._head_builder = self._build_builder()

    def _make_reading(self, layout: CacheLayout) -> Reading:
        policy, grid = self.eviction_policy, layout.grid
        sentences = bounds = None
        if ReadSignal.PAGE_BOUNDS in policy.read_signals:
            bounds = PageBounds(layout)
        if ReadSignal.SENTENCES in policy.read_signals:
            group = self.model_config.get_num_attention_heads(self.parallel_config) // grid.num_heads
            sentences = Sentences(
                policy.sentence_ends, self.model_config.get_vocab_size(), self.max_num_reqs, self.max_model_len,
                (grid.num_layers, grid.num_heads, group, layout.head_size), grid.device,
            )  # fmt: skip
        return Reading(policy, layout, self._steps, bounds, sentences)

    def _width(self, block_size: int) -> int:
        """Pages of the longest head: no head holds more tokens than a request has."""
        return -(-self.max_model_len // block_size)

    def bytes_of_pages(self, spec: EvictingAttentionSpec) -> tuple[int, int, int]:
        """See `EvictionRunning.bytes_of_pages`."""
        width = self._width(spec.block_size)
        fixed = HeadSteps.bytes_a_layer(self.max_num_reqs, spec.num_kv_heads, width, self.max_num_tokens)
        a_page, shared = torch.bool.itemsize, 0
        policy = self.eviction_policy
        if policy.reads_less:
            shared += Reading.bytes_of_step(self.max_num_reqs, spec.num_kv_heads, width)
        if ReadSignal.PAGE_BOUNDS in policy.read_signals:
            a_page += PageBounds.bytes_a_page(spec.head_size, spec.dtype)
        if ReadSignal.SENTENCES in policy.read_signals:
            queries = self.model_config.get_num_attention_heads(self.parallel_config) * spec.head_size
            fixed += self.max_num_reqs * queries * torch.float32.itemsize
            shared += self.max_num_reqs * self.max_model_len
        return a_page, fixed, shared

    def _build_builder(self) -> AttentionMetadataBuilder:
        """The backend's own, for a model with one KV head."""
        group = self.attn_groups[0][0]
        stock = group.get_metadata_builder()
        spec = replace(stock.kv_cache_spec, num_kv_heads=1)
        return type(stock)(spec, group.layer_names, self.vllm_config, self.device)

    def _make_compactor(self, **parts: Any) -> Compactor:
        compactor = RaggedCompactor(self.eviction_policy, table=self._steps.table, **parts)
        if self.reading is not None:
            self.reading.positions = compactor.positions
        return compactor

    def _num_kept(self, plan: StepPlan, victim: Victim) -> int:
        """As planned; where the data decide, what they decided, which the scheduler learns with this step's output."""
        kept = super()._num_kept(plan, victim)
        if not self.eviction_policy.measured:
            return kept
        name, before = victim.request_id, victim.eviction.num_before
        self._measured[name] = kept
        if kept < before:
            plan.num_evicted[name] = plan.num_evicted.get(name, 0) + before - kept
        return kept

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """As stock; what evictions left of requests where the data decide travels with the output."""
        output = super().sample_tokens(grammar_output)
        if self._measured:
            output.kv_kept, self._measured = self._measured, {}
        return output

    def _write_positions(self, plan: StepPlan, positions: torch.Tensor, places: torch.Tensor) -> None:
        """Find the pages of this step's tokens and write their positions there.

        While no request of the batch was evicted from, pages follow from blocks and the step is a stock one, unless
        other pages are read than the layer's own, or fewer.
        """
        self._steps.active = False
        if not (plan.num_evicted or self.reading or self.eviction_policy.lenders):
            super()._write_positions(plan, positions, places)
            return
        request_ids, num_reqs = self.input_batch.req_ids, self.input_batch.num_reqs
        self._steps.begin(
            request_ids,
            [self.requests[request_id].block_ids[0] for request_id in request_ids],
            self.query_start_loc.np[: num_reqs + 1],
            self.seq_lens[:num_reqs],
            self.req_indices.gpu[: len(places)],
            places,
        )
        self.compactor.positions.put(self._steps.slots, positions)
        if self.reading is not None:
            self._begin_reading(request_ids, positions)

    def _begin_reading(self, request_ids: Sequence[str], positions: torch.Tensor) -> None:
        """Tell who decodes in this step, and what the new tokens are."""
        num_reqs, total = len(request_ids), len(positions)
        starts, batch = self.query_start_loc.np[: num_reqs + 1], self.input_batch
        computed, num_prompt = batch.num_computed_tokens_cpu[:num_reqs], batch.num_prompt_tokens[:num_reqs]
        counts = np.diff(starts)
        last = self.query_start_loc.gpu[1 : num_reqs + 1].long() - 1
        decoding = (computed >= num_prompt) & (counts == 1)
        places = self.reading.begin(request_ids, decoding.tolist(), last)
        if self.reading.sentences is not None:
            num_seen = int((computed + counts)[decoding].max(initial=0))
            self.reading.sentences.begin(
                request_ids, num_prompt.tolist(), num_seen, self.input_ids.gpu[:total], positions,
                self.req_indices.gpu[:total], last, places,
            )  # fmt: skip

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """As for equal counts; what was noted of sentences of requests that are gone is given up."""
        if self.reading is not None and self.reading.sentences is not None:
            for request_id in chain(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()):
                self.reading.sentences.forget(request_id)
        return super()._update_states(scheduler_output)

    def _step_pages(self) -> HeadSteps | None:
        return self._steps if self._steps.active else None

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, or one for each layer."""
        if self._steps is None or not self._steps.active:
            return super()._build_attention_metadata(*args, **kwargs)
        metadata = self._steps.metadata(self._head_builder, self.input_batch.req_ids, kwargs["max_query_len"])
        return dict(zip(self._layer_names(), metadata, strict=True)), None

    def _get_slot_mappings(self, num_tokens_padded: int, *args: Any, **kwargs: Any) -> Any:
        """As stock; and by layer where pages are."""
        by_group, by_layer = super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        if self._steps is not None and self._steps.active:
            by_layer = {
                name: self._steps.slot_mapping(layer, num_tokens_padded)
                for layer, name in enumerate(self._layer_names())
            }
        return by_group, by_layer

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """As stock: no request is in the batch."""
        if self._steps is not None:
            self._steps.active = False
        return super()._dummy_run(*args, **kwargs)

    def _layer_names(self) -> Sequence[str]:
        return self.kv_cache_config.kv_cache_groups[0].layer_names
