"""The worker as a subprocess: started in the peer's environment, asked line by line."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError

ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-kvpress"
INTERPRETER = ENVIRONMENT / "bin" / "python"
WORKER = Path(__file__).with_name("worker.py")
NUM_TAIL_LINES = 15


def check_environment(interpreter: Path = INTERPRETER) -> None:
    """Make sure that the peer's environment was made.

    Raises:
        UserError: it was not.
    """
    if not interpreter.exists():
        raise UserError(
            f"engine=kvpress runs in an environment of its own, and {interpreter} does not exist. "
            "Run `make setup-kvpress`."
        )


class WorkerProcess:
    """A running worker, `harness.engines.kvpress.worker` or a script that speaks its protocol.

    Attributes:
        hello: its first message.
    """

    def __init__(self, arguments: Sequence[str], interpreter: Path = INTERPRETER, worker: Path = WORKER) -> None:
        """Start it and wait until its model is loaded.

        Args:
            arguments: command line of the worker.
            interpreter: Python of the peer's environment.
            worker: the script.

        Raises:
            UserError: the environment is missing, the worker refuses its arguments or dies.
        """
        check_environment(interpreter)
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            # -I: neither the harness nor what this process has on PYTHONPATH is visible to the worker
            [str(interpreter), "-I", str(worker), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
        )
        try:
            self.hello = self._read("while it started")
            if "error" in self.hello:
                raise UserError(self.hello["error"])
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            UserError: the worker died; the message ends with what it said last.
        """
        with contextlib.suppress(BrokenPipeError):  # the reply that does not come tells it better
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read(f"at {request['request_id']}")

    def close(self) -> None:
        """End the worker, which has nothing to save."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._stderr.close()

    def _read(self, when: str) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise UserError(f"the kvpress worker died {when}, exit code {self._process.wait()}:\n{self._tail()}")
        return json.loads(line)

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().splitlines()[-NUM_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (it said nothing)"
