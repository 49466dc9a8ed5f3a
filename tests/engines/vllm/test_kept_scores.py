"""Scores that are computed once are those of reading everything again, wherever their tokens have moved."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

import torch

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.layout import CpuLayout, InterleavedLayout
from harness.engines.vllm.plan import Eviction
from policies import Phase, build_policy
from policies.registry import policy_class

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, HEAD = 3, 12, 2, 32, 32
STAYING = ("paged_eviction_literal", "inverse_key_l2")
TABLE = (7, 2, 9, 4)
BUDGET = 64


def compactor_of(name, layout_class, caches):
    policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options={})
    return Compactor(
        policy,
        layout_class(caches),
        observers=None,
        inv_freq=None,
        average_over_ranks=lambda scores: scores,
    )


def life(name, layout_class):
    """Two evictions of one request with new tokens between them; the compactor and the caches afterwards."""
    generator = torch.Generator().manual_seed(3)
    caches = torch.randn(NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD, generator=generator).unbind()
    compactor = compactor_of(name, layout_class, caches)
    slots = torch.tensor([block * BLOCK + offset for block in TABLE for offset in range(BLOCK)])
    compactor.positions.write(slots, torch.arange(len(slots)))
    compactor.evict([Victim("r", Eviction(Phase.PREFILL_END, 100, BUDGET, 100), TABLE)])
    compactor.positions.write(slots[BUDGET : BUDGET + BLOCK], torch.arange(100, 100 + BLOCK))
    for cache in caches:
        cache[TABLE[2]] = torch.randn(NUM_HEADS, BLOCK, 2 * HEAD, generator=generator)
    decode = Victim("r", Eviction(Phase.DECODE, BUDGET + BLOCK, BUDGET, 100 + BLOCK), TABLE[:3])
    return compactor, caches, decode


def forgetful(monkeypatch, name):
    monkeypatch.setattr(policy_class(name), "scores_stay", False)


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
@pytest.mark.parametrize("name", STAYING)
def test_kept_scores_choose_and_move_as_fresh_ones_do(name, layout_class, monkeypatch):
    kept, kept_caches, decode = life(name, layout_class)
    kept.evict([decode])
    forgetful(monkeypatch, name)
    fresh, fresh_caches, decode = life(name, layout_class)
    fresh.evict([decode])
    table = torch.tensor([TABLE[:2]])
    assert torch.equal(kept.positions_of(table, BUDGET), fresh.positions_of(table, BUDGET))
    for one, other in zip(kept_caches, fresh_caches, strict=True):
        assert torch.equal(one[list(TABLE[:2])], other[list(TABLE[:2])])


def watch_reads(monkeypatch):
    """Blocks and tokens of every read of keys from now on."""
    reads = []
    inner = CpuLayout.read_keys
    monkeypatch.setattr(
        CpuLayout, "read_keys", lambda self, pages, n: (reads.append((pages, n)), inner(self, pages, n))[1]
    )
    return reads


@pytest.mark.parametrize("name", STAYING)
def test_a_decode_eviction_reads_the_new_block_only(name, monkeypatch):
    compactor, _, decode = life(name, CpuLayout)
    reads = watch_reads(monkeypatch)
    compactor.evict([decode])
    ((pages, num_tokens),) = reads
    assert num_tokens == BLOCK
    assert torch.equal(pages, compactor._layout.grid.numbers(torch.tensor([[TABLE[2]]])))


@pytest.mark.parametrize("name", STAYING)
def test_a_preempted_request_is_scored_anew(name, monkeypatch):
    compactor, _, decode = life(name, CpuLayout)
    compactor.forget("r")
    reads = watch_reads(monkeypatch)
    compactor.evict([decode])
    assert [(pages.shape[-1], n) for pages, n in reads] == [(3, BUDGET + BLOCK)]


def contents(compactor, blocks, num_tokens):
    """Keys and values [L, H, T, D] of one request."""
    layout = compactor._layout
    pages = layout.grid.numbers(torch.tensor([blocks]))[:, 0]
    return layout.read_keys(pages, num_tokens).clone(), layout.read_values(pages, num_tokens).clone()


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
def test_a_block_copied_whole_is_the_block_token_by_token(layout_class):
    compactor, _, decode = life("paged_eviction_literal", layout_class)
    before = contents(compactor, TABLE[:3], 3 * BLOCK)
    old = compactor.positions_of(torch.tensor([TABLE[:3]]), 3 * BLOCK)
    compactor.evict([decode])
    now = compactor.positions_of(torch.tensor([TABLE[:2]]), BUDGET)
    for layer in range(NUM_LAYERS):
        origin = [old[layer, 0, 0].tolist().index(position) for position in now[layer, 0, 0].tolist()]
        for kept, all_tokens in zip(contents(compactor, TABLE[:2], BUDGET), before, strict=True):
            assert torch.equal(kept[layer], all_tokens[layer][:, origin])
    assert any(sorted(row) != list(range(BUDGET)) for row in now[:, 0, 0].tolist())


def test_policies_whose_scores_stay_score_a_part_as_they_score_the_whole():
    """The promise of `scores_stay`, for every policy that gives it."""
    from policies import View, available_policies

    staying = [name for name in available_policies() if policy_class(name).scores_stay]
    assert set(STAYING) <= set(staying)
    keys, values = torch.randn(2, 1, NUM_HEADS, 96, HEAD)
    positions = torch.arange(96).expand(1, 1, 96)

    def scores(name, part):
        policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options={})
        signals = {"keys": keys[:, :, part], "values": values[:, :, part]}
        return policy.score(View(0, 1, Phase.DECODE, positions[..., part], torch.tensor([96]), BLOCK, **signals))

    for name in staying:
        whole = scores(name, slice(None))
        torch.testing.assert_close(scores(name, slice(64, None)), whole[..., 64:])
