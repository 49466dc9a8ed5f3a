"""`python -m tests.serve.shutdown`: how soon clients hear of the end of a server, stock and with the plugin.

16 streams of the embedded model, of which half wait for their turn. Once eight have begun, the server gets SIGTERM, or
its engine core SIGKILL. A client hangs if it hears nothing more until it gives up, after 20 s without a token.
`--drain SECONDS` passes that as vLLM's own `--shutdown-timeout`. Servers take turns.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.models import prepare_embedded_model
from tests.serve.servers import Server, running_server, stream
from tests.tiny_llama import random_prompt

CLIENTS, AT_ONCE, NEW, PATIENCE = 16, 8, 800, 20
EVICTING = {"kv_eviction": {"policy": "paged_eviction", "budget": 128}}


def end_under_load(server: Server, victim: str) -> str:
    """What became of the clients, and when the server was gone, in words; seconds count from the signal."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        start = time.monotonic()
        streams = [
            pool.submit(stream, server.url, random_prompt(200, index), NEW, PATIENCE, begun.release)
            for index in range(CLIENTS)
        ]
        assert all(begun.acquire(timeout=60) for _ in range(AT_ONCE))
        pid, number = (
            (server.process.pid, signal.SIGTERM) if victim == "server" else (server.engine_core().pid, signal.SIGKILL)
        )
        ended = time.monotonic() - start
        os.kill(pid, number)
        results = [each.result() for each in streams]
    server.process.wait(timeout=60)
    gone = time.monotonic() - start - ended
    waits = [seconds - ended for _, seconds, _ in results]
    errors = [error for *_, error in results]
    hung = sum("timed out" in (error or "") for error in errors)
    heard = [wait for wait, error in zip(waits, errors, strict=True) if "timed out" not in (error or "")]
    when = f"{min(heard):.1f} to {max(heard):.1f} s" if heard else "-"
    return (
        f"{hung} of {CLIENTS} hung, {errors.count(None)} got all of their answer, the {len(heard)} that did not hang "
        f"knew after {when}; server gone after {gone:.1f} s"
    )


def main() -> None:
    """Print one line a round, server and way to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="+", default=["stock", "ours"])
    parser.add_argument("--victims", nargs="+", default=["server", "engine core"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--drain", type=int, default=0)
    arguments = parser.parse_args()
    extra = ["--max-num-seqs", str(AT_ONCE), "--shutdown-timeout", str(arguments.drain)]
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_embedded_model()  # a tiny one would have said all before its clients have read half of it
        for _ in range(arguments.rounds):
            for victim in arguments.victims:
                for name in arguments.servers:
                    config: dict[str, Any] | None = None if name == "stock" else EVICTING
                    own = Path(tempfile.mkdtemp(dir=folder))
                    with running_server(model, config, own, extra) as server:
                        outcome = end_under_load(server, victim)
                    left = sorted(path.name for path in own.iterdir() if path.name != "server.log")
                    print(f"{name}, {victim} ends: {outcome}; files left: {left or 'none'}", flush=True)


if __name__ == "__main__":
    main()
