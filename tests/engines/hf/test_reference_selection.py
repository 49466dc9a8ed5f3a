"""The naive selection against the fast one, and the slot order after an eviction."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from harness.engines.hf.cache import slot_order_after
from harness.engines.hf.selection import choose_kept
from policies.base import Phase, Policy, Unit, View
from policies.selection import reduce_heads, select


@dataclass(frozen=True, kw_only=True)
class Probe(Policy):
    """Unit and scope as options; one choice for all heads."""

    name = "probe"
    granularity: str = "token"
    shared: bool = False

    @property
    def prefill_unit(self) -> Unit:
        return Unit(self.granularity)

    @property
    def decode_unit(self) -> Unit:
        return Unit(self.granularity)

    @property
    def shared_by_layers(self) -> bool:
        return self.shared

    def score(self, view: View) -> torch.Tensor:
        return view.positions.float()


class PerHeadProbe(Probe):
    """Every head chooses for itself."""

    per_head = True


@dataclass(frozen=True)
class Case:
    """Arguments of a selection: scores [L, H, T], positions [L, H or 1, T]."""

    policy: Policy
    phase: Phase
    scores: torch.Tensor
    positions: torch.Tensor
    num_seen: int
    num_keep: int


def newest_last(positions: torch.Tensor, count: int) -> torch.Tensor:
    """The greatest `count` of the last dimension at its end, everything else in its order."""
    newest = positions.topk(count, dim=-1).indices
    is_newest = torch.zeros_like(positions, dtype=torch.bool).scatter_(-1, newest, True)
    return positions.gather(-1, is_newest.long().argsort(dim=-1, stable=True))


@st.composite
def cases(draw: st.DrawFn, tied: bool) -> Case:
    """Random selections; sizes are powers of two, so that tied scores stay exactly tied in every mean."""
    block_size = draw(st.sampled_from([2, 4]))
    budget = block_size * draw(st.integers(2, 4))
    protect_first = draw(st.integers(0, budget))
    probe = draw(st.sampled_from([Probe, PerHeadProbe]))
    options = {
        "protect_first": protect_first,
        "protect_last": draw(st.integers(0, budget - protect_first)),
        "granularity": draw(st.sampled_from(["token", "block"])),
        "shared": draw(st.booleans()),
    }
    try:
        policy = probe(budget=budget, block_size=block_size, **options)
    except ValueError:  # more protected than whole blocks can hold
        reject()
    phase = draw(st.sampled_from(list(Phase)))
    num_resident = budget + draw(st.integers(1, 3 * block_size))
    num_keep = policy.plan(phase, num_resident)
    assume(num_keep < num_resident)
    num_layers, num_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (2, 4)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_seen = num_resident + draw(st.integers(0, 5))
    rows = num_heads if policy.per_head else 1
    noise = torch.rand(num_layers, rows, num_seen, generator=generator)
    positions = noise.argsort(dim=-1)[..., :num_resident]
    if phase is Phase.DECODE:  # a block leaves when the newest is full of the newest tokens
        positions = newest_last(positions, block_size)
    shape = (num_layers, num_heads, num_resident)
    if tied:
        scale = 2.0 ** torch.randint(0, 4, (num_layers, 1, 1), generator=generator)
        scores = scale * (2 * torch.randint(0, 2, shape, generator=generator) - 1)
    else:
        scores = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Case(policy, phase, scores, positions, num_seen, num_keep)


def naive_mask(case: Case) -> torch.Tensor:
    """The naive choice as bool [L, Hs, T]."""
    kept = choose_kept(case.policy, case.phase, list(case.scores), list(case.positions), case.num_seen, case.num_keep)
    return torch.tensor([[[slot in row for slot in range(case.scores.shape[-1])] for row in rows] for rows in kept])


def fast_mask(case: Case) -> torch.Tensor:
    """The fast choice as bool [L, Hs, T]."""
    scores = reduce_heads(case.policy, case.scores)
    num_seen = torch.tensor([case.num_seen])
    return select(case.policy, case.phase, scores[:, None], case.positions[:, None], num_seen, case.num_keep)[:, 0]


@given(cases(tied=True) | cases(tied=False))
@settings(max_examples=300, deadline=None)
def test_naive_and_fast_selection_agree(case: Case):
    assert torch.equal(naive_mask(case), fast_mask(case))


def kept_slots(policy: Policy, phase: Phase, scores: list[float], num_keep: int) -> set[int]:
    """Slots that stay in one layer with one head, position = slot."""
    positions = torch.arange(len(scores))[None]
    return choose_kept(policy, phase, [torch.tensor([scores])], [positions], len(scores), num_keep)[0][0]


def test_highest_scores_stay_and_ties_keep_the_later_token():
    policy = Probe(budget=4, block_size=2)
    assert kept_slots(policy, Phase.PREFILL_END, [1, 5, 1, 1, 0, 5], 4) == {1, 2, 3, 5}


def test_scores_that_differ_by_rounding_only_are_a_tie():
    policy = Probe(budget=2, block_size=1)
    assert kept_slots(policy, Phase.PREFILL_END, [1 + 2**-19, 1, 1], 2) == {1, 2}
    assert kept_slots(policy, Phase.PREFILL_END, [1 + 2**-17, 1, 1], 2) == {0, 2}
    assert kept_slots(policy, Phase.PREFILL_END, [-1, -1 - 2**-19, 9], 2) == {1, 2}


def test_protected_tokens_stay_before_higher_scores():
    policy = Probe(budget=4, block_size=2, protect_first=1, protect_last=2)
    assert kept_slots(policy, Phase.PREFILL_END, [0, 5, 9, 7, 0, 0], 4) == {0, 2, 4, 5}


def test_the_worst_old_block_leaves_and_the_newest_is_no_candidate():
    policy = Probe(budget=4, block_size=2, granularity="block")
    assert kept_slots(policy, Phase.DECODE, [3, 1, 9, -8, 0, 0], 4) == {0, 1, 4, 5}


def test_a_block_with_a_protected_token_stays():
    policy = Probe(budget=4, block_size=2, granularity="block", protect_first=1)
    assert kept_slots(policy, Phase.DECODE, [0, 0, 9, 9, 0, 0], 4) == {0, 1, 4, 5}


def test_layers_of_different_scale_weigh_the_same_in_a_shared_choice():
    policy = Probe(budget=2, block_size=1, shared=True)
    scores = [torch.tensor([[100.0, 300.0, 200.0]]), torch.tensor([[4.0, 1.0, 1.0]])]
    positions = [torch.arange(3)[None]] * 2
    assert choose_kept(policy, Phase.DECODE, scores, positions, 3, 2) == [[{0, 1}], [{0, 1}]]


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="probe gave a score that is not finite"):
        kept_slots(Probe(budget=4, block_size=2), Phase.PREFILL_END, [0, 0, float("nan"), 0, 0], 4)


def test_part_of_a_block_cannot_leave():
    with pytest.raises(ValueError, match="3 of 6 slots cannot stay when old blocks of 2 leave"):
        kept_slots(Probe(budget=4, block_size=2, granularity="block"), Phase.DECODE, [0] * 6, 3)


def test_a_pruned_prompt_stays_in_order():
    assert slot_order_after({7, 0, 3}, Phase.PREFILL_END) == [0, 3, 7]


def test_the_newest_block_moves_into_the_evicted_one():
    assert slot_order_after({0, 1, 4, 5, 6, 7}, Phase.DECODE) == [0, 1, 6, 7, 4, 5]


@given(st.sets(st.integers(0, 30)))
def test_decode_moves_only_the_tail(kept: set[int]):
    order = slot_order_after(kept, Phase.DECODE)
    assert set(order) == kept
    assert len(order) == len(kept)
    assert all(order[slot] == slot for slot in kept if slot < len(kept))
    moved = [slot for slot in order if slot >= len(kept)]
    assert moved == sorted(moved)
