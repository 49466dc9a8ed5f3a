"""What is kept of keys, or multiplied where they lie, is what reading them all gives."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

import torch

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.groups import Alike, Group
from harness.engines.vllm.layout import CpuLayout, InterleavedLayout
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.signals.newest import NewestAttention
from policies import Phase, build_policy
from policies.views import key_directions

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, GROUP, BLOCK, HEAD_SIZE = 3, 20, 2, 3, 32, 16
BUDGET = 2 * BLOCK
TABLES = ((7, 2, 9, 4), (1, 12, 3, 15))


def layout_of(layout_class, random):
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE)
    return layout_class(torch.randn(shape, generator=random).unbind())


def keys_of(layout, table, num_tokens):
    """[L, H, T, D] of one request."""
    pages = layout.grid.numbers(torch.tensor([table]))[:, 0]
    return layout.read_keys(pages, num_tokens).clone()


class TwoRequests:
    """Two requests at the budget, which write a random key and lose a token in every step."""

    def __init__(self, layout_class):
        self.random = torch.Generator().manual_seed(5)
        self.layout = layout_of(layout_class, self.random)
        policy = build_policy("keydiff", budget=BUDGET, block_size=BLOCK, options={})
        self.compactor = Compactor(
            policy, self.layout, observers=None, inv_freq=None, average_over_ranks=lambda scores: scores
        )
        self.seen = 100
        slots = torch.tensor(
            [[block * BLOCK + offset for block in table for offset in range(BLOCK)] for table in TABLES]
        )
        for row in slots:
            self.compactor.positions.write(row, torch.arange(len(row)))
        self.evict(Phase.PREFILL_END, 100)

    def evict(self, phase, num_before):
        eviction = Eviction(phase, num_before, BUDGET, self.seen)
        num_blocks = -(-num_before // BLOCK)
        self.compactor.evict([Victim(f"r{row}", eviction, table[:num_blocks]) for row, table in enumerate(TABLES)])

    def step(self):
        slots = torch.tensor([table[BUDGET // BLOCK] * BLOCK for table in TABLES])
        pages = self.layout.grid.numbers(torch.tensor(TABLES)[:, [BUDGET // BLOCK]])
        shape = (*pages.shape[:-1], BLOCK, HEAD_SIZE)
        self.layout.write_keys(pages, torch.randn(shape, generator=self.random))
        self.compactor.positions.write(slots, torch.full_like(slots, self.seen))
        self.seen += 1
        self.evict(Phase.DECODE, BUDGET + 1)

    def kept(self):
        return self.compactor.positions_of(torch.tensor(TABLES), BUDGET)


def test_sums_that_are_kept_are_those_of_the_tokens_that_stayed_and_choose_as_fresh_ones_do(monkeypatch):
    kept = TwoRequests(CpuLayout)
    assert kept.compactor._directions is not None
    monkeypatch.setattr(CpuLayout, "multiplies_in_place", False)
    fresh = TwoRequests(CpuLayout)
    assert fresh.compactor._directions is None
    monkeypatch.undo()
    for _ in range(200):
        kept.step()
        fresh.step()
        assert torch.equal(kept.kept(), fresh.kept())
    for row, table in enumerate(TABLES):
        num_known, total = kept.compactor._directions._known[f"r{row}"]
        wanted = key_directions(keys_of(kept.layout, table, BUDGET))["direction_sum"]
        assert num_known == BUDGET
        torch.testing.assert_close(total.float(), wanted, rtol=1e-5, atol=1e-5)


def test_only_the_newest_block_is_read_while_sums_are_kept(monkeypatch):
    engine, reads, inner = TwoRequests(CpuLayout), [], CpuLayout.read_keys
    monkeypatch.setattr(
        CpuLayout, "read_keys", lambda self, pages, n: (reads.append((pages.shape[-1], n)), inner(self, pages, n))[1]
    )
    engine.step()
    engine.step()
    engine.compactor.forget("r0")
    engine.step()
    whole, newest = (BUDGET // BLOCK + 1, BUDGET + 1), (1, 1)
    assert reads == [whole, newest, whole, newest], "all of them after a prompt's eviction, and after a preemption"


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
def test_products_with_keys_are_those_of_keys_that_were_read(layout_class):
    random = torch.Generator().manual_seed(1)
    layout = layout_of(layout_class, random)
    pages = layout.grid.numbers(torch.tensor(TABLES))
    vectors = torch.randn(NUM_LAYERS, len(TABLES), NUM_HEADS, GROUP, HEAD_SIZE, generator=random)
    wanted = vectors @ layout.read_keys(pages, 100).transpose(-1, -2)
    torch.testing.assert_close(layout.times_keys(vectors, pages, 100), wanted, rtol=1e-5, atol=1e-5)


def victims_of(names, rows, tables, num_before):
    """Requests with equal lengths that lose a token."""
    alike = Alike(Phase.DECODE, num_before, num_before - 1, 0, 0)
    num_seen = torch.full((len(names),), num_before)
    num_blocks = -(-num_before // BLOCK)
    return Group(alike, names, torch.tensor(rows), num_seen, torch.tensor(tables)[:, :num_blocks])


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
@pytest.mark.parametrize("lengths", [(100, 100), (100, 97), (100, 20)])
def test_the_newest_query_attends_to_all_tokens_of_its_request(layout_class, lengths):
    random = torch.Generator().manual_seed(2)
    layout = layout_of(layout_class, random)
    newest = NewestAttention(layout, num_rows=4, scale=0.3)
    starts = [0, 5, 6]  # five tokens of a prompt, and one that decodes
    batch = StepBatch(["a", "b"], starts, lengths, lengths, [True, False], torch.tensor(TABLES), torch.empty(0))
    queries = torch.randn(NUM_LAYERS, 6, NUM_HEADS * GROUP, HEAD_SIZE, generator=random)
    rows = [3, 1]
    newest.begin_step(batch, range(2), rows)
    for layer in range(NUM_LAYERS):
        newest.observe(layer, queries[layer])
    for row, (name, length) in enumerate(zip("ab", lengths, strict=True)):
        keys = keys_of(layout, TABLES[row], length)
        grouped = queries[:, starts[row + 1] - 1].view(NUM_LAYERS, NUM_HEADS, GROUP, HEAD_SIZE)
        wanted = (0.3 * grouped @ keys.transpose(-1, -2)).softmax(dim=-1)
        found = newest.read(slice(0, NUM_LAYERS), victims_of([name], rows[row : row + 1], [TABLES[row]], length))[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    if layout_class is CpuLayout:
        with pytest.raises(RuntimeError, match="of a step that they were not in"):
            newest.read(slice(0, 1), victims_of(["c"], [0], [TABLES[0]], 1))


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
def test_one_victim_among_many_of_like_length_reads_its_own_keys_alone(monkeypatch, layout_class):
    """Layers at once are counted for the victims, not for all that were in the step."""
    random = torch.Generator().manual_seed(3)
    layout, num_requests, lengths = layout_of(layout_class, random), 64, [100] * 63 + [120]
    newest = NewestAttention(layout, num_rows=num_requests, scale=0.3)
    tables = torch.randint(NUM_BLOCKS, (num_requests, 4), generator=random)
    names, starts = [f"r{row}" for row in range(num_requests)], list(range(num_requests + 1))
    batch = StepBatch(names, starts, lengths, lengths, [False] * num_requests, tables, torch.empty(0))
    newest.begin_step(batch, range(num_requests), range(num_requests))
    for layer in range(NUM_LAYERS):
        newest.observe(layer, torch.randn(num_requests, NUM_HEADS * GROUP, HEAD_SIZE, generator=random))
    softmax, read_keys, sizes = torch.softmax, layout_class.read_keys, {"logits": 0, "keys": 0}

    def count_logits(logits, dim):
        sizes["logits"] += logits.numel()
        return softmax(logits, dim=dim)

    def count_keys(self, pages, num_tokens):
        keys = read_keys(self, pages, num_tokens)
        sizes["keys"] += keys.numel()
        return keys

    monkeypatch.setattr(torch, "softmax", count_logits)
    monkeypatch.setattr(layout_class, "read_keys", count_keys)
    newest.read(slice(0, NUM_LAYERS), victims_of(names[-1:], [63], tables[-1:].tolist(), 120))
    a_token = NUM_LAYERS * NUM_HEADS
    assert sizes["logits"] <= a_token * GROUP * 4 * BLOCK
    assert sizes["keys"] == (0 if layout_class is CpuLayout else a_token * 120 * HEAD_SIZE)
