"""Runs every policy while vLLM itself watches for waits of the host for the device; prints JSON, policy -> outcome.

A process of its own, because vLLM reads VLLM_GPU_SYNC_CHECK=error when it is imported. From then on any step that waits
raises. Reads {"shape": ..., "requests": [...], "policies": {name: options}} from standard input.
"""

import json
import sys
from typing import Any

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import VllmEngine
from harness.engines.vllm.settings import EvictionSettings

BUDGET = 64


def outcome_of(shape: EngineShape, name: str, options: dict[str, Any], requests: list[GenerationRequest]) -> dict:
    """What came out, or the error."""
    settings = EvictionSettings(name, budget=None if name == "full" else BUDGET, options=options)
    try:
        engine = VllmEngine(shape, settings)
        try:
            lengths = [len(result.token_ids) for result in engine.generate(requests)]
            stats = engine.stats()
        finally:
            engine.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": None,
        "lengths": lengths,
        "evictions": stats.num_evictions,
        "lost_blocks": stats.num_blocks - 1 - stats.free_blocks_at_end,
    }


def main() -> None:
    """One engine after the other."""
    job = json.load(sys.stdin)
    shape = EngineShape(**job["shape"])
    requests = [GenerationRequest(**request) for request in job["requests"]]
    outcomes = {name: outcome_of(shape, name, options, requests) for name, options in job["policies"].items()}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
