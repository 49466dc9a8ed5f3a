"""Loads are drawn from their seed alone, with the lengths and arrivals that were asked for."""

import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from omegaconf import OmegaConf

import conf
from harness.bench.lengths import parse_lengths
from harness.bench.load import make_load, warmup_load
from harness.bench.models import prepare_model
from harness.config import ModelConfig
from harness.errors import UserError
from tests.bench.scripted_server import SMALL, VOCABULARY, composed_plan


def load_of(*overrides: str):
    return make_load(composed_plan(*SMALL, *overrides), VOCABULARY)


def test_one_seed_gives_one_load():
    random_lengths = ("load.input_tokens=[1,200]", "load.output_tokens=[1,50]", "load.request_rate=3")
    assert load_of(*random_lengths) == load_of(*random_lengths)
    assert load_of(*random_lengths) != load_of(*random_lengths, "load.seed=1")


def test_prompts_hold_ordinary_tokens_only_and_differ():
    prompts = [timed.request.prompt_token_ids for timed in load_of("load.input_tokens=500")]
    assert {len(prompt) for prompt in prompts} == {500}
    assert {token for prompt in prompts for token in prompt} == set(VOCABULARY.ordinary)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_a_range_is_drawn_uniformly_with_both_ends():
    lengths = parse_lengths("key", [3, 5])
    drawn = lengths.draw(random.Random(0), 3000)
    assert set(drawn) == {3, 4, 5}
    assert all(drawn.count(length) == pytest.approx(1000, abs=120) for length in (3, 4, 5))
    assert lengths.longest == 5


def test_weights_are_shares():
    drawn = parse_lengths("key", {10: 3, 20: 1}).draw(random.Random(0), 4000)
    assert drawn.count(10) == pytest.approx(3000, abs=120)


@pytest.mark.parametrize("value", [True, 1.5, [1, 2, 3], {"a": 1}, {4: "x"}, {}, None])
def test_other_forms_of_a_length_are_refused(value):
    with pytest.raises(UserError, match=r"key=.* is no length"):
        parse_lengths("key", value)


def test_all_at_once_is_the_default():
    assert {timed.at_s for timed in load_of()} == {0.0}


def test_arrivals_have_the_rate_and_the_irregularity_of_a_poisson_process():
    arrivals = [timed.at_s for timed in load_of("load.request_rate=4", "load.num_requests=2000")]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)


def test_stop_tokens_are_given_only_where_they_count():
    assert {timed.request.stop_token_ids for timed in load_of()} == {()}
    assert {timed.request.stop_token_ids for timed in load_of("load.ignore_eos=false")} == {VOCABULARY.stop}


def test_the_warm_up_is_the_head_of_the_load_with_short_answers():
    plan = composed_plan(*SMALL, "warmup.num_requests=2", "warmup.output_tokens=3", "load.request_rate=0.1")
    load = make_load(plan, VOCABULARY)
    warmup = warmup_load(plan, load)
    assert [timed.request.prompt_token_ids for timed in warmup] == [t.request.prompt_token_ids for t in load[:2]]
    assert {(timed.at_s, timed.request.max_new_tokens) for timed in warmup} == {(0.0, 3)}


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3.2-3b", "llama3.1-8b"])
def test_a_shape_has_as_many_weights_as_the_model(name, tmp_path):
    """The published numbers of parameters: 1.236, 3.213 and 8.030 thousand millions."""

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = OmegaConf.load(Path(conf.__file__).parent / "model" / f"{name}.yaml")
    model = ModelConfig(**(OmegaConf.to_container(values) | {"dtype": "float32"}))
    path, vocabulary = prepare_model(model, "dummy", tmp_path)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).num_parameters()
    expected = {"llama3.2-1b": 1.236e9, "llama3.2-3b": 3.213e9, "llama3.1-8b": 8.030e9}[name]
    assert weights == pytest.approx(expected, rel=1e-3)
    assert 128000 not in vocabulary.ordinary
    assert 128009 not in vocabulary.ordinary


def test_a_shape_that_is_not_known_is_refused(tmp_path):
    model = ModelConfig("mystery", None, None, "float32", 100, 1.0, 1, 1, 1, 32)
    with pytest.raises(UserError, match="not of model=mystery"):
        prepare_model(model, "dummy", tmp_path)
