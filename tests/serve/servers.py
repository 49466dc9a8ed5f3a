"""Starts the stock OpenAI server with nothing but `--additional-config`, and asks it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BLOCK = 32
START_SECONDS, END_SECONDS = 600, 90
NAME = "model"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without the path.
        log: what it has written.
    """

    url: str
    process: subprocess.Popen
    log: Path

    def metric(self, name: str) -> float:
        """A figure of the plugin."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        (value,) = re.findall(rf'^vllm_kv_eviction_{name}{{engine="0"}} (\S+)$', text, re.MULTILINE)
        return float(value)

    def engine_core(self) -> psutil.Process:
        """The process that holds scheduler and, on one device, worker."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()) + child.name())


def server_command(
    model: Path,
    additional_config: dict[str, Any] | None,
    *extra: str,
    dtype: str = "float32",
    block_size: int = BLOCK,
    eager: bool = True,
) -> list[str]:
    """`vllm serve` as vLLM's CPU build can start it: its `vllm` command looks for a distribution named vllm."""
    plugin = [] if additional_config is None else ["--additional-config", json.dumps(additional_config)]
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", NAME, "--host", "127.0.0.1", "--dtype", dtype, "--block-size", str(block_size)),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "100000000", *(["--enforce-eager"] * eager)),
        *(*plugin, *extra),
    ]  # fmt: skip


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(
    model: Path, additional_config: dict[str, Any] | None, folder: Path, extra: Sequence[str] = (), **device: Any
) -> Iterator[Server]:
    """A server, stock without `additional_config`, whose log and temporary files are in `folder`.

    `device`: see `server_command`.
    """
    port, log = free_port(), folder / "server.log"
    command = server_command(model, additional_config, "--port", str(port), *extra, **device)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT | {"TMPDIR": str(folder)}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """Politely, then not."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    for left in family:
        if left.is_running():
            left.kill()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise TimeoutError(f"the server did not answer within {START_SECONDS} s: {server.log.read_text()[-3000:]}")


def stream(
    url: str, prompt: list[int], num_tokens: int, patience: float = 120, on_first: Callable[[], Any] = bool
) -> tuple[list[str], float, str | None]:
    """Pieces of a streamed completion, the seconds until it ended, and the error that ended it (None: it is whole).

    `patience`: seconds without a token after which the client gives up; `on_first` is called with the first piece.
    """
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, pieces, error, done = time.monotonic(), [], None, False
    try:
        with urllib.request.urlopen(request, timeout=patience) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                done = done or data == "[DONE]"
                if data and not done:
                    event = json.loads(data)
                    if "error" in event:
                        error = event["error"]["message"]
                    else:
                        pieces.append(event["choices"][0]["text"])
                        if len(pieces) == 1:
                            on_first()
    except (OSError, ValueError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    if error is None and not (done and len(pieces) >= 1):
        error = "the stream ended early"
    return pieces, time.monotonic() - start, error
