"""`policy=kvpress` with presses that keep unequally many tokens, against the same press inside a Hugging Face model."""

import pytest
import torch
from press_layers import layers_as_presses_see_them

from harness.engines.hf.generate import run_reference
from harness.engines.kvpress.presses import press_for
from policies import build_policy
from policies.kvpress_presses import FED, load_kvpress
from tests.tiny_llama import random_prompt, tiny_llama

pytest.importorskip("fire", reason="needs kvpress (make setup)")
kvpress = load_kvpress()
BUDGET = 96
PROMPT = random_prompt(250, seed=4)
SCORERS = [
    ("CURPress", {}),
    ("CapPress", {}),
    ("ExpectedAttentionPress", {"epsilon": 0.01}),
    ("KeyDiffPress", {}),
    ("KnormPress", {}),
    ("LagKVPress", {"lag_size": 32}),
    ("RandomPress", {"seed": 3}),
    ("SnapKVPress", {"window_size": 16}),
    ("StreamingLLMPress", {}),
    ("TOVAPress", {}),
]
UNEVEN = ("ExpectedAttentionPress", "KnormPress", "SnapKVPress")
"""Scores whose level differs between the heads of this model."""


@pytest.fixture(scope="module")
def model():
    return tiny_llama(uneven=True)


def build(press, arguments, block_size=1):
    return build_policy(
        "kvpress", budget=BUDGET, block_size=block_size, options={"press": press, "arguments": arguments}
    )


def ratio(num_kept: float) -> float:
    return 1 - num_kept / len(PROMPT)


def assert_same_but_for_ties(scores, ours, theirs, cutoffs) -> None:
    """Positions of one head, its scores [T] as the press gives them, and the scores of the last that stay."""
    for position in set(ours) ^ set(theirs):
        assert any(abs(scores[position] - cutoff) <= 1e-3 * abs(cutoff) for cutoff in cutoffs), position


@pytest.mark.parametrize("alpha", [0.2, 0.0])
@pytest.mark.parametrize(("name", "arguments"), SCORERS, ids=str)
def test_heads_share_by_the_scores_as_in_a_hugging_face_model(model, name, arguments, alpha):
    """With blocks of one token nothing is rounded to pages."""
    options = {"press": name, "arguments": arguments, "alpha_safeguard": alpha}
    (decision,) = run_reference(model, build("AdaKVPress", options), PROMPT, 3).decisions
    press = kvpress.AdaKVPress(getattr(kvpress, name)(**arguments), alpha)
    press.compression_ratio = ratio(BUDGET + 0.5)
    safe = int(BUDGET * alpha)
    with layers_as_presses_see_them(model, PROMPT) as layers, torch.no_grad():
        for (module, *rest), ours in zip(layers, decision.kept, strict=True):
            scores = press.press.score(module, *rest)[0]
            press.compress(module, *rest)
            masked = torch.zeros_like(scores, dtype=torch.bool)
            masked[module.masked_key_indices[1:]] = True
            module.masked_key_indices = None
            assert sum(map(len, ours)) == (~masked).sum() == BUDGET * len(ours)
            last = scores.flatten().sort(descending=True).values[BUDGET * len(ours) - 1]
            lowest = min(row[head].min() for row, head in zip(scores, ours, strict=True) if len(head) > max(safe, 1))
            for row, head, gone in zip(scores, ours, masked, strict=True):
                own = row.sort(descending=True).values[max(safe - 1, 0)]
                assert_same_but_for_ties(row, head, (~gone).nonzero().flatten().tolist(), (last, lowest, own))
    counts = {count for heads in decision.counts for count in heads}
    assert name not in UNEVEN or max(counts) > min(counts) + 10


@pytest.mark.parametrize("beta", [2, 4])
def test_layers_share_by_depth_as_in_a_hugging_face_model(model, beta):
    arguments = {"window_size": 16, "kernel_size": 7, "beta": beta}
    (decision,) = run_reference(model, build("PyramidKVPress", arguments), PROMPT, 3).decisions
    press = kvpress.PyramidKVPress(**arguments, compression_ratio=ratio(BUDGET))
    low = BUDGET // beta
    assert decision.counts == [[2 * BUDGET - low] * 2, [BUDGET] * 2, [low] * 2]
    with layers_as_presses_see_them(model, PROMPT) as layers, torch.no_grad():
        for (module, hidden, keys, *rest), ours in zip(layers, decision.kept, strict=True):
            scores = press.score(module, hidden, keys, *rest)[0]
            stay, _ = press.compress(module, hidden, keys, *rest)
            found = (keys[0, :, :, None] == stay[0, :, None]).all(dim=-1).any(dim=-1)
            for row, head, mask in zip(scores, ours, found, strict=True):
                theirs = mask.nonzero().flatten().tolist()
                assert len(theirs) == len(head)
                assert_same_but_for_ties(row, head, theirs, (row[theirs].min(),))


def test_layers_share_equally_where_the_last_would_keep_less_than_its_window(model):
    (decision,) = run_reference(model, build("PyramidKVPress", {}), PROMPT, 3).decisions
    assert decision.counts == [[BUDGET] * 2] * 3


@pytest.mark.parametrize(
    ("press", "arguments"),
    [("AdaKVPress", {"press": "KnormPress"}), ("PyramidKVPress", {"window_size": 16, "beta": 3})],
)
def test_in_pages_the_sum_is_exact(model, press, arguments):
    policy = build(press, arguments, block_size=16)
    (decision,) = run_reference(model, policy, PROMPT, 3).decisions
    counts = [count for heads in decision.counts for count in heads]
    assert sum(counts) == BUDGET * len(counts)
    assert len(set(counts)) > 1
    assert {count % 16 for count in counts} == {0}


def test_every_scorer_is_shared_by_above_but_one():
    """kvpress's own AdaKVPress has no attention to give to an ObservedAttentionPress, ours has."""
    assert {name for name, _ in SCORERS} | {"ObservedAttentionPress", "PyramidKVPress"} == set(FED)
    build("AdaKVPress", {"press": "ObservedAttentionPress"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"arguments\.press=None is no press .* Use policy\.options\.arguments=\{press: SnapKVPress\}"),
        ({"press": "AdaKVPress"}, r"arguments\.press=AdaKVPress is no press"),
        ({"press": "SnapKVPres"}, r"arguments\.press=SnapKVPres is unknown .* Did you mean SnapKVPress"),
        ({"press": "QFilterPress"}, r"arguments\.press=QFilterPress cannot be a policy: it downloads"),
        ({"press": "RandomPress"}, r"arguments\.press=RandomPress with seed=None is refused"),
        ({"press": "SnapKVPress", "arguments": 3}, r"arguments\.arguments=3 are no arguments"),
        ({"press": "SnapKVPress", "arguments": {"wide": 1}}, r"arguments\.arguments=\{'wide': 1\} do not fit SnapKV"),
        ({"press": "SnapKVPress", "arguments": {"window_size": 96}}, r"window_size=96 is too large for policy\.budget"),
        ({"press": "KnormPress", "alpha_safeguard": 2}, r"do not fit AdaKVPress: alpha_safeguard should be in"),
    ],
    ids=str,
)
def test_what_an_adakv_press_cannot_be_around_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("AdaKVPress", arguments)


def test_steepness_below_one_is_refused():
    with pytest.raises(ValueError, match=r"arguments\.beta=0 is too small\. Use 1 or more"):
        build("PyramidKVPress", {"beta": 0})


def test_kvpress_itself_gets_the_press_inside_the_press():
    options = {"press": "AdaKVPress", "arguments": {"press": "SnapKVPress", "arguments": {"window_size": 16}}}
    inner = {"name": "SnapKVPress", "window_size": 16}
    assert press_for("kvpress", BUDGET, 16, options) == {"name": "AdaKVPress", "press": inner}
