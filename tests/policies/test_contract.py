"""Laws that every registered policy obeys, in every combination of its options that take a choice."""

import ast
import itertools
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import num_tokens_to_evict_from, random_view, shuffled

import policies
from policies import Phase, Policy, Unit, View, available_policies, build_policy
from policies.registry import policy_class
from policies.selection import reduce_heads, select

BUDGET, BLOCK = 160, 16
EVICTING = [name for name in available_policies() if policy_class(name).evicts]
EQUAL = [name for name in EVICTING if policy_class(name).allocation != "ragged"]
"""Those that can keep equally many tokens everywhere; `test_ragged_contract.py` is about the others."""


def variants():
    """A pytest case for each policy and each combination of its Literal and bool options with equal counts."""
    for name in EQUAL:
        cls = policy_class(name)
        hints = get_type_hints(cls)
        choices = {}
        for field in fields(cls):
            if get_origin(hints[field.name]) is Literal:
                choices[field.name] = get_args(hints[field.name])
            elif hints[field.name] is bool:
                choices[field.name] = (False, True)
        choices["prefill"] = cls.modes
        for values in itertools.product(*choices.values()):
            options = dict(zip(choices, values, strict=True))
            policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)
            if policy.allocation == "equal":
                yield pytest.param(policy, id="-".join([name, *map(str, values)]))


def evicting_phases(policy: Policy) -> list[Phase]:
    phases = [Phase.PREFILL_END]
    if policy.prefill == "chunked":
        phases.append(Phase.PREFILL_CHUNK)
    return [phase for phase in [*phases, Phase.DECODE] if policy.unit(phase) is not Unit.NONE]


def kept(policy: Policy, view: View) -> torch.Tensor:
    """Mask [N, Hs, T] of one layer."""
    num_keep = policy.plan(view.phase, view.positions.shape[-1])
    scores = reduce_heads(policy, policy.score(view))
    return select(policy, view.phase, scores[None], view.positions[None], view.num_seen, num_keep)[0]


def protected(policy: Policy, view: View) -> torch.Tensor:
    newest = view.positions >= view.num_seen[:, None, None] - policy.protect_last
    return (view.positions < policy.protect_first) | newest


def alone(view: View, request: int) -> View:
    """One request of a batch."""
    rows = {f.name: getattr(view, f.name) for f in fields(View) if isinstance(getattr(view, f.name), torch.Tensor)}
    return replace(view, **{name: x[request : request + 1] for name, x in rows.items() if name != "inv_freq"})


every_variant = pytest.mark.parametrize("policy", list(variants()))
some_views = settings(max_examples=4, deadline=None)
extra = st.integers(1, 10 * BLOCK)
seeds = st.integers(0, 2**31)


@every_variant
@some_views
@given(num_extra=extra, seed=seeds)
def test_score_is_finite_float32_for_each_token(policy, num_extra, seed):
    for phase in evicting_phases(policy):
        view = random_view(policy, phase, 2, num_extra, seed)
        scores = policy.score(view)
        assert scores.dtype is torch.float32
        assert scores.shape in ((2, 2, view.positions.shape[-1]), (2, 1, view.positions.shape[-1]))
        assert torch.isfinite(scores).all()


@every_variant
def test_score_is_made_on_the_device_of_the_view_without_reading_it_back(policy):
    """The meta device refuses both a tensor from elsewhere and a value read by Python, which would stall a GPU."""
    for phase in evicting_phases(policy):
        view = random_view(policy, phase, 1, 10 * BLOCK, seed=0)
        tensors = {f.name: getattr(view, f.name) for f in fields(View)}
        meta = {name: x.to("meta") for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        assert policy.score(replace(view, **meta)).device.type == "meta"


@every_variant
@some_views
@given(num_extra=extra, seed=seeds)
def test_as_many_stay_as_planned_and_the_protected_among_them(policy, num_extra, seed):
    for phase in evicting_phases(policy):
        view = random_view(policy, phase, 2, num_extra, seed)
        num_tokens = view.positions.shape[-1]
        num_keep = policy.plan(phase, num_tokens)
        mask = kept(policy, view)
        assert num_keep < num_tokens
        assert mask.shape == view.positions.shape
        assert (mask.sum(dim=-1) == num_keep).all()
        assert mask[protected(policy, view)].all()


@pytest.mark.parametrize("name", EQUAL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_protection_asked_for_by_option_holds(name, data):
    default = build_policy(name, budget=BUDGET, block_size=BLOCK)
    options = {"protect_first": data.draw(st.integers(0, 24))}
    if default.protect_last == 0:
        options["protect_last"] = data.draw(st.integers(0, 40))
    if hasattr(default, "granularity"):
        options["granularity"] = data.draw(st.sampled_from(["token", "block"]))
    policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)
    for phase in evicting_phases(policy):
        view = random_view(policy, phase, 1, data.draw(extra), data.draw(seeds))
        assert kept(policy, view)[protected(policy, view)].all()


@every_variant
@some_views
@given(num_extra=extra, seed=seeds)
def test_a_request_does_not_depend_on_its_batch_mates(policy, num_extra, seed):
    for phase in evicting_phases(policy):
        batch = random_view(policy, phase, 3, num_extra, seed)
        scores, masks = policy.score(batch), kept(policy, batch)
        for request in range(3):
            single = alone(batch, request)
            torch.testing.assert_close(policy.score(single)[0], scores[request], rtol=1e-5, atol=1e-7)
            assert torch.equal(kept(policy, single)[0], masks[request])


@every_variant
@some_views
@given(num_extra=extra, seed=seeds)
def test_a_score_belongs_to_the_token_and_not_to_its_slot(policy, num_extra, seed):
    for phase in evicting_phases(policy):
        view = random_view(policy, phase, 1, num_extra, seed)
        moved_view, order = shuffled(view, seed)
        moved = policy.score(moved_view)
        torch.testing.assert_close(moved, policy.score(view)[..., order], rtol=1e-5, atol=1e-6)


@every_variant
@some_views
@given(num_extra=extra, seed=seeds)
def test_among_equal_scores_the_later_position_stays_wherever_it_lies(policy, num_extra, seed):
    for phase in evicting_phases(policy):
        if policy.unit(phase) is not Unit.TOKEN:
            continue
        view, _ = shuffled(random_view(policy, phase, 1, num_extra, seed), seed)
        num_keep = policy.plan(phase, view.positions.shape[-1])
        flat = torch.zeros(view.positions.shape)
        mask = select(policy, phase, flat[None], view.positions[None], view.num_seen, num_keep)[0]
        for positions, row in zip(view.positions[0].tolist(), mask[0].tolist(), strict=True):
            first = [p for p in positions if p < policy.protect_first]
            rest = sorted(p for p in positions if p >= policy.protect_first)
            latest = rest[len(rest) - (num_keep - len(first)) :]
            assert {p for p, stays in zip(positions, row, strict=True) if stays} == {*first, *latest}


@every_variant
@settings(max_examples=20, deadline=None)
@given(num_resident=st.integers(0, 4 * BUDGET))
def test_plan_never_adds_and_stops_at_the_budget(policy, num_resident):
    for phase in Phase:
        num_keep = policy.plan(phase, num_resident)
        assert num_keep <= num_resident
        if num_resident <= BUDGET or policy.unit(phase) is Unit.NONE:
            assert num_keep == num_resident
        elif policy.unit(phase) is Unit.TOKEN:
            assert num_keep == BUDGET
        else:
            assert (num_resident - num_keep) % BLOCK == 0
        if phase is not Phase.DECODE:
            assert num_keep <= BUDGET
            assert policy.plan(phase, num_keep) == num_keep


@every_variant
def test_decode_stays_within_one_block_of_the_budget(policy):
    num_resident = num_tokens_to_evict_from(policy, Phase.PREFILL_END, 40)
    num_resident = policy.plan(Phase.PREFILL_END, num_resident)
    for _ in range(5 * BLOCK):
        num_resident = policy.plan(Phase.DECODE, num_resident + 1)
        bound = BUDGET + {Unit.TOKEN: 0, Unit.BLOCK: BLOCK - 1, Unit.NONE: 5 * BLOCK}[policy.decode_unit]
        assert num_resident <= bound


@pytest.mark.parametrize("budget", [8, 12, 16])
def test_block_protection_is_refused_exactly_where_whole_blocks_cannot_give_it(budget):
    for protect_first, protect_last in itertools.product(range(budget), repeat=2):
        if protect_first + protect_last > budget:
            continue
        options = {"granularity": "block", "protect_first": 0}
        policy = build_policy("streaming_llm", budget=budget, block_size=4, options=options)
        object.__setattr__(policy, "protect_first", protect_first)
        object.__setattr__(policy, "protect_last", protect_last)
        prompts = [
            View(0, 1, Phase.PREFILL_END, torch.arange(n)[None, None], torch.tensor([n]), block_size=4)
            for n in range(budget + 1, budget + 9)
        ]
        if all(kept(policy, view)[protected(policy, view)].all() for view in prompts):
            assert replace(policy) == policy
        else:
            with pytest.raises(
                ValueError, match=rf"policy\.budget={budget} cannot hold .* in whole blocks of 4\. Raise"
            ):
                replace(policy)


INVALID = [
    ("random", {"granularity": "page"}, r"policy\.options\.granularity=page .*token, block"),
    ("random", {"protect_first": -1}, r"protect_first=-1 .*0 or more"),
    ("keydiff", {"prefill": "chunked", "prefill_chunk": 100}, r"prefill_chunk=100 .*96 or 112"),
    ("h2o", {"heavy_ratio": 1.5}, r"heavy_ratio=1\.5 is too large\. Use 1 or less"),
    ("h2o", {"heavy_ratio": 0.05, "granularity": "block"}, r"heavy_ratio=0\.05 leaves 8 .*Use 0\.1 or more"),
    ("h2o", {"protect_last": 16}, r"protect_last=16 contradicts policy=h2o.*last 80 tokens.*heavy_ratio"),
    ("h2o", {"protect_first": 81}, r"policy\.budget=160 is smaller than protect_first\(81\).*at least 161"),
    ("snapkv", {"prefill": "chunked"}, r"prefill=chunked is not defined for policy=snapkv\. Use after"),
    ("snapkv", {"window": 0}, r"window=0 is too small\. Use 1 or more"),
    (
        "snapkv",
        {"window": 160},
        r"window=160 is too large for policy\.budget=160\. Use 159 or less, or raise policy\.bud",
    ),
    ("snapkv", {"kernel": 4}, r"kernel=4 is even\. Use 3 or 5"),
    ("snapkv", {"pooling": "mean"}, r"pooling=mean .*avg, max"),
    ("snapkv", {"group": "sum"}, r"group=sum .*mean, max"),
    ("snapkv", {"protect_last": 8}, r"protect_last=8 contradicts policy=snapkv.*window"),
    ("chunkkv", {"chunk_length": 0}, r"chunk_length=0 is too small"),
    ("chunkkv", {"prefill": "chunked"}, r"policy=chunkkv\. Use after"),
    ("expected_attention", {"num_future": 0}, r"num_future=0 is too small"),
    ("expected_attention", {"epsilon": -0.1}, r"epsilon=-0\.1 is too small"),
    ("expected_attention", {"prefill": "chunked"}, r"policy=expected_attention\. Use after"),
    ("expected_attention", {"value_weighted": True}, r"value_weighted is not an option of policy=expected_attention"),
    ("expected_attention", {"floor": 1.5}, r"floor=1\.5 is too large\. Use 1 or less"),
    ("inverse_key_l2", {"skip_layers": -1}, r"skip_layers=-1 is too small"),
    ("inverse_key_l2", {"skip_layers": 2, "granularity": "block"}, r"skip_layers=2 is not for granularity=block"),
    ("ada_kv", {"floor": -0.1}, r"floor=-0\.1 is too small\. Use 0 or more"),
    ("ada_kv", {"floor_rule": "maximum"}, r"floor_rule=maximum .*blend, minimum"),
    ("ada_kv", {"beta": 0.5}, r"beta=0\.5 is too small\. Use 1 or more"),
    ("ada_kv", {"window": 160}, r"window=160 is too large for policy\.budget=160"),
    ("pyramid_kv", {"beta": 0}, r"beta=0 is too small\. Use 1 or more"),
    ("pyramid_kv", {"prefill": "chunked"}, r"policy=pyramid_kv\. Use after"),
    ("kv_compress", {"window": 0}, r"window=0 is too small"),
    ("kv_compress", {"protect_last": 161}, r"policy\.budget=160 is smaller than .*protect_last\(161\)"),
    ("kv_compress", {"scope": "head"}, r"scope=head .*global, layer"),
    ("head_classes", {"heads": [[0, 1]], "file": "a.json"}, r"heads and policy\.options\.file are both given"),
    ("head_classes", {"heads": [0, 1]}, r"policy\.options\.heads holds 0\. Use pairs of whole numbers"),
    ("head_classes", {"heads": "all"}, r"policy\.options\.heads=all is no list"),
    ("head_classes", {"share": 2}, r"share=2 is too large\. Use 1 or less"),
    ("mix_attention", {"full_every": 1}, r"full_every=1 is too small\. Use 2 or more"),
    ("corm", {}, r"policy=corm lets the data decide, so policy\.budget=160 has no effect\. Remove it"),
    ("kvpress", {"press": "SnapKV"}, r"press=SnapKV is unknown.*Did you mean SnapKVPress\?"),
    ("kvpress", {"press": "CriticalKVPress"}, r"press=CriticalKVPress cannot be a policy: it needs the weights"),
    (
        "kvpress",
        {"press": "SnapKVPress", "arguments": {"window": 8}},
        r"arguments=\{'window': 8\} do not fit SnapKVPress",
    ),
    (
        "kvpress",
        {"press": "SnapKVPress", "arguments": {"window_size": 160}},
        r"window_size=160 is too large for policy",
    ),
    ("kvpress", {"press": "RandomPress"}, r"RandomPress with seed=None is refused: it draws"),
    (
        "kvpress",
        {"press": "CURPress", "arguments": {"use_random_leverage": True}},
        r"use_random_leverage=True is refused",
    ),
    ("kvpress", {"arguments": {"compression_ratio": 0.5}}, r"compression_ratio follows from policy\.budget"),
    ("kvpress", {"press": "torch:Tensor"}, r"press=torch:Tensor is no ScorerPress"),
    ("kvpress", {"press": "no.such:Press"}, r"press=no\.such:Press is unknown \(No module named 'no'\)"),
    ("lagkv", {"lag": 157}, r"lag=157 is too large for policy\.budget=160\. Use 156 or less"),
    ("lagkv", {"prefill": "chunked"}, r"policy=lagkv\. Use after"),
    ("paged_eviction", {"decode_scope": "head"}, r"decode_scope=head .*layer, global"),
    ("h2o", {"value_weighted": "no"}, r"policy\.options\.value_weighted=no is not true or false"),
    ("h2o", {"heavy_ratio": True}, r"heavy_ratio=True is not a number"),
    ("paged_eviction", {"protect_last_pages": -1}, r"protect_last_pages=-1 is too small\. Use 0"),
    ("paged_eviction", {"protect_first_pages": 20}, r"policy\.budget=160 is smaller than protect_first\(320\)"),
    ("paged_eviction", {"protect_first": None}, r"protect_first=null is not a whole number"),
    ("paged_eviction", {"protect_first": 1.5}, r"protect_first=1\.5 is not a whole number"),
    ("tova", {"windw": 1}, r"policy\.options\.windw is not an option of policy=tova"),
]


@pytest.mark.parametrize(("name", "options", "message"), INVALID)
def test_a_bad_option_is_refused_with_its_name_value_and_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)


@pytest.mark.parametrize("name", [name for name in EVICTING if policy_class(name).takes_budget])
def test_an_impossible_budget_is_refused(name):
    for budget, message in [
        (100, r"policy\.budget=100\b"),
        (16, r"policy\.budget=16\b"),
        (None, r"needs policy\.budget"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_policy(name, budget=budget, block_size=BLOCK)


def test_policies_import_only_torch_and_the_standard_library():
    """kvpress is imported where one of its presses is built."""
    for path in Path(policies.__file__).parent.glob("*.py"):
        optional = {"kvpress"} if path.name == "kvpress_presses.py" else set()
        allowed = {"torch", "policies", *sys.stdlib_module_names, *optional}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name
