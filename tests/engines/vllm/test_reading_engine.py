"""Reading less than is kept, inside a real engine: the pages, logits and texts of the reference."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from harness.engines.contract import GenerationRequest
from harness.engines.hf.generate import run_reference
from harness.engines.vllm.settings import EvictionSettings
from harness.engines.vllm.slices import TRANSIENT_BYTES
from tests.engines.vllm.live import live_engine, record_decisions, record_logits, run_live, runner_of
from tests.policy_names import READING_CASES
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

BLOCK, BUDGET, NUM_NEW_TOKENS = 32, 128, 45
LENGTHS = (20, 127, 128, 200, 333, 500)
REQUESTS = [
    GenerationRequest(f"r{index}", random_prompt(length, seed=index), NUM_NEW_TOKENS - index, ignore_eos=True)
    for index, length in enumerate(LENGTHS)
]
SAME_LOGITS = 1e-3


@pytest.fixture(scope="module")
def uneven_shape(shape, tmp_path_factory):
    """The engine of `shape` over a model whose heads attend in unlike ways; vLLM cuts prompts, and batches mix."""
    model = save_tiny_llama(tmp_path_factory.mktemp("models") / "uneven", uneven=True)
    return replace(shape, model=str(model), max_num_batched_tokens=160)


def record_reads(engine):
    """From now on collect the pages that each choosing layer reads in decode steps, by the caller's request id."""
    reads = defaultdict(list)
    reading, runner = runner_of(engine.llm_engine).reading, runner_of(engine.llm_engine)
    write = reading._write

    def write_and_look(places, numbers, chosen, lengths):
        for place, pages in zip(places.tolist(), chosen, strict=True):
            name = runner.input_batch.req_ids[place].rpartition("-")[0]
            reads[name].append([row.nonzero()[:, 0].tolist() for row in pages])
        write(places, numbers, chosen, lengths)

    reading._write = write_and_look
    return reads


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, id=str(case), marks=pytest.mark.parity if index % 2 else [])
        for index, case in enumerate(READING_CASES)
    ],
)
def test_pages_logits_and_texts_are_those_of_the_reference(uneven_shape, monkeypatch, name, options):
    monkeypatch.setitem(TRANSIENT_BYTES, "cpu", 1 << 16)  # so that a step chooses in several parts
    budget = BUDGET if name == "quest" else 2 * BUDGET
    settings = EvictionSettings(name, budget, options)
    with live_engine(uneven_shape, settings) as engine:
        decisions, logits, reads = record_decisions(engine), record_logits(engine), record_reads(engine)
        texts = {result.request_id: result.token_ids for result in engine.generate(REQUESTS)}
        stats = engine.stats()
    assert stats.free_blocks_at_end == stats.num_blocks - 1
    assert stats.kept is None
    policy, model = settings.build_policy(BLOCK), tiny_llama(uneven=True)
    read, parted = None, 0
    for request in REQUESTS:
        trace = run_reference(model, policy, request.prompt_token_ids, request.max_new_tokens, ignore_eos=True)
        read = trace.read if read is None else read + trace.read
        assert [one.kept for one in decisions.get(request.request_id, [])] == [one.kept for one in trace.decisions]
        choosing = range(policy.full_read_layers, 3)
        expected = [step[layer] for step in trace.reads for layer in choosing]
        if reads[request.request_id] != expected:
            parted += 1
            continue
        rows = torch.stack(logits[request.request_id][-request.max_new_tokens :])
        torch.testing.assert_close(rows, trace.logits, rtol=0, atol=SAME_LOGITS)
        assert texts[request.request_id] == trace.token_ids
    assert parted <= 1, "near-ties are rare"
    if not parted:
        assert stats.read == read
    shares = [
        of / out_of for rows in zip(read.read, read.resident, strict=True) for of, out_of in zip(*rows, strict=True)
    ]
    assert min(shares) < 0.8
    assert max(shares[: 2 * policy.full_read_layers], default=1) == 1


def test_a_budget_that_covers_all_answers_as_the_full_cache(uneven_shape):
    full = run_live(uneven_shape, EvictionSettings("full"), REQUESTS)
    quest = run_live(uneven_shape, EvictionSettings("quest", 18 * BLOCK, {"dense_layers": 0}), REQUESTS)
    assert quest.texts() == full.texts()
    assert quest.stats.read.read == quest.stats.read.resident
    assert quest.stats.peak_blocks == full.stats.peak_blocks
    assert quest.stats.num_evictions == 0
