"""Our policies against kvpress's presses of the same definition, after the prompt; run by `make peer-check`.

Two implementations round differently, ours compares scores at 18 bits, and equal tokens have equal scores in the first
layer, of which ours keeps the latest and kvpress any. So a token may be kept by one and not by the other if its score
is within `TIE` of the last place that stays, and at most one place in a hundred may go to such a token.
"""

import json
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.benchmarks.mini.generate import generate
from harness.benchmarks.prompting import build_sample
from harness.engines.hf.generate import run_reference
from harness.engines.hf.trace import Decision
from harness.engines.kvpress.presses import press_for
from harness.engines.kvpress.process import INTERPRETER, WorkerProcess
from harness.models import prepare_embedded_model
from harness.tokenizer import load_tokenizer
from policies.registry import build_policy
from tests.tiny_llama import random_prompt, save_tiny_llama

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not INTERPRETER.exists(), reason="needs .venv-kvpress (make setup-kvpress)"),
]

BLOCK_SIZE = 32
TIE = 2.0**-16
NUM_NEW = 8
SMOLLM2_LENGTH = 1000
SAME = {
    "inverse_key_l2": {},
    "keydiff": {},
    "snapkv": {},
    "snapkv-kvpress-defaults": {"window": 64},
    "snapkv-unpooled": {"window": 8, "kernel": 1},
    "tova": {"protect_last": 1},
    "streaming_llm": {},
    "streaming_llm-16-sinks": {"protect_first": 16},
} | {
    f"kvpress-{press}": {"press": press, "arguments": arguments}
    for press, arguments in {
        "CURPress": {},
        "CapPress": {},
        "ExpectedAttentionPress": {"epsilon": 0.01},
        "KeyDiffPress": {},
        "KnormPress": {},
        "LagKVPress": {"lag_size": 32},
        "ObservedAttentionPress": {},
        "RandomPress": {"seed": 1},
        "SnapKVPress": {},
        "StreamingLLMPress": {},
        "TOVAPress": {},
    }.items()
}
DECODES_UNTOUCHED = "snapkv"
"""Evicts nothing while decoding, like every press; the other policies go on."""


def policy_of(case: str, budget: int, **options):
    name = case.partition("-")[0]
    return build_policy(name, budget=budget, block_size=BLOCK_SIZE, options=SAME[case] | options)


def press_of(case: str, budget: int) -> dict:
    return press_for(case.partition("-")[0], budget, BLOCK_SIZE, SAME[case])


def ask(
    model_path: str, press: dict, budget: int, prompts: list[list[int]], num_new: int = NUM_NEW, budgets: list[int] = ()
) -> list[dict]:
    arguments = [str(model_path), "--press", json.dumps(press), "--budget", str(budget), "--record-positions"]
    with closing(WorkerProcess(arguments)) as worker:
        return [
            worker.ask(
                {
                    "request_id": str(number),
                    "prompt_token_ids": prompt,
                    "max_new_tokens": num_new,
                    "stop_token_ids": [],
                    "min_new_tokens": 0,
                    **({"budget": budgets[number]} if budgets else {}),
                }
            )
            for number, prompt in enumerate(prompts)
        ]


def reference(model, policy, prompt: list[int], num_new: int = NUM_NEW):
    return run_reference(model, policy, prompt, num_new)


def assert_same_choice(decision: Decision, positions: list[list[list[int]]], policy) -> None:
    num_kept, num_differing = 0, 0
    for layer, (ours, theirs) in enumerate(zip(decision.kept, positions, strict=True)):
        scores = policy_scores(decision, layer, policy)
        for head, (our_row, their_row) in enumerate(zip(ours, theirs, strict=True)):
            row = scores[head if policy.per_head else 0]
            free = [p for p in our_row if policy.protect_first <= p < decision.num_seen - policy.protect_last]
            cutoff = min((row[p].item() for p in free), default=0.0)
            ties = set(our_row) ^ set(their_row)
            for position in ties:
                assert abs(row[position].item() - cutoff) <= TIE * abs(cutoff), (layer, head, position)
            num_kept += len(our_row)
            num_differing += len(ties) // 2
    print(f"{policy.name} {getattr(policy, 'press', '')}: {num_differing} of {num_kept} places differ, in ties")
    few = 0.05 if "LagKVPress" in getattr(policy, "press", "") else 0.01  # its scores are ranks, equal in every lag
    assert num_differing <= few * num_kept


def policy_scores(decision: Decision, layer: int, policy) -> torch.Tensor:
    """By position, one row a choice; a prompt's slots are in position order."""
    scores = decision.scores[layer]
    return scores if policy.per_head else scores.mean(dim=0, keepdim=True)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def uneven_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "uneven", uneven=True)


@pytest.fixture(scope="module")
def uneven(uneven_path):
    return AutoModelForCausalLM.from_pretrained(uneven_path, dtype="float32").eval()


@pytest.fixture(scope="module")
def tiny(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype="float32").eval()


@pytest.mark.parametrize("budget", [64 + BLOCK_SIZE, 8 * BLOCK_SIZE])
@pytest.mark.parametrize("case", SAME)
def test_kept_positions_agree_on_a_tiny_llama(tiny, tiny_path, case, budget):
    policy = policy_of(case, budget)
    lengths = (budget - 5, budget, budget + 1, 3 * budget + 7)
    prompts = [random_prompt(length, seed=length) for length in lengths]
    below, at, *above = ask(tiny_path, press_of(case, budget), budget, prompts)
    for reply, prompt in ((below, prompts[0]), (at, prompts[1])):
        assert not reply["compressed"]
        assert reply["kept_tokens"] == [len(prompt)] * 3
    for reply, prompt in zip(above, prompts[2:], strict=True):
        trace = reference(tiny, policy, prompt)
        assert reply["kept_tokens"] == [budget] * 3
        assert_same_choice(trace.decisions[0], reply["kept_positions"], policy)
        assert reply["token_ids"][0] == trace.token_ids[0]


def test_kept_positions_agree_at_a_share_of_each_prompt(tiny, tiny_path):
    """kvpress is told our number of tokens, not the share, which it would round in its own way."""
    policy = build_policy("keydiff", budget=0.25, block_size=BLOCK_SIZE)
    prompts = [random_prompt(length, seed=length) for length in (300, 333, 700)]
    budgets = [policy.for_prompt(len(prompt)).budget for prompt in prompts]
    replies = ask(tiny_path, press_of("keydiff", 64), 64, prompts, budgets=budgets)
    for reply, prompt, budget in zip(replies, prompts, (96, 96, 192), strict=True):
        assert reply["kept_tokens"] == [budget] * 3
        assert_same_choice(reference(tiny, policy, prompt).decisions[0], reply["kept_positions"], policy)


@pytest.fixture(scope="module")
def smollm2():
    """Model and two prompts of real tasks."""
    path = str(prepare_embedded_model())
    tokenizer, stop = load_tokenizer(path, None)
    rows = [generate(task, 1, 0)[0] for task in ("qasper", "passage_retrieval_zh")]
    prompts = [build_sample(row, tokenizer, SMOLLM2_LENGTH, stop).prompt_token_ids for row in rows]
    return path, AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval(), prompts


@pytest.mark.parametrize("case", [case for case in SAME if "-" not in case])
def test_kept_positions_agree_on_smollm2(smollm2, case):
    budget = 256
    path, model, prompts = smollm2
    assert all(len(prompt) > 2 * budget for prompt in prompts)
    policy = policy_of(case, budget)
    for reply, prompt in zip(ask(path, press_of(case, budget), budget, prompts, 2), prompts, strict=True):
        assert set(reply["kept_tokens"]) == {budget}
        assert_same_choice(reference(model, policy, prompt, 2).decisions[0], reply["kept_positions"], policy)


def test_greedy_text_agrees_where_neither_evicts_while_decoding(tiny, tiny_path):
    prompts = [random_prompt(300, seed=seed) for seed in range(4)]
    policy = policy_of(DECODES_UNTOUCHED, 128)
    for reply, prompt in zip(ask(tiny_path, press_of(DECODES_UNTOUCHED, 128), 128, prompts), prompts, strict=True):
        assert reply["token_ids"] == reference(tiny, policy, prompt).token_ids


@pytest.mark.parametrize("case", ["inverse_key_l2", "keydiff", "tova", "streaming_llm"])
def test_difference_a_press_lets_the_cache_grow_while_decoding(tiny, tiny_path, case):
    (reply,) = ask(tiny_path, press_of(case, 128), 128, [random_prompt(300)])
    trace = reference(tiny, policy_of(case, 128), random_prompt(300))
    assert reply["final_tokens"] == [128 + NUM_NEW - 1] * 3
    assert [step.num_resident for step in trace.steps] == [300] + [129] * (NUM_NEW - 1)


def test_difference_tova_may_drop_the_last_token_and_the_press_never_does(tiny, tiny_path):
    prompts = [random_prompt(300, seed=seed) for seed in range(8)]
    replies = ask(tiny_path, press_of("tova", 64), 64, prompts)
    assert all(row[-1] == 299 for reply in replies for layer in reply["kept_positions"] for row in layer)
    free = policy_of("tova", 64, protect_last=0)
    ours = [row for prompt in prompts for row in reference(tiny, free, prompt).decisions[0].kept]
    assert any(299 not in heads[0] for heads in ours)


def test_difference_snapkv_default_window(tiny, tiny_path):
    """64 queries in kvpress, 32 in the authors' code and here: so our window is always passed on."""
    prompt = random_prompt(300)
    (theirs,) = ask(tiny_path, {"name": "SnapKVPress"}, 128, [prompt])
    wide = policy_of("snapkv", 128, window=64)
    assert_same_choice(reference(tiny, wide, prompt).decisions[0], theirs["kept_positions"], wide)
    assert reference(tiny, policy_of("snapkv", 128), prompt).decisions[0].kept != theirs["kept_positions"]


def test_difference_chunkkv_keeps_whole_chunks_only(tiny_path):
    (reply,) = ask(tiny_path, press_for("chunkkv", 128, BLOCK_SIZE, {}), 128, [random_prompt(300)])
    assert reply["kept_tokens"] == [120] * 3


def test_difference_a_press_that_masks_frees_nothing(tiny_path):
    press = {"name": "AdaKVPress", "press": {"name": "SnapKVPress", "window_size": 32}}
    (reply,) = ask(tiny_path, press, 128, [random_prompt(300)])
    assert reply["kept_tokens"] == [300] * 3
    assert [sum(heads) for heads in reply["kept_by_head"]] == [2 * 128] * 3


ADA = {"window": 32, "kernel": 5, "pooling": "avg", "floor_rule": "minimum"}
ADAPTIVE = [("ada_kv", ADA), ("ada_kv", ADA | {"floor": 0.0}), ("expected_attention", {"head_adaptive": True})]


@pytest.mark.parametrize(("name", "options"), ADAPTIVE, ids=str)
def test_budgets_of_heads_agree_token_by_token(uneven, uneven_path, name, options):
    """With blocks of one token nothing is rounded to pages."""
    budget, prompts = 96, [random_prompt(length, seed=length) for length in (200, 333)]
    policy = build_policy(name, budget=budget, block_size=1, options=options)
    press = press_for(name, budget, 1, options)
    for reply, prompt in zip(ask(uneven_path, press, budget, prompts), prompts, strict=True):
        (decision,) = reference(uneven, policy, prompt).decisions
        assert [sum(heads) for heads in reply["kept_by_head"]] == [2 * budget] * 3
        counts = [count for heads in decision.counts for count in heads]
        assert max(counts) > min(counts) + 10
        for layer, (ours, theirs) in enumerate(zip(decision.kept, reply["kept_positions"], strict=True)):
            assert_same_layer(decision.scores[layer], ours, theirs, safe=int(budget * policy.floor))


def assert_same_layer(scores: list[torch.Tensor], ours, theirs, safe: int) -> None:
    """Sets are equal but for ties with the layer's last place, or a head's where the floor decides."""
    num_kept = sum(map(len, ours))
    assert num_kept == sum(map(len, theirs))
    above_floor = [row[kept].min() for row, kept in zip(scores, ours, strict=True) if len(kept) > safe]
    layer_cutoff = min(above_floor).item()
    num_differing = 0
    for row, our_row, their_row in zip(scores, ours, theirs, strict=True):
        cutoffs = (layer_cutoff, row.sort(descending=True).values[max(safe - 1, 0)].item())
        ties = set(our_row) ^ set(their_row)
        for position in ties:
            assert any(abs(row[position].item() - cutoff) <= TIE * abs(cutoff) for cutoff in cutoffs), position
        num_differing += len(ties)
    assert num_differing <= num_kept / 50


def test_pyramid_layers_agree_up_to_their_counts(uneven, uneven_path):
    """The press leaves the window out of its arithmetic, so counts differ, and each layer keeps SnapKV's best."""
    budget, beta, prompt = 128, 2.0, random_prompt(400, seed=5)
    options = {"window": 32, "kernel": 5, "pooling": "avg", "beta": beta}
    policy = build_policy("pyramid_kv", budget=budget, block_size=1, options=options)
    (decision,) = reference(uneven, policy, prompt).decisions
    (reply,) = ask(uneven_path, press_for("pyramid_kv", budget, 1, options), budget, [prompt])
    window = options["window"]
    rest = budget - window
    assert [heads[0] for heads in decision.counts] == [window + 3 * rest // 2, budget, window + rest // 2]
    assert reply["kept_tokens"] == pytest.approx([3 * budget // 2, budget, budget // 2], abs=1)  # of C + 1/2
    middle = decision.kept[1]
    for ours, theirs, row in zip(middle, reply["kept_positions"][1], decision.scores[1], strict=True):
        cutoff = min(row[p].item() for p in ours if p < len(prompt) - window)
        assert all(abs(row[p].item() - cutoff) <= TIE * abs(cutoff) for p in set(ours) ^ set(theirs))


def test_difference_pyramid_falls_back_to_equal_counts(uneven_path):
    """Where the last layer would keep less than its window: at the default beta with every budget below 20 windows."""
    options = {"window": 32, "kernel": 5, "pooling": "avg", "beta": 20.0}
    (reply,) = ask(uneven_path, press_for("pyramid_kv", 128, 1, options), 128, [random_prompt(400)])
    assert reply["kept_tokens"] == [128] * 3


def test_only_one_layer_at_a_time_holds_the_whole_prompt(tiny_path):
    (reply,) = ask(tiny_path, {"name": "KnormPress"}, 128, [random_prompt(300)])
    assert reply["prompt_peak_tokens"] == 300 + 2 * 128
