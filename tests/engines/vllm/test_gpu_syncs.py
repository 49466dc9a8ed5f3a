"""Nothing in a step waits for the device: neither the observers nor an eviction.

Meta tensors stand for CUDA ones: they have no values, so whatever would have to wait for one raises. Copies from the
host that block there are found by looking at every operation: a tensor made from a list on the device, a copy that is
not `non_blocking`, or a host tensor used beside device tensors (which PyTorch copies on its own, blocking).
"""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.layout import InterleavedLayout
from harness.engines.vllm.observers import QUERY_SIGNALS, Observers
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.rotation import inverse_frequencies
from harness.engines.vllm.signals import column_sums as sums
from harness.engines.vllm.signals.batch import StepBatch
from policies import Phase, build_policy
from policies.random import _streams
from tests.policy_names import EQUAL

pytestmark = pytest.mark.usefixtures("copies_as_on_a_gpu")
META = torch.device("meta")
COPIES = {"aten::to", "aten::_to_copy", "aten::copy_"}
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, GROUP, BLOCK, HEAD_SIZE = 3, 64, 2, 2, 16, 32
NUM_BEFORE = 5 * BLOCK
WIDE = 1000  # blocks of a row of the table, as many as the longest context needs
OPTIONS = {"snapkv": {"window": 8}, "chunkkv": {"window": 8}, "lagkv": {"lag": 16}, "cascading": {"protect_first": 4}}
VARIANTS = [
    *((name, {}) for name in sorted(EQUAL) if name != "full"),
    ("paged_eviction", {"decode_scope": "global"}),
    ("h2o", {"granularity": "block"}),
    ("tova", {"value_weighted": True}),
    ("streaming_llm", {"position_mode": "cache"}),
]


@pytest.fixture(autouse=True)
def nothing_kept_from_other_tests():
    """A tensor that another test's operations made would look as if it came from the host."""
    _streams.cache_clear()


class NoSync(TorchDispatchMode):
    """Once armed, raises at operations that would block the host on CUDA.

    A device tensor that no operation gave back was filled with numbers of the host (an index that was a list, say).
    """

    def __init__(self):
        super().__init__()
        self.armed = False
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands, outputs = (
            [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), result)
        )
        if self.armed:
            self._check(func, args, kwargs, operands, outputs)
        if func._schema.name not in ("aten::detach_", "aten::lift_fresh"):  # how a tensor made from a list comes to be
            self._made.update(dict.fromkeys(outputs, True))
        return result

    def _check(self, func, args, kwargs, operands, outputs):
        if not any(t.device == META for t in [*operands, *outputs]):
            return
        if any(t.device == META and t not in self._made for t in operands):
            raise AssertionError(f"{func} gets a device tensor made of host numbers")
        if any(t.device.type == "cpu" and t.dim() > 0 for t in operands):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            if func._schema.name not in COPIES or not given.get("non_blocking"):
                raise AssertionError(f"{func} moves a host tensor to the device and waits")


class CountOperations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class Rotary(torch.nn.Module):
    """What the observers use of vLLM's rotary embedding."""

    base = 10000.0

    def __init__(self):
        super().__init__()
        self.cos_sin_cache = torch.empty(4096, HEAD_SIZE, device=META)

    def _compute_inv_freq(self, base):
        return base ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)


@dataclass
class Engine:
    """A compactor and its observers on the device."""

    compactor: Compactor
    observers: Observers | None


def build(name, options):
    policy = build_policy(name, budget=3 * BLOCK, block_size=BLOCK, options={**OPTIONS.get(name, {}), **options})
    buffer = torch.empty(NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE, dtype=torch.bfloat16, device=META)
    layout = InterleavedLayout(buffer.unbind())
    observers = None
    if policy.signals & QUERY_SIGNALS:
        observers = Observers(policy, layout, num_rows=8, scale=0.2, rotary=Rotary())
    compactor = Compactor(
        policy, layout, observers=observers, inv_freq=inverse_frequencies(Rotary()),
        average_over_ranks=lambda scores: scores,
    )  # fmt: skip
    return Engine(compactor, observers)


def batch_of(lengths, num_new, *, prefilling):
    """Requests with these resident lengths, of which `num_new` are new."""
    starts = [index * num_new for index in range(len(lengths) + 1)]
    return StepBatch(
        request_ids=[f"r{index}" for index in range(len(lengths))],
        starts=starts,
        num_seen=[length + 3 for length in lengths],
        num_resident=lengths,
        prefilling=[prefilling] * len(lengths),
        block_table=torch.empty(len(lengths), WIDE, dtype=torch.int64, device=META),
        slot_mapping=torch.empty(starts[-1], dtype=torch.int64, device=META),
    )


def step(engine, lengths, num_new, *, prefilling):
    """What the runner does around one forward pass of these requests."""
    batch = batch_of(lengths, num_new, prefilling=prefilling)
    engine.compactor.positions.write(batch.slot_mapping, batch.slot_mapping)
    if engine.observers is None:
        return
    engine.observers.begin_step(batch)
    for layer in range(NUM_LAYERS):
        num_padded = batch.starts[-1] + 5  # to the size of a CUDA graph
        query = torch.empty(num_padded, NUM_HEADS * GROUP, HEAD_SIZE, dtype=torch.bfloat16, device=META)
        engine.observers.observe(layer, query)
    engine.observers.end_step()


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_no_step_and_no_eviction_waits_for_the_device(name, options):
    with torch.inference_mode(), NoSync() as watch:
        engine = build(name, options)
        watch.armed = True
        step(engine, [NUM_BEFORE, NUM_BEFORE, 2 * BLOCK], num_new=2 * BLOCK, prefilling=True)
        for phase in (Phase.PREFILL_END, Phase.DECODE):
            eviction = Eviction(phase, NUM_BEFORE, NUM_BEFORE - BLOCK, NUM_BEFORE + 3)
            engine.compactor.evict([Victim(f"r{index}", eviction, range(5)) for index in range(2)])
            step(engine, [NUM_BEFORE, NUM_BEFORE, 2 * BLOCK + 1], num_new=1, prefilling=False)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_only_blocks_with_resident_tokens_are_read(monkeypatch, name):
    read, reads = InterleavedLayout.read_keys, []

    def read_and_count(self, pages, num_tokens):
        reads.append((pages.shape[-1], math.ceil(num_tokens / BLOCK)))
        return read(self, pages, num_tokens)

    monkeypatch.setattr(InterleavedLayout, "read_keys", read_and_count)
    engine = build(name, {})
    step(engine, [NUM_BEFORE, 2 * BLOCK], num_new=1, prefilling=False)
    engine.compactor.evict([Victim("r0", Eviction(Phase.DECODE, NUM_BEFORE, NUM_BEFORE - 1, NUM_BEFORE), range(5))])
    assert reads
    assert all(width == needed for width, needed in reads)


@pytest.mark.parametrize("policy", ["snapkv", "expected_attention"])
def test_decoding_costs_nothing_where_only_prompts_are_judged(policy):
    engine = build(policy, {})
    step(engine, [NUM_BEFORE], num_new=BLOCK, prefilling=True)
    with CountOperations() as count:
        engine.observers.begin_step(batch_of([NUM_BEFORE + 1], 1, prefilling=False))
        engine.observers.observe(0, torch.empty(1, NUM_HEADS * GROUP, HEAD_SIZE, dtype=torch.bfloat16, device=META))
    assert count.operations == {"empty": 3}, "the batch and the query that this test makes"


def test_sums_of_attention_do_not_depend_on_the_chunks_of_queries(monkeypatch):
    queries, keys = torch.randn(2, 40, NUM_HEADS * GROUP, HEAD_SIZE), torch.randn(2, NUM_HEADS, 70, HEAD_SIZE)
    whole = sums.column_sums(queries, keys, 0.2)
    monkeypatch.setattr(sums, "LEAST_QUERIES", 7)
    monkeypatch.setitem(sums.LOGIT_BYTES, "cpu", 0)
    assert torch.allclose(sums.column_sums(queries, keys, 0.2), whole, rtol=1e-5)
    assert whole.sum().item() == pytest.approx(2 * 40 * NUM_HEADS * GROUP)


BLOCKING = {
    "a list as index": lambda values: values[[0, 1]],
    "a host tensor as index": lambda values: values[torch.tensor([0, 1])],
    "a host mask as index": lambda values: values[torch.tensor([True, False, True])],
    "a tensor from a list": lambda values: values + torch.tensor([1, 2, 3], device=META),
    "a new tensor from a list": lambda values: values + values.new_tensor([1, 2, 3]),
    "a blocking copy": lambda values: torch.tensor([1, 2]).to(META),
    "a truth value": lambda values: bool(values[0]),
    "a list of values": lambda values: values.tolist(),
    "a copy to the host": lambda values: values.cpu(),
    "a mask as index": lambda values: values[values > 0],
}


@pytest.mark.parametrize("operation", BLOCKING)
def test_the_check_sees(operation):
    with torch.inference_mode(), NoSync() as watch:
        values = torch.empty(3, device=META)
        watch.armed = True
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            BLOCKING[operation](values)


def test_the_check_lets_asynchronous_work_pass():
    with torch.inference_mode(), NoSync() as watch:
        values = torch.empty(3, device=META)
        watch.armed = True
        index = torch.tensor([2, 1]).to(META, non_blocking=True)
        values[index] += torch.arange(2, device=META)
        values[0].zero_()
