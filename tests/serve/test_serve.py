"""The stock OpenAI server with nothing but `--additional-config`, asked by the `openai` client."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tiny_llama import random_prompt, save_tiny_llama

pytest.importorskip("vllm", reason="needs vLLM (make setup)")
openai = pytest.importorskip("openai", reason="needs the openai client (make setup)")

BUDGET, BLOCK = 64, 32
START_SECONDS = 240
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive", "VLLM_NO_USAGE_STATS": "1"}

pytestmark = pytest.mark.slow


def server_command(model, *extra, policy="paged_eviction"):
    """`vllm serve` as vLLM's CPU build can start it: its `vllm` command looks for a distribution named vllm."""
    settings = {"kv_eviction": {"policy": policy, "budget": BUDGET}}
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--additional-config", json.dumps(settings), "--served-model-name", "tiny", "--host", "127.0.0.1"),
        *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "1024", "--enforce-eager"),
        *("--kv-cache-memory-bytes", "50000000", *extra),
    ]  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Base URL of a running server."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            server_command(model, "--port", str(port)), stdout=output, stderr=output, env=os.environ | ENVIRONMENT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_healthy(url, process, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not answer within {START_SECONDS} s: {log.read_text()[-3000:]}")


def metric(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        (value,) = re.findall(rf'^vllm_kv_eviction_{name}{{engine="0"}} (\S+)$', response.read().decode(), re.MULTILINE)
    return float(value)


def complete(client, index, num_tokens=90):
    """Text of a streamed completion, and the number of pieces it came in."""
    pieces = client.completions.create(
        model="tiny", prompt=random_prompt(150 + index, index), max_tokens=num_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    texts = [piece.choices[0].text for piece in pieces]
    return "".join(texts), len(texts)


def test_eight_streaming_clients_get_what_one_alone_gets_and_metrics_count(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    alone = [complete(client, index) for index in range(8)]
    before = metric(server, "evictions_total")
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(lambda index: complete(client, index), range(8)))
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert all(pieces > 10 for _, pieces in together), "answers are streamed"
    # 150 to 157 prompt tokens are cut to 64, and 90 new tokens fill two more blocks beyond the budget.
    assert metric(server, "evictions_total") - before == 8 * 3
    assert metric(server, "evicted_tokens_total") > 0
    assert metric(server, "resident_blocks") == 0


def test_a_client_that_disconnects_leaves_no_block_behind(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    stream = client.completions.create(
        model="tiny", prompt=random_prompt(200, 1), max_tokens=800, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        complete(client, 3, num_tokens=2)  # metrics move with steps
        if metric(server, "resident_blocks") == 0:
            return
    pytest.fail("blocks of an aborted request were not given back")


def test_an_unsupported_setting_is_refused_by_name(model):
    """`tests/engines/vllm/test_refusals.py` has the others."""
    command, environment = server_command(model, "--enable-prefix-caching"), os.environ | ENVIRONMENT
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode != 0
    assert "prefix caching is on" in result.stdout + result.stderr
