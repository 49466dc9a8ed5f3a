"""Stock OpenAI servers of the embedded model with nothing but `--additional-config`, asked by clients.

Each server is asked in the order of this file; the last test of each ends it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.models import prepare_embedded_model
from harness.retention import read_retention
from tests.serve.servers import ENVIRONMENT, NAME, running_server, server_command, stream
from tests.tiny_llama import random_prompt, save_tiny_llama

pytest.importorskip("vllm", reason="needs vLLM (make setup)")
openai = pytest.importorskip("openai", reason="needs the openai client (make setup)")

BUDGET, CHUNK = 128, 64
NEW, DRAIN = 40, 300
LONG = 400

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return prepare_embedded_model()


@pytest.fixture(scope="module")
def paged(model, tmp_path_factory):
    """PagedEviction, as a user would have it."""
    folder = tmp_path_factory.mktemp("paged")
    settings = {"kv_eviction": {"policy": "paged_eviction", "budget": BUDGET}}
    with running_server(model, settings, folder, ["--shutdown-timeout", str(DRAIN)]) as server:
        yield server


@pytest.fixture(scope="module")
def ragged(model, tmp_path_factory):
    """Ada-KV, which writes down what it keeps."""
    folder = tmp_path_factory.mktemp("ragged")
    settings = {"policy": "ada_kv", "budget": BUDGET, "retention": str(folder)}
    with running_server(model, {"kv_eviction": settings}, folder) as server:
        yield server


@pytest.fixture
def h2o(model, tmp_path):
    """H2O on prompts read in chunks."""
    settings = {"policy": "h2o", "budget": BUDGET, "options": {"prefill": "chunked", "prefill_chunk": CHUNK}}
    with running_server(model, {"kv_eviction": settings}, tmp_path) as server:
        yield server


def complete(server, index, num_tokens=NEW, num_prompt=150):
    """Text of a streamed completion, and the number of pieces it came in."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pieces = client.completions.create(
        model=NAME, prompt=random_prompt(num_prompt + index, index), max_tokens=num_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    texts = [piece.choices[0].text for piece in pieces]
    return "".join(texts), len(texts)


def four_at_once_answer_as_one_alone(server, num_prompt=150):
    """Evictions that the four took."""
    alone = [complete(server, index, num_prompt=num_prompt) for index in range(4)]
    before = server.metric("evictions_total")
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda index: complete(server, index, num_prompt=num_prompt), range(4)))
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert all(pieces > 10 for _, pieces in together), "answers are streamed"
    assert server.metric("evicted_tokens_total") > 0
    assert server.metric("resident_blocks") == 0
    assert server.metric("bad_scores") == 0
    return server.metric("evictions_total") - before


def test_it_says_at_start_that_eviction_is_on(paged):
    (line,) = [line for line in paged.log.read_text().splitlines() if "KV eviction is on" in line]
    assert "policy=paged_eviction, budget=128 tokens, prefill=after, block_size=32" in line
    assert "admission: as stock vLLM (reserve=false); switched off: prefix caching" in line
    assert not list(paged.log.parent.glob("kv-eviction-counters-*")), "a kill would leave it behind"


def test_four_streaming_clients_get_what_one_alone_gets_and_metrics_count(paged):
    """150 to 153 prompt tokens are cut to 128, and 39 more tokens fill one block beyond the budget."""
    assert four_at_once_answer_as_one_alone(paged) == 4 * 2


def test_a_chat_client_that_names_no_length_is_answered(paged):
    """It might talk until the context is full, and goes away before."""
    client = openai.OpenAI(base_url=f"{paged.url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Say yes."}]
    pieces = client.chat.completions.create(model=NAME, messages=messages, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece, _ in zip(pieces, range(5), strict=False))
    pieces.close()
    assert text.strip()


def test_a_client_that_disconnects_leaves_no_block_behind(paged):
    client = openai.OpenAI(base_url=f"{paged.url}/v1", api_key="none")
    pieces = client.completions.create(
        model=NAME, prompt=random_prompt(200, 1), max_tokens=800, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(pieces))
    pieces.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        complete(paged, 3, num_tokens=2)  # metrics move with steps
        if paged.metric("resident_blocks") == 0:
            return
    pytest.fail("blocks of an aborted request were not given back")


@pytest.mark.parity
def test_vllms_own_load_test_runs_against_it(paged, model, tmp_path):
    """As harness/engines/vllm/README.md says, on few and short requests."""
    command = [
        *(sys.executable, "-m", "tests.serve.bench_serve", "--model", str(model), "--served-model-name", NAME),
        *("--base-url", paged.url, "--dataset-name", "random", "--random-input-len", "160", "--random-output-len", "8"),
        *("--num-prompts", "6", "--ignore-eos", "--save-result", "--result-dir", str(tmp_path)),
        *("--result-filename", "load.json"),
    ]  # fmt: skip
    complete(paged, 0)
    before = paged.metric("evictions_total")
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=os.environ | ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((tmp_path / "load.json").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (6, 6 * 8)
    assert figures["output_throughput"] > 0
    assert paged.metric("evictions_total") - before >= 6


def end_under_load(server, kill, num_tokens):
    """Outcomes of 12 streams when `kill` is called once all have begun, and the seconds that they took from then on."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as pool:
        streams = [
            pool.submit(stream, server.url, random_prompt(200, index), num_tokens, DRAIN, begun.release)
            for index in range(12)
        ]
        assert all(begun.acquire(timeout=DRAIN) for _ in streams)
        start = time.monotonic()
        kill()
        outcomes = [each.result() for each in streams]
    return outcomes, time.monotonic() - start


def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(paged):
    outcomes, seconds = end_under_load(paged, lambda: paged.process.send_signal(signal.SIGTERM), 60)
    assert [error for *_, error in outcomes] == [None] * 12
    assert seconds < DRAIN
    assert paged.process.wait(timeout=120) is not None


def test_unequal_counts_are_served_and_written_down(ragged):
    assert four_at_once_answer_as_one_alone(ragged, LONG) == 4, "one eviction each, from the prompt"
    kept = [record for record in read_retention(ragged.log.parent) if record.phase == "prefill_end"]
    assert sorted(record.num_prompt_tokens for record in kept) == sorted([LONG, LONG + 1, LONG + 2, LONG + 3] * 2)
    for record in kept:
        counts = [[len(head) for head in heads] for heads in record.layers]
        assert sum(map(sum, counts)) == BUDGET * sum(map(len, counts))
        assert any(len(set(heads)) > 1 for heads in counts)
        assert all(head[-1] == record.num_prompt_tokens - 1 for heads in record.layers for head in heads)


def test_clients_hear_at_once_that_the_engine_core_died(ragged):
    outcomes, seconds = end_under_load(ragged, ragged.engine_core().kill, 700)
    assert all(error is not None for *_, error in outcomes)
    assert seconds < 60
    assert not list(ragged.log.parent.glob("kv-eviction-counters-*"))


@pytest.mark.parity
def test_prompts_read_in_chunks_are_answered_alike_alone_and_together(h2o):
    """150 to 153 tokens in chunks of 64: one eviction after the last, and one before each of 38 tokens."""
    assert four_at_once_answer_as_one_alone(h2o) == 4 * (1 + 38)


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    """`tests/engines/vllm/test_settings.py` and `test_refusals.py` have the other refusals."""
    model = save_tiny_llama(tmp_path / "tiny")
    command = server_command(model, {"kv-eviction": {"policy": "h2o", "budget": 64}})
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | ENVIRONMENT, check=False
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == 'error: additional_config has "kv-eviction", which nothing reads. Did you mean "kv_eviction"?'
    assert "Traceback" not in result.stderr
