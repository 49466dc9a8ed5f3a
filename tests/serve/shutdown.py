"""`python -m tests.serve.shutdown`: how soon clients hear of the end of a server, stock and with the plugin.

16 streams, of which half wait for their turn; after 3 seconds the server gets SIGTERM, or its engine core SIGKILL.
Clients give up after 30 s without a token. `--drain SECONDS` passes that as vLLM's own `--shutdown-timeout`.
"""

import argparse
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serve.servers import Server, running_server, stream
from tests.tiny_llama import random_prompt, save_tiny_llama

CLIENTS, NEW, PATIENCE = 16, 700, 30
EVICTING = {"kv_eviction": {"policy": "paged_eviction", "budget": 128}}


def end_under_load(server: Server, victim: str) -> tuple[list[float], list[str | None], float]:
    """Seconds from the signal until each client's stream ended, their errors, and until the server was gone."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        start = time.monotonic()
        streams = [
            pool.submit(stream, server.url, random_prompt(200, index), NEW, PATIENCE) for index in range(CLIENTS)
        ]
        time.sleep(3)
        pid, number = (
            (server.process.pid, signal.SIGTERM) if victim == "server" else (server.engine_core().pid, signal.SIGKILL)
        )
        ended = time.monotonic() - start
        os.kill(pid, number)
        results = [each.result() for each in streams]
    server.process.wait(timeout=60)
    return (
        [seconds - ended for _, seconds, _ in results],
        [error for *_, error in results],
        time.monotonic() - start - ended,
    )


def main() -> None:
    """Print one line a server and way to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="+", default=["stock", "ours"])
    parser.add_argument("--victims", nargs="+", default=["server", "engine core"])
    parser.add_argument("--drain", type=int, default=0)
    arguments = parser.parse_args()
    extra = ["--max-num-seqs", "8", "--shutdown-timeout", str(arguments.drain)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder) / "tiny")
        for name in arguments.servers:
            config: dict[str, Any] | None = None if name == "stock" else EVICTING
            for victim in arguments.victims:
                own = Path(tempfile.mkdtemp(dir=folder))
                with running_server(model, config, own, extra) as server:
                    waits, errors, gone = end_under_load(server, victim)
                print(
                    f"{name}, {victim} ends: clients heard of it after {min(waits):.1f} to {max(waits):.1f} s, "
                    f"{sum(error is None for error in errors)} of {CLIENTS} think that all went well, server gone "
                    f"after {gone:.1f} s, left: {sorted(path.name for path in own.iterdir())}; e.g. {errors[0]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
