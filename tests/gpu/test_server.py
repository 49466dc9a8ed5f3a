"""A server in bfloat16 with graphs on a CUDA device, 24 clients at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.servers import running_server, stream
from tests.tiny_llama import random_prompt, save_tiny_llama

pytestmark = pytest.mark.gpu

CLIENTS, NEW = 24, 64
GPU = {"dtype": "bfloat16", "block_size": 16, "eager": False}


@pytest.mark.parametrize("name", ["paged_eviction", "h2o"])
def test_server_answers_24_clients(tmp_path, name, record_property):
    model = save_tiny_llama(tmp_path / "tiny")
    with running_server(model, {"kv_eviction": {"policy": name, "budget": 128}}, tmp_path, **GPU) as server:
        with ThreadPoolExecutor(CLIENTS) as clients:
            outcomes = list(
                clients.map(lambda index: stream(server.url, random_prompt(300 + index, index), NEW), range(CLIENTS))
            )
        assert [error for *_, error in outcomes] == [None] * CLIENTS
        assert server.metric("evictions_total") >= CLIENTS
        assert (server.metric("resident_blocks"), server.metric("bad_scores")) == (0, 0)
        record_property("note", f"{server.metric('evictions_total'):.0f} evictions")
