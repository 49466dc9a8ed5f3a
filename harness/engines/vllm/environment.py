"""Process environment that vLLM reads at import time."""

import os

from harness.hardware import inference_device, num_cores

DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # with bound threads a busy neighbour makes a step 30 times slower
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment(*, in_process: bool, num_workers: int = 1) -> None:
    """Set what the plugin needs; must run before vLLM is imported.

    On CPU an engine core of its own keeps a core busy while it waits for its workers, so their threads get the others,
    as with threads that vLLM binds. With as many threads as cores a step took 50 ms or 130, by chance.

    Args:
        in_process: run the engine core in this process instead of one of its own.
        num_workers: processes that share the machine's cores.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if not in_process and inference_device() == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (num_cores() - 1) // num_workers)))
