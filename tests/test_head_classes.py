"""The tool that measures which heads a model needs whole."""

import json

import pytest
import torch

from harness.head_classes import Needle, main, measure
from policies import build_policy
from tests.engines.hf.hf_oracle import forward_under
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

NUM_LAYERS, NUM_HEADS = 3, 2
BUDGET, SINKS = 32, 4


@pytest.fixture(scope="module")
def model():
    return tiny_llama(uneven=True)


def loss_without(model, needle, layer, head):
    """The same by transformers under masks: the cut happens before the prompt's last token is attended."""
    num_seen = len(needle.prompt) - 1
    kept = [[list(range(num_seen)) for _ in range(NUM_HEADS)] for _ in range(NUM_LAYERS)]
    if layer is not None:
        kept[layer][head] = [*range(SINKS), *range(num_seen - BUDGET + SINKS, num_seen)]
    text = needle.prompt + needle.answer[:-1]
    spans = [(0, num_seen), *((at, at + 1) for at in range(num_seen, len(text)))]
    logits = forward_under(model, text, {num_seen: kept}, spans).logits[num_seen:]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(needle.answer)).item()


def test_a_head_is_scored_by_what_its_cut_adds_to_the_loss(model):
    needle = Needle(random_prompt(150, seed=1), random_prompt(6, seed=2))
    loss, rise = measure(model, needle, BUDGET, SINKS)
    assert loss == pytest.approx(loss_without(model, needle, None, None), abs=1e-4)
    for layer in range(NUM_LAYERS):
        for head in range(NUM_HEADS):
            expected = loss_without(model, needle, layer, head) - loss
            assert rise[layer, head].item() == pytest.approx(expected, abs=2e-4)
    assert rise.abs().max() > 0.01


def test_a_head_that_attends_everywhere_alike_is_needed_less_than_a_sharp_one(model):
    """In the first layer: keys 0.1 times as long against keys as they are."""
    rises = [
        measure(model, Needle(random_prompt(150, seed=n), random_prompt(6, seed=-n)), BUDGET, SINKS)[1]
        for n in (5, 6, 7)
    ]
    flat, sharp = torch.stack(rises)[:, 0].abs().mean(dim=0)
    assert flat < sharp


def test_the_file_is_one_that_the_policy_takes(tmp_path, capsys):
    path, out = save_tiny_llama(tmp_path / "tiny", uneven=True), tmp_path / "heads.json"
    arguments = ["--model", str(path), "--out", str(out), "--rows", "2", "--length", "200", "--budget", "32"]
    assert main(arguments) == 0
    written = json.loads(out.read_text())
    assert (written["rows"], written["budget"]) == (2, 32)
    options = {"file": str(out), "share": 0.5}
    policy = build_policy("head_classes", budget=32, block_size=16, options=options).for_model(NUM_LAYERS, NUM_HEADS)
    whole = torch.tensor(policy.whole_rows)
    assert whole.sum() == 3
    scores = torch.tensor(written["scores"])
    assert scores[whole].min() >= scores[~whole].max()
    assert f"policy.options.file={out}" in capsys.readouterr().out


def test_time_bounds_the_rows(tmp_path, capsys):
    path, out = save_tiny_llama(tmp_path / "tiny"), tmp_path / "heads.json"
    arguments = ["--model", str(path), "--out", str(out), "--rows", "3", "--length", "200", "--budget", "32"]
    assert main([*arguments, "--minutes", "0"]) == 0
    assert json.loads(out.read_text())["rows"] == 1
    assert "time is up after 1 of 3 rows" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--budget", "300"], ["--rows", "0"], ["--sinks", "-1"]])
def test_settings_that_make_no_sense_are_refused(tmp_path, capsys, wrong):
    assert main(["--out", str(tmp_path / "heads.json"), "--length", "200", "--budget", "32", *wrong]) == 2
    assert f"{wrong[0]}={wrong[1]}" in capsys.readouterr().err
