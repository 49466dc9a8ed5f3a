"""`python -m tests.engines.vllm.soak`: random requests, budgets, pools, arrivals and aborts, on every policy.

`--policies ada_kv corm` soaks only these.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    from harness.engines.vllm.environment import prepare_environment

    prepare_environment(in_process=True)

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import VllmEngine, sampling_params
from harness.engines.vllm.scheduler import peak_resident_tokens
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings
from policies.registry import policy_class
from tests.engines.vllm.live import (
    assert_blocks_match_lengths,
    assert_pages_have_one_owner,
    live_engine,
    runner_of,
    scheduler_of,
)
from tests.policy_names import EQUAL, SENTENCE_ENDS
from tests.tiny_llama import random_prompt, save_tiny_llama

BLOCK = 32
MAX_MODEL_LEN = 512
SMALL = {"lagkv": {"lag": 24}, "cascading": {"protect_first": 4}, "snapkv": {"window": 16}, "chunkkv": {"window": 16}}
RAGGED = {
    "ada_kv": {"window": 16},
    "corm": {"window": 8, "protect_last": 24},
    "kv_compress": {"protect_last": 16},
    "mix_attention": {"full_every": 3, "share": 2},
    "pyramid_kv": {},
}
READING = {
    "quest": {"dense_layers": 1},
    "sentencekv": {"ends": SENTENCE_ENDS, "factor": 1.5, "window": 16},
}
CHUNKED = {"cascading", "paged_eviction", "streaming_llm", "random", "inverse_key_l2", "keydiff", "h2o", "tova"}


@dataclass(frozen=True)
class Arrival:
    """A request, the step in which it comes, and the step after which its client goes away (None: it waits)."""

    request: GenerationRequest
    step: int
    abort_step: int | None


@dataclass
class SoakReport:
    """Totals over all rounds."""

    counts: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{name}={number}" for name, number in self.counts.items())


def random_settings(rng: random.Random, name: str) -> EvictionSettings:
    """Settings of one round."""
    options = dict((SMALL | RAGGED | READING).get(name, {}))
    if name in CHUNKED and rng.random() < 0.4:
        options |= {"prefill": "chunked", "prefill_chunk": rng.choice([32, 64, 96])}
    budget = (
        BLOCK * rng.choice([3, 4, 8] if name == "quest" else [2, 3, 4, 8]) if policy_class(name).takes_budget else None
    )
    return EvictionSettings(name, budget, options, reserve=rng.random() < 0.3)


def random_shape(rng: random.Random, model: Path) -> EngineShape:
    """A pool that just holds the longest request, or up to three times as much."""
    return EngineShape(
        model=str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        kv_cache_gib=0.05,
        num_kv_blocks=MAX_MODEL_LEN // BLOCK + 1 + rng.randint(0, 32),
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=rng.choice([128, 256, 512]),
    )


def random_arrivals(rng: random.Random, num_requests: int) -> list[Arrival]:
    """Requests with unlike lengths; about one in ten is aborted."""
    arrivals = []
    for index in range(num_requests):
        num_prompt, step = rng.randint(1, 380), rng.randint(0, num_requests * 4)
        request = GenerationRequest(
            f"r{index}", random_prompt(num_prompt, rng.randint(0, 10**6)), rng.randint(1, 90), (2,),
            ignore_eos=rng.random() < 0.5,
        )  # fmt: skip
        arrivals.append(Arrival(request, step, step + rng.randint(1, 60) if rng.random() < 0.1 else None))
    return sorted(arrivals, key=lambda arrival: arrival.step)


def serve(engine: VllmEngine, arrivals: list[Arrival]) -> tuple[dict[str, list[int]], dict[str, dict], set[str]]:
    """Texts and eviction records of what finished, and the ids of what was aborted; accounting checked every step."""
    llm = engine.llm_engine
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    policy = runner.eviction_policy
    waiting, step = list(arrivals), 0
    texts, records, aborted = {}, {}, set()
    while waiting or llm.has_unfinished_requests():
        while waiting and waiting[0].step <= step:
            request = waiting.pop(0).request
            llm.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_token_ids}, sampling_params(request)
            )
        for arrival in arrivals:
            name = arrival.request.request_id
            if arrival.abort_step == step and name not in texts:
                llm.abort_request([name])
                aborted.add(name)
        for output in llm.step() if llm.has_unfinished_requests() else ():
            if output.finished and output.request_id not in aborted:
                assert output.request_id not in texts, "a request finished twice"
                texts[output.request_id] = list(output.outputs[0].token_ids)
                records[output.request_id] = output.kv_transfer_params[CONFIG_KEY]
        assert_blocks_match_lengths(scheduler, runner, policy)
        if policy.by_page:
            assert_pages_have_one_owner(runner, scheduler)
        step += 1
        assert step < 100_000, "the engine makes no progress"
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
    return texts, records, aborted


def soak_round(seed: int, name: str, model: Path, num_requests: int, report: SoakReport) -> None:
    """One engine, one policy; every answer is compared with that of the same request alone in the same engine."""
    rng = random.Random(seed)
    settings, arrivals = random_settings(rng, name), random_arrivals(rng, num_requests)
    with live_engine(random_shape(rng, model), settings) as engine:
        texts, records, aborted = serve(engine, arrivals)
        assert set(texts) | aborted == {arrival.request.request_id for arrival in arrivals}, "a request was lost"
        alone = {}
        for arrival in arrivals:
            if arrival.request.request_id in texts:
                alone |= serve(engine, [Arrival(arrival.request, 0, None)])[0]
        for arrival in arrivals:
            if arrival.request.request_id in texts:
                check_peak(
                    runner_of(engine.llm_engine).eviction_policy, arrival.request, records[arrival.request.request_id]
                )
        stats = engine.stats()
    undisturbed = [name for name in texts if not records[name]["num_preemptions"]]
    report.counts.update(
        rounds=1,
        requests=len(arrivals),
        finished=len(texts),
        aborted=len(aborted),
        evictions=stats.num_evictions,
        preemptions=stats.num_preemptions,
        compared=len(undisturbed),
        differing=sum(texts[name] != alone[name] for name in undisturbed),
        leaks=0,
    )


def check_peak(policy, request: GenerationRequest, record: dict) -> None:
    """Resident tokens never exceeded the plan. A preempted request comes back with its output as part of the prompt."""
    num_prompt = len(request.prompt_token_ids)
    total = num_prompt + request.max_new_tokens
    longest_prompt = total if record["num_preemptions"] else num_prompt
    bounds = [peak_resident_tokens(policy, prompt, prompt, total) for prompt in (num_prompt, longest_prompt)]
    assert record["peak_resident_tokens"] <= max(bounds)


def main() -> None:
    """Soak for a while and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=60, help="requests a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=[*sorted(EQUAL), *sorted(RAGGED), *READING])
    arguments = parser.parse_args()
    end, report, seed = time.monotonic() + arguments.minutes * 60, SoakReport(), arguments.seed
    names = arguments.policies
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder) / "tiny")
        while time.monotonic() < end:
            soak_round(seed, names[seed % len(names)], model, arguments.requests, report)
            seed += 1
            print(f"{names[(seed - 1) % len(names)]}: {report}", flush=True)
    assert report.counts["differing"] <= 0.005 * report.counts["compared"], "answers depend on the neighbours"


if __name__ == "__main__":
    main()
