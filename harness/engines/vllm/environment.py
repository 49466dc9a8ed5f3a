"""Process environment that vLLM reads at import time."""

import os

CPU_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # with bound threads a busy neighbour makes a step 30 times slower
    "OMP_WAIT_POLICY": "passive",
}
DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment(*, in_process: bool) -> None:
    """Set what the plugin needs; must run before vLLM is imported.

    Args:
        in_process: run the engine core in this process instead of one of its own.
    """
    for name, value in {**CPU_DEFAULTS, **DEFAULTS}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
