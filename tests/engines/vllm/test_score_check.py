"""A policy of another package that is wrong is told so by name, in the engine and in the metric of a server."""

import math

import pytest
import torch

import harness.engines.vllm.worker as worker_module
from harness.engines.contract import GenerationRequest
from harness.engines.vllm.counters import CounterFile
from harness.engines.vllm.score_check import ScoreWatch, checked_scores
from harness.engines.vllm.settings import EvictionSettings
from policies import Phase, View, build_policy, registry
from policies.paged_eviction import PagedEviction
from tests.engines.vllm.live import live_engine, runner_of
from tests.tiny_llama import random_prompt

HEADS, TOKENS = 2, 5


class Faulty(PagedEviction):
    """Gives what `answer` says."""

    name = "faulty"
    answer = None

    def score(self, view):
        return type(self).answer(super().score(view))


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "faulty", f"{__name__}:Faulty")

    def answering(answer):
        monkeypatch.setattr(Faulty, "answer", staticmethod(answer))
        return EvictionSettings("faulty", budget=64)

    return answering


def view():
    keys = torch.randn(1, HEADS, TOKENS, 4)
    positions = torch.arange(TOKENS).view(1, 1, TOKENS)
    return View(3, 4, Phase.DECODE, positions, torch.tensor([TOKENS]), 32, keys=keys, values=keys)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda scores: scores / 0 / [], "policy faulty failed in layer 3: TypeError"),
        (lambda scores: scores[..., :-1], r"policy faulty gave scores of torch.float32 \[1, 2, 4\] in layer 3"),
        (lambda scores: scores[0], r"return float32 \[1, 2, 5\] \(requests, KV heads, tokens\)"),
        (lambda scores: scores > 0, "scores of torch.bool"),
        (lambda scores: None, "scores of <class 'NoneType'>"),
    ],
)
def test_a_wrong_policy_is_named(faulty, answer, message):
    policy = faulty(answer).build_policy(32)
    with pytest.raises(RuntimeError, match=message):
        checked_scores(policy, view(), HEADS)


def test_right_scores_pass(faulty):
    policy = faulty(lambda scores: scores).build_policy(32)
    given = view()
    expected = build_policy("paged_eviction", budget=64, block_size=32).score(given).mean(dim=1, keepdim=True)
    assert torch.equal(checked_scores(policy, given, HEADS), expected)


def test_the_watch_learns_late_but_surely_and_reports_once():
    finite, watch = torch.ones((), dtype=torch.bool), ScoreWatch()
    assert not any(watch.look(finite) for _ in range(3 * ScoreWatch.EVERY))
    finite.fill_(False)
    reports = [watch.look(finite) for _ in range(10 * ScoreWatch.EVERY)]
    assert sum(reports) == 1
    assert reports.index(True) < 2 * ScoreWatch.EVERY


def test_an_engine_tells_its_metrics_of_scores_that_are_not_finite(shape, faulty, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(worker_module.logger, "error", lambda message, *words: said.append(message % words))
    settings = faulty(lambda scores: scores * math.nan)
    counters = tmp_path / "counters"
    CounterFile(str(counters))
    request = GenerationRequest("r", random_prompt(200, 1), 3 * ScoreWatch.EVERY, ignore_eos=True)
    settings = EvictionSettings(settings.policy, settings.budget, counters=str(counters))
    with live_engine(shape, settings) as engine:
        (result,) = engine.generate([request])
        assert runner_of(engine.llm_engine).eviction_policy.name == "faulty"
        with pytest.raises(RuntimeError, match="policy faulty gave scores that are not finite"):
            engine.stats()
    assert len(result.token_ids) == request.max_new_tokens, "a server goes on"
    assert CounterFile(str(counters)).read().bad_scores == 1
    assert said == ["policy faulty gave scores that are not finite; its choices are arbitrary"]
