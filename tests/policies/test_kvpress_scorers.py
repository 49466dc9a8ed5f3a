"""`policy=kvpress`: a press fed from our view scores as the same press inside a Hugging Face model."""

import builtins
from dataclasses import dataclass

import pytest
import torch
from policy_views import bare_view
from press_layers import layers_as_presses_see_them

from harness.engines.hf.generate import run_reference
from policies import build_policy
from policies.kvpress_presses import BY_HEAD, FED, REFUSED, load_kvpress
from tests.tiny_llama import random_prompt, tiny_llama

pytest.importorskip("fire", reason="needs kvpress (make setup)")
kvpress = load_kvpress()
BUDGET, BLOCK = 64, 16
PROMPT = random_prompt(150)
CASES = [
    ("CURPress", {}),
    ("CURPress", {"leverage_type": "value", "num_sinks": 2}),
    ("CapPress", {"n_sink": 6}),
    ("ExpectedAttentionPress", {"epsilon": 0.01}),
    ("ExpectedAttentionPress", {"use_covariance": False, "n_sink": 2}),
    ("KeyDiffPress", {}),
    ("KnormPress", {}),
    ("LagKVPress", {"lag_size": 16}),
    ("ObservedAttentionPress", {}),
    ("PyramidKVPress", {"window_size": 16}),
    ("RandomPress", {"seed": 3}),
    ("SnapKVPress", {"window_size": 16, "kernel_size": 7}),
    ("StreamingLLMPress", {"n_sink": 8}),
    ("TOVAPress", {}),
]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def build(press, arguments):
    return build_policy("kvpress", budget=BUDGET, block_size=BLOCK, options={"press": press, "arguments": arguments})


def own_scores(model, press) -> list[torch.Tensor]:
    """What the press gives to each layer, from the real module, hidden states and attention; [H, T] a layer."""
    eager = isinstance(press, kvpress.ObservedAttentionPress)
    with layers_as_presses_see_them(model, PROMPT, eager=eager) as layers, torch.no_grad():
        return [press.score(*layer)[0] for layer in layers]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_a_press_keeps_what_it_keeps_in_a_hugging_face_model(model, name, arguments):
    press = getattr(kvpress, name)(**arguments, compression_ratio=1 - (BUDGET + 0.5) / len(PROMPT))
    expected = own_scores(model, press)
    decision = run_reference(model, build(name, arguments), PROMPT, 2).decisions[0]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    scale = group if name == "ObservedAttentionPress" else 1  # ours is summed over the group, theirs the mean
    for layer, (ours, theirs) in enumerate(zip(decision.scores, expected, strict=True)):
        ours = torch.stack(ours) if isinstance(ours, list) else ours
        finite = theirs < theirs.amax(dim=-1, keepdim=True)  # what a press pads with, its own maximum + 1
        torch.testing.assert_close((ours / scale)[finite], theirs[finite], rtol=2e-4, atol=1e-6)
        for head, row in enumerate(theirs):
            best = set(row.topk(BUDGET).indices.tolist())
            least = row[sorted(best)].min()
            for position in best ^ set(decision.kept[layer][head]):
                assert abs(row[position] - least) <= 1e-3 * abs(least), "only equal scores may be chosen otherwise"


def test_attention_of_transformers_is_left_as_it_was():
    """kvpress wraps every attention function when it is imported."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert {function.__module__ for function in ALL_ATTENTION_FUNCTIONS.values()}.isdisjoint(
        {"kvpress.attention_patch"}
    )


def test_every_scorer_that_works_is_compared_above():
    assert {name for name, _ in CASES} == set(FED)


def test_every_press_works_or_says_why_not():
    presses = {name for name, cls in vars(kvpress).items() if isinstance(cls, type) and name.endswith("Press")}
    assert len(presses) == 46
    assert presses - {"BasePress", "ScorerPress"} == FED.keys() | REFUSED.keys() | {BY_HEAD}
    assert not FED.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_press_that_cannot_work_is_refused_with_its_reason(name):
    with pytest.raises(ValueError, match=f"press={name} cannot be a policy: "):
        build(name, {})


@dataclass
class Foreign(kvpress.ScorerPress):
    """A scorer of somebody else's: the norm of the values, or something that no engine watches."""

    wants: str = ""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.wants:
            getattr({"module": module, "hidden": hidden_states}[self.wants.split(".")[0]], self.wants.split(".")[1])
        return values.norm(dim=-1)


def test_a_scorer_of_another_package_is_used_by_module_and_class():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 100, 8, generator=generator)
    policy = build(f"{__name__}:Foreign", {})
    view = bare_view(keys=keys, values=values)
    torch.testing.assert_close(policy.score(view), values.norm(dim=-1))


@pytest.mark.parametrize("wants", ["hidden.shape", "module.num_attention_heads"])
def test_what_no_engine_watches_is_named(wants):
    keys = torch.ones(1, 1, 100, 8)
    with pytest.raises((NotImplementedError, AttributeError), match="the press asks for"):
        build(f"{__name__}:Foreign", {"wants": wants}).score(bare_view(keys=keys, values=keys))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    real = builtins.__import__

    def no_kvpress(name, *args, **kwargs):
        if name == "kvpress":
            raise ModuleNotFoundError("No module named 'kvpress'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_kvpress)
    with pytest.raises(ValueError, match=r"needs the package kvpress .*pip install --no-deps kvpress==0\.5\.5"):
        build("KnormPress", {})
