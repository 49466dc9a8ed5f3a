"""From policies to presses: every translated option arrives, every other one is refused."""

from dataclasses import fields

import pytest

from harness.engines.kvpress.presses import COUNTERPARTS, press_for
from harness.errors import UserError
from policies.registry import BUILT_IN, policy_class

BUDGET, BLOCK_SIZE = 256, 32
REQUIRED = {"ada_kv": {"pooling": "avg", "floor_rule": "minimum"}, "pyramid_kv": {"pooling": "avg"}}
EXAMPLES = {
    "ada_kv": (
        {"window": 16, "kernel": 5, "floor": 0.5},
        {
            "name": "AdaKVPress",
            "alpha_safeguard": 0.5,
            "press": {"name": "SnapKVPress", "window_size": 16, "kernel_size": 5},
        },
    ),
    "chunkkv": (
        {"chunk_length": 10, "window": 16},
        {"name": "ChunkKVPress", "chunk_length": 10, "press": {"name": "SnapKVPress", "window_size": 16}},
    ),
    "expected_attention": (
        {
            "protect_first": 2,
            "num_future": 64,
            "epsilon": 0.01,
            "use_covariance": False,
            "head_adaptive": True,
            "floor": 0.1,
        },
        {
            "name": "AdaKVPress",
            "alpha_safeguard": 0.1,
            "press": {
                "name": "ExpectedAttentionPress",
                "n_sink": 2,
                "n_future_positions": 64,
                "epsilon": 0.01,
                "use_covariance": False,
            },
        },
    ),
    "inverse_key_l2": ({}, {"name": "KnormPress"}),
    "keydiff": ({}, {"name": "KeyDiffPress"}),
    "kvpress": (
        {"press": "SnapKVPress", "arguments": {"window_size": 16}},
        {"name": "SnapKVPress", "window_size": 16},
    ),
    "lagkv": ({"protect_first": 8, "lag": 64}, {"name": "LagKVPress", "n_sink": 8, "lag_size": 64}),
    "pyramid_kv": (
        {"window": 16, "kernel": 5, "beta": 10.0},
        {"name": "PyramidKVPress", "window_size": 16, "kernel_size": 5, "beta": 10.0},
    ),
    "random": ({"seed": 3}, {"name": "RandomPress", "seed": 3}),
    "snapkv": ({"window": 16, "kernel": 7}, {"name": "SnapKVPress", "window_size": 16, "kernel_size": 7}),
    "streaming_llm": ({"protect_first": 8}, {"name": "StreamingLLMPress", "n_sink": 8}),
    "tova": ({}, {"name": "TOVAPress"}),
}


def press(name: str, **options):
    return press_for(name, BUDGET, BLOCK_SIZE, REQUIRED.get(name, {}) | options)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_options_become_arguments(name):
    options, expected = EXAMPLES[name]
    assert press(name, **options) == expected
    assert set(options) == set(COUNTERPARTS[name].translated)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_policys_defaults_are_spelt_out(name):
    """kvpress's own defaults differ (SnapKV's window is 64 there), so none may be left to it."""
    defaults = {field.name: field.default for field in fields(policy_class(name))}
    options = {option: defaults[option] for option in COUNTERPARTS[name].translated if option != "arguments"}
    assert press(name) == press(name, **options)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("inverse_key_l2", "protect_first", 4),
        ("inverse_key_l2", "granularity", "block"),
        ("keydiff", "prefill", "chunked"),
        ("snapkv", "pooling", "max"),
        ("snapkv", "group", "max"),
        ("snapkv", "value_weighted", True),
        ("tova", "protect_last", 2),
        ("streaming_llm", "granularity", "block"),
        ("expected_attention", "protect_last", 8),
        ("ada_kv", "beta", 20.0),
        ("inverse_key_l2", "skip_layers", 2),
    ],
)
def test_an_option_that_the_press_lacks_is_refused(name, option, value):
    with pytest.raises(UserError, match=rf"policy\.options\.{option}={value} of policy={name} is unknown to kvpress"):
        press(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "option"), [("ada_kv", "pooling"), ("ada_kv", "floor_rule"), ("pyramid_kv", "pooling")]
)
def test_a_default_that_the_press_lacks_is_refused_with_what_it_has(name, option):
    options = {key: value for key, value in REQUIRED[name].items() if key != option}
    with pytest.raises(UserError, match=rf"options\.{option}=.* is unknown to kvpress.*Use {REQUIRED[name][option]}"):
        press_for(name, BUDGET, BLOCK_SIZE, options)


def test_expected_attention_is_alone_where_heads_keep_equally_many():
    assert press("expected_attention")["name"] == "ExpectedAttentionPress"


def test_tova_may_name_the_protection_that_the_press_has():
    assert press("tova", protect_last=1) == press("tova")


def test_a_chunk_length_without_chunks_is_no_obstacle():
    assert press("keydiff", prefill="after", prefill_chunk=256) == {"name": "KeyDiffPress"}


def test_the_full_cache_has_no_press():
    assert press_for("full", None, BLOCK_SIZE, {}) is None


def test_h2o_is_not_observed_attention():
    with pytest.raises(UserError, match="ObservedAttentionPress averages the attention"):
        press("h2o")


def test_every_other_policy_says_that_it_has_no_counterpart():
    others = set(BUILT_IN) - set(COUNTERPARTS) - {"full", "h2o"}
    assert "paged_eviction" in others
    for name in others:
        budget = BUDGET if policy_class(name).takes_budget else None
        with pytest.raises(UserError, match=f"policy={name} has no counterpart in kvpress"):
            press_for(name, budget, BLOCK_SIZE, {})


def test_a_press_is_named_by_its_class():
    inner = {"name": "SnapKVPress", "window_size": 32}
    assert press("kvpress:AdaKVPress", press=inner) == {"name": "AdaKVPress", "press": inner}


def test_a_named_press_needs_a_budget():
    with pytest.raises(UserError, match=r"policy\.name=kvpress:KnormPress needs policy\.budget"):
        press_for("kvpress:KnormPress", None, BLOCK_SIZE, {})


def test_the_policys_own_checks_come_first():
    with pytest.raises(ValueError, match=r"policy\.options\.kernel=4 is even"):
        press("snapkv", kernel=4)
