"""The embedded model on real LongBench rows: the oracle again, and tasks of every kind."""

import pytest

from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.prompting import build_sample
from harness.engines.contract import GenerationRequest
from harness.engines.hf.generate import run_reference
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.settings import EvictionSettings
from harness.models import prepare_embedded_model
from harness.tokenizer import load_tokenizer
from tests.benchmarks.longbench.rows import needs_real_rows, real_rows
from tests.engines.vllm.live import run_live
from tests.engines.vllm.test_oracle import follows_reference
from tests.policy_names import EQUAL

BLOCK, CONTEXT = 32, 900
NEAR_TIE = 1e-3
ONE_OF_EACH_KIND = ("qasper", "hotpotqa", "gov_report", "trec", "passage_retrieval_en", "lcc", "dureader")
REST = [name for name in EQUAL if name not in ("paged_eviction", "full")]

pytestmark = [pytest.mark.slow, needs_real_rows]


@pytest.fixture(scope="module")
def folder():
    return str(prepare_embedded_model())


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder, None)[0]


@pytest.fixture(scope="module")
def shape(folder):
    return EngineShape(
        model=folder, dtype="float32", max_model_len=CONTEXT + 64, block_size=BLOCK, kv_cache_gib=0.75,
        max_num_batched_tokens=2048,
    )  # fmt: skip


def requests_of(task, tokenizer, limit, num_new_tokens=None):
    """Real rows as the harness asks them, cut in the middle to the small context."""
    for row in real_rows(task, limit):
        sample = build_sample(row, tokenizer, CONTEXT, (tokenizer.eos_token_id,))
        yield GenerationRequest(
            sample.sample_id, sample.prompt_token_ids, num_new_tokens or min(sample.max_new_tokens, 64),
            sample.stop_token_ids, sample.min_new_tokens,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["paged_eviction", *(pytest.param(name, marks=pytest.mark.parity) for name in REST)])
def test_two_real_rows_follow_the_reference(folder, shape, tokenizer, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    settings = EvictionSettings(name, budget=256)
    requests = [next(requests_of(task, tokenizer, 1, num_new_tokens=40)) for task in ("qasper", "hotpotqa")]
    requests = [
        GenerationRequest(r.request_id, r.prompt_token_ids, r.max_new_tokens, ignore_eos=True) for r in requests
    ]
    run = run_live(shape, settings, requests)
    assert all(len(request.prompt_token_ids) > 2 * 256 for request in requests)
    followed = [follows_reference(run, request, settings.build_policy(BLOCK), model, NEAR_TIE) for request in requests]
    assert any(followed), "near-ties are rare"


def test_keep_everything_follows_hugging_face_on_a_real_row(folder, shape, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    request = next(requests_of("qasper", tokenizer, 1, num_new_tokens=40))
    run = run_live(shape, EvictionSettings("full"), [request])
    policy = EvictionSettings("full").build_policy(BLOCK)
    trace = run_reference(
        model, policy, request.prompt_token_ids, request.max_new_tokens, stop_token_ids=request.stop_token_ids
    )
    assert run.results[request.request_id].token_ids == trace.token_ids


@pytest.mark.parametrize(
    ("tasks", "num_rows"),
    [(ONE_OF_EACH_KIND, 1), pytest.param(PUBLISHED, 2, marks=pytest.mark.parity)],
    ids=["one of each kind", "all"],
)
def test_real_rows_give_text(shape, tokenizer, tasks, num_rows):
    requests = [request for task in tasks for request in requests_of(task, tokenizer, num_rows)]
    run = run_live(shape, EvictionSettings("full"), requests)
    assert len(run.results) == len(requests) == num_rows * len(tasks)
    texts = {name: tokenizer.decode(result.token_ids) for name, result in run.results.items()}
    assert sum(not text.strip() for text in texts.values()) <= 2, texts
    degenerate = [name for name, result in run.results.items() if is_stuck(result.token_ids)]
    assert len(degenerate) <= len(texts) // 4, {name: texts[name] for name in degenerate}
    assert len(set(texts.values())) > len(texts) * 0.7, "answers follow their prompts"


def is_stuck(token_ids):
    """True for a text that says one thing over and over."""
    return len(token_ids) >= 32 and len(set(token_ids)) < len(token_ids) // 8
