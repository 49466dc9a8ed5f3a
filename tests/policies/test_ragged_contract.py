"""Laws of the policies whose layers and heads keep unequally many tokens."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import GROUP, HEAD_SIZE, NUM_HEADS

from policies import Phase, Policy, Signal, Unit, View
from policies.base import Ranking
from policies.ragged_selection import num_kept, rank, select_ragged
from policies.registry import policy_class
from policies.shares import mean_tokens, page_limits
from tests.policy_names import ALWAYS_RAGGED, RAGGED_CASES, ragged_policy

BUDGET, BLOCK, NUM_LAYERS = 64, 16, 3
GARBAGE = float("nan")
PER_SLOT = ("positions", "keys", "values", "squared_attention")
seeds = st.integers(0, 2**31)
some = settings(max_examples=6, deadline=None)


def bound(name: str, options: dict) -> Policy:
    return ragged_policy(name, options, BUDGET, BLOCK).for_model(NUM_LAYERS, NUM_HEADS)


every_case = pytest.mark.parametrize(
    "policy", [bound(*case) for case in RAGGED_CASES], ids=[str(c) for c in RAGGED_CASES]
)


def phases(policy: Policy) -> list[Phase]:
    return [Phase.PREFILL_END] + [Phase.DECODE] * (policy.decode_unit is not Unit.NONE)


def lengths_of(policy: Policy, phase: Phase, num_requests: int, generator: torch.Generator) -> torch.Tensor:
    """[L, N, H]: a prompt's, all alike; or what whole pages here and there leave behind."""
    if phase is Phase.PREFILL_END:
        return torch.full((NUM_LAYERS, num_requests, NUM_HEADS), int(torch.randint(70, 150, (), generator=generator)))
    pages = torch.full((NUM_LAYERS * NUM_HEADS,), 5)
    for _ in range(4):
        taken, given_to = torch.randint(NUM_LAYERS * NUM_HEADS, (2,), generator=generator).tolist()
        if getattr(policy, "scope", "global") == "layer":  # then a layer never has more or fewer than its own
            given_to = taken // NUM_HEADS * NUM_HEADS + given_to % NUM_HEADS
        if pages[taken] > 3:
            pages[taken] -= 1
            pages[given_to] += 1
    if policy.measured or not hasattr(policy, "whole_rows"):
        return (pages * BLOCK).reshape(NUM_LAYERS, 1, NUM_HEADS).repeat(1, num_requests, 1)
    whole = torch.tensor(policy.whole_rows)[:, None].repeat(1, num_requests, 1)
    return torch.where(whole, 9 * BLOCK, 5 * BLOCK)


def random_views(policy: Policy, phase: Phase, num_requests: int, seed: int) -> list[View]:
    """One view a layer; what lies in padding is garbage."""
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths_of(policy, phase, num_requests, generator)
    num_tokens = int(lengths.max())
    num_seen = num_tokens if phase is Phase.PREFILL_END else 9 * BLOCK
    return [_view(policy, phase, layer, lengths[layer], num_tokens, num_seen, generator) for layer in range(NUM_LAYERS)]


def _view(policy, phase, layer, lengths, num_tokens, num_seen, generator):
    num_requests, num_query_heads = len(lengths), NUM_HEADS * GROUP
    filled = torch.arange(num_tokens) < lengths[..., None]

    def normal(*shape):
        return torch.randn(num_requests, *shape, generator=generator)

    def per_slot(values):
        return values.masked_fill(~filled.reshape(*filled.shape, *[1] * (values.dim() - 3)), GARBAGE)

    root = normal(num_query_heads, HEAD_SIZE, HEAD_SIZE)
    window = min(policy.query_window, num_seen)
    known = {
        Signal.KEYS: lambda: {"keys": per_slot(normal(NUM_HEADS, num_tokens, HEAD_SIZE) * (1 + layer))},
        Signal.VALUES: lambda: {"values": per_slot(normal(NUM_HEADS, num_tokens, HEAD_SIZE))},
        Signal.SQUARED_ATTENTION: lambda: {"squared_attention": per_slot(normal(NUM_HEADS, num_tokens).exp())},
        Signal.WINDOW_QUERIES: lambda: {"window_queries": normal(num_query_heads, window, HEAD_SIZE)},
        Signal.QUERY_MOMENTS: lambda: {
            "query_mean": normal(num_query_heads, HEAD_SIZE),
            "query_cov": root @ root.mT / HEAD_SIZE,
            "inv_freq": 100.0 ** -(torch.arange(HEAD_SIZE // 2) * 2 / HEAD_SIZE),
        },
    }
    positions = torch.stack(
        [_positions(int(n), num_tokens, num_seen, policy, generator) for n in lengths.flatten()]
    ).reshape(num_requests, NUM_HEADS, num_tokens)
    return View(
        layer=layer,
        num_layers=NUM_LAYERS,
        phase=phase,
        positions=positions,
        lengths=lengths,
        num_seen=torch.full((num_requests,), num_seen),
        block_size=BLOCK,
        **{name: value for signal in policy.signals for name, value in known[signal]().items()},
    )


def _positions(length, num_tokens, num_seen, policy, generator):
    """Protected positions and others, shuffled, then padding."""
    first, last = policy.protect_first, max(policy.protect_last, policy.query_window, 1)
    others = first + torch.randperm(num_seen - first - last, generator=generator)[: length - first - last]
    kept = torch.cat([torch.arange(first), others, torch.arange(num_seen - last, num_seen)])
    kept = kept[torch.randperm(length, generator=generator)]
    return torch.cat([kept, torch.full((num_tokens - length,), -1)])


def ranking_of(policy: Policy, views: list[View]) -> Ranking:
    """As an engine makes it, with the number of tokens that the policy plans or demands."""
    scores = torch.stack([policy.score(view) for view in views])
    positions, lengths = (torch.stack([getattr(view, name) for view in views]) for name in ("positions", "lengths"))
    phase, seen = views[0].phase, views[0].num_seen
    num_resident = int(lengths[:, 0].sum()) // (NUM_LAYERS * NUM_HEADS)

    def at(mean_keep):
        return rank(policy, phase, scores, positions, lengths, seen, mean_keep)

    ranking = at(policy.plan(phase, num_resident, int(seen[0])))
    return at(num_kept(ranking, policy.demand(ranking).max()).item()) if policy.measured else ranking


def alone(view: View, request: int) -> View:
    rows = {f.name: getattr(view, f.name) for f in fields(View) if isinstance(getattr(view, f.name), torch.Tensor)}
    return replace(view, **{name: x[request : request + 1] for name, x in rows.items() if name != "inv_freq"})


def test_every_policy_that_is_always_ragged_has_a_case():
    assert set(ALWAYS_RAGGED) <= {name for name, _ in RAGGED_CASES}
    assert all(policy_class(name).evicts for name in ALWAYS_RAGGED)


@every_case
@some
@given(seed=seeds)
def test_scores_of_filled_slots_are_finite_whatever_lies_in_padding(policy, seed):
    for phase in phases(policy):
        for view in random_views(policy, phase, 2, seed):
            scores = policy.score(view)
            assert scores.dtype is torch.float32
            filled = view.positions >= 0
            assert scores.shape == filled.shape
            assert torch.isfinite(scores[filled]).all()


@every_case
@some
@given(seed=seeds)
def test_the_split_keeps_the_total_and_its_limits_and_the_protected(policy, seed):
    for phase in phases(policy):
        ranking = ranking_of(policy, random_views(policy, phase, 2, seed))
        pages = policy.split(ranking)
        least, most = page_limits(ranking)
        assert pages.sum(dim=(0, 2)).tolist() == [ranking.mean_pages * NUM_LAYERS * NUM_HEADS] * 2
        assert ((least <= pages) & (pages <= most)).all()
        mask = select_ragged(ranking, pages)
        assert torch.equal(mask.sum(dim=-1), num_kept(ranking, pages))
        assert mask[ranking.protected].all()
        assert not mask[ranking.positions < 0].any()
        assert mean_tokens(ranking) <= ranking.lengths.sum() / ranking.lengths.numel()


@every_case
@some
@given(seed=seeds)
def test_a_request_does_not_depend_on_its_batch_mates(policy, seed):
    for phase in phases(policy):
        views = random_views(policy, phase, 3, seed)
        ranking = ranking_of(policy, views)
        together = policy.split(ranking)
        for request in range(3):
            single = ranking_of(policy, [alone(view, request) for view in views])
            if single.mean_pages == ranking.mean_pages:
                assert torch.equal(policy.split(single)[:, 0], together[:, request])


@every_case
def test_nothing_waits_for_the_device(policy):
    """The meta device refuses both a tensor from elsewhere and a value read by Python, which would stall a GPU."""
    for phase in phases(policy):
        views = random_views(policy, phase, 1, seed=0)
        ranking = ranking_of(policy, views)
        meta = Ranking(
            **{
                f.name: value.to("meta") if isinstance(value := getattr(ranking, f.name), torch.Tensor) else value
                for f in fields(Ranking)
            }
        )
        assert select_ragged(meta, policy.split(meta)).device.type == "meta"
        if policy.measured:
            assert policy.demand(meta).device.type == "meta"
        if policy.name == "kvpress":  # SnapKVPress reads its greatest score
            continue
        tensors = {f.name: getattr(views[0], f.name) for f in fields(View)}
        shown = {name: x.to("meta") for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        assert policy.score(replace(views[0], **shown)).device.type == "meta"


@every_case
@settings(max_examples=40, deadline=None)
@given(num_prompt=st.integers(1, 6 * BUDGET), num_new=st.integers(0, 3 * BLOCK))
def test_plans_never_add_and_stay_near_their_mean(policy, num_prompt, num_new):
    resident = policy.plan(Phase.PREFILL_END, num_prompt, num_prompt)
    assert resident <= num_prompt
    for step in range(1, num_new + 1):
        seen = num_prompt + step
        kept = policy.plan(Phase.DECODE, resident + 1, seen)
        assert kept <= resident + 1
        assert kept % BLOCK == (resident + 1) % BLOCK, "whole pages leave"
        resident = kept
        if policy.decode_unit is Unit.NONE:
            assert kept == policy.plan(Phase.PREFILL_END, num_prompt, num_prompt) + step


MODELS = [
    ({"heads": [[3, 0]]}, r"heads names \[3, 0\], but the model has 3 layers of 2 KV heads\. Use layers 0 to 2"),
    ({"heads": [[0, 2]]}, r"heads names \[0, 2\]"),
    ({}, r"needs policy\.options\.heads, a list .* or policy\.options\.file"),
    ({"heads": [[layer, head] for layer in range(3) for head in range(2)]}, r"leaves all heads whole.*Use policy=full"),
    ({"file": "missing.json"}, r"file=missing\.json holds no scores of heads"),
]


@pytest.mark.parametrize(("options", "message"), MODELS, ids=str)
def test_a_list_of_heads_that_does_not_fit_the_model_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bound("head_classes", options)


def test_a_file_of_heads_of_another_model_is_refused(tmp_path):
    (tmp_path / "heads.json").write_text('{"scores": [[0.1, 0.2], [0.3, 0.4]]}')
    with pytest.raises(ValueError, match=r"is of a model with 2 layers of .* KV heads, not 3 of 2"):
        bound("head_classes", {"file": str(tmp_path / "heads.json")})


def test_a_file_of_heads_gives_the_best_share(tmp_path):
    (tmp_path / "heads.json").write_text('{"scores": [[0.1, 0.9], [0.3, 0.4], [0.4, 0.2]]}')
    policy = bound("head_classes", {"file": str(tmp_path / "heads.json"), "share": 0.34})
    assert policy.whole_rows == [[False, True], [False, True], [False, False]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("inverse_key_l2", {"skip_layers": 3}, r"skip_layers=3 is too large for a model of 3 layers\. Use 2 or less"),
        ("mix_attention", {"full_first": 3}, r"full_first=3 is too large for a model of 3 layers"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        bound(name, options)
