"""`python -m tests.engines.vllm.ranks FILE < JOB`: engines on two tensor-parallel ranks, and what each rank kept.

A process of its own, whose workers are forked from it: so they are in the box (`box.py`) if it is, and no pool of
threads has been used before. `run_on_two_ranks` starts it.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    from harness.engines.vllm.environment import prepare_environment

    prepare_environment(in_process=True)

from vllm.platforms.cpu import CpuPlatform

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.box import Box, in_a_box
from tests.engines.vllm.live import LiveDecision, LiveRun, live_engine, record_decisions_of
from tests.engines.vllm.quick import old_objects_are_no_garbage

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2


@dataclass(frozen=True)
class Job:
    """One engine: its settings, and whether it is in the box."""

    settings: EvictionSettings
    boxed: bool


def run_on_two_ranks(
    shape: EngineShape, jobs: Sequence[Job], requests: Sequence[GenerationRequest], folder: Path
) -> dict[tuple[str, bool], LiveRun]:
    """Runs by policy and whether they were in the box; `kept` of their decisions goes over the heads of both ranks."""
    found = folder / "runs.pickle"
    result = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.ranks", str(found)],
        input=pickle.dumps((replace(shape, tensor_parallel_size=RANKS), jobs, requests)), capture_output=True,
        timeout=500, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()[-5000:]
    runs = pickle.loads(found.read_bytes())
    return {(job.settings.policy, job.boxed): run for job, run in zip(jobs, runs, strict=True)}


@contextmanager
def _forked_workers() -> Iterator[None]:
    """vLLM's CPU platform chooses to spawn workers, which would know of no box and read every module again."""
    stock = CpuPlatform.check_and_update_config

    def check(cls: type, config: Any) -> None:
        stock(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(check)):
        yield


def _record(worker: Any) -> str:
    worker.model_runner.recorded = record_decisions_of(worker.model_runner)
    return type(worker.model_runner).__name__


def _recorded(worker: Any) -> dict[str, list[LiveDecision]]:
    return worker.model_runner.recorded


def _run(shape: EngineShape, job: Job, requests: list[GenerationRequest]) -> LiveRun:
    box = in_a_box(Box(graphs=True)) if job.boxed else nullcontext()
    with box, _forked_workers(), live_engine(shape, job.settings) as engine:
        call = engine.llm_engine.collective_rpc
        assert {name.startswith("Boxed") for name in call(_record)} == {job.boxed}
        results = {result.request_id: result for result in engine.generate(requests)}
        ranks = call(_recorded)
        assert len(ranks) == RANKS
        return LiveRun(results, _joined(ranks, engine.policy.per_head), engine.stats())


def _joined(ranks: list[dict[str, list[LiveDecision]]], per_head: bool) -> dict[str, list[LiveDecision]]:
    """Decisions over the heads of all ranks; where heads share a choice, all ranks made the same one."""
    return {
        name: [_join([rank[name][index] for rank in ranks], per_head) for index in range(len(decisions))]
        for name, decisions in ranks[0].items()
    }


def _join(parts: list[LiveDecision], per_head: bool) -> LiveDecision:
    if per_head:
        layers = zip(*(part.kept for part in parts), strict=True)
        return replace(parts[0], kept=[list(chain.from_iterable(heads)) for heads in layers])
    assert all(part == parts[0] for part in parts)
    return parts[0]


def main() -> None:
    """Carry out the job on standard input and write its runs to the file named."""
    shape, jobs, requests = pickle.load(sys.stdin.buffer)
    with old_objects_are_no_garbage():
        runs = [_run(shape, job, requests) for job in jobs]
    Path(sys.argv[1]).write_bytes(pickle.dumps(runs))


if __name__ == "__main__":
    main()
