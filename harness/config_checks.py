"""The checks of a configuration that need no model, no data and no GPU, and the defaults that the device decides."""

import sys
from dataclasses import fields, replace
from importlib.util import find_spec

from omegaconf import DictConfig

from harness.budget import FULL_CACHE_POLICY, check_budget, parse_budget, warn_of_idle_policy
from harness.config import (
    BYTES_OF_DTYPE,
    ENGINES_WITHOUT_POOL,
    EngineConfig,
    HarnessConfig,
    ModelConfig,
    PolicyConfig,
    TrackerConfig,
    read_composed,
)
from harness.errors import UserError
from harness.hardware import cuda_gpus, inference_device
from harness.pool import pool_tokens, sequences_that_fill

CPU_BLOCK_MULTIPLE = 32
GPU_BLOCK_MULTIPLE = 16
CPU_KV_CACHE_GIB = 4.0
CPU_MAX_NUM_SEQS = 16
KEYS_OF_ALL_ENGINES = ("name", "block_size")
EXECUTOR_BACKENDS = ("mp", "ray")
TRACKERS = ("none", "wandb")
TRACKER_MODES = ("online", "offline")


def to_dataclass(config: DictConfig) -> HarnessConfig:
    """Turn a composed configuration into checked plain dataclasses, device defaults filled in.

    Raises:
        UserError: a key without a value, or values that do not fit together.
    """
    harness = read_composed(config, HarnessConfig)
    if harness.model.dtype not in BYTES_OF_DTYPE:
        raise UserError(f"model.dtype={harness.model.dtype} is unknown. Use {', '.join(BYTES_OF_DTYPE)}.")
    harness.benchmark = replace(harness.benchmark, tasks=_task_names(harness.benchmark.tasks))
    _check_unused(harness.engine)
    harness.engine = _fill_engine(harness.engine, harness.model)
    harness.policy = _fill_policy(harness.policy)
    _check_engine(harness.engine)
    _check_executor(harness.engine)
    check_budget(harness.policy.name, harness.policy.budget, harness.engine.block_size)
    _check_tracker(harness.tracker)
    warn_of_idle_policy(harness.policy.name, harness.policy.budget, harness.model.max_model_len)
    return harness


def _task_names(tasks: object) -> list[str] | None:
    names = [tasks] if isinstance(tasks, str) else tasks
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    raise UserError(
        f"benchmark.tasks={tasks} is neither a name nor a list of names, as in benchmark.tasks=[qasper,trec]."
    )


def _check_unused(engine: EngineConfig) -> None:
    """Refuse settings of vLLM's engine where another one runs."""
    if engine.name not in ENGINES_WITHOUT_POOL:
        return
    for setting in fields(engine):
        value = getattr(engine, setting.name)
        if setting.name not in KEYS_OF_ALL_ENGINES and value != setting.default:
            raise UserError(f"engine.{setting.name}={value} has no effect with engine={engine.name}. Remove it.")


def _fill_engine(engine: EngineConfig, model: ModelConfig) -> EngineConfig:
    on_cpu = inference_device() == "cpu"
    block_size = engine.block_size or (CPU_BLOCK_MULTIPLE if on_cpu else GPU_BLOCK_MULTIPLE)
    if engine.name in ENGINES_WITHOUT_POOL:
        return replace(engine, block_size=block_size)
    kv_cache_gib = engine.kv_cache_gib
    if kv_cache_gib is None and engine.num_kv_blocks is None and on_cpu:
        kv_cache_gib = CPU_KV_CACHE_GIB
    max_num_seqs = engine.max_num_seqs
    if max_num_seqs is None:
        cards = [memory for _, memory in cuda_gpus()][: max(1, engine.tensor_parallel_size)]
        max_num_seqs = CPU_MAX_NUM_SEQS if on_cpu else sequences_that_fill(pool_tokens(model, cards))
    return replace(
        engine,
        block_size=block_size,
        kv_cache_gib=kv_cache_gib,
        max_num_seqs=max_num_seqs,
        enforce_eager=on_cpu if engine.enforce_eager is None else engine.enforce_eager,
        in_process=on_cpu if engine.in_process is None else engine.in_process,
    )


def _fill_policy(policy: PolicyConfig) -> PolicyConfig:
    try:
        policy = replace(policy, budget=parse_budget(policy.budget))
    except ValueError as error:
        raise UserError(str(error)) from None
    if policy.name != FULL_CACHE_POLICY or policy.budget is None:
        return policy
    print(f"warning: policy=full ignores policy.budget={policy.budget}.", file=sys.stderr)
    return replace(policy, budget=None)


def _check_engine(engine: EngineConfig) -> None:
    device = inference_device()
    multiple = CPU_BLOCK_MULTIPLE if device == "cpu" else GPU_BLOCK_MULTIPLE
    if engine.block_size is None or engine.block_size % multiple or engine.block_size <= 0:
        raise UserError(
            f"engine.block_size={engine.block_size} is not a positive multiple of {multiple}, "
            f"as vLLM needs on {device}. Use {multiple} or {2 * multiple}."
        )
    for key in ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_gib", "tensor_parallel_size"):
        value = getattr(engine, key)
        if value is not None and value <= 0:
            raise UserError(f"engine.{key}={value} is not positive. Use 1 or more.")
    if engine.num_kv_blocks is not None and engine.kv_cache_gib is not None:
        raise UserError(
            f"engine.num_kv_blocks={engine.num_kv_blocks} and engine.kv_cache_gib={engine.kv_cache_gib} both set the "
            "size of the KV pool. Give one of them."
        )
    on_this_machine = engine.distributed_executor_backend != "ray"
    if device == "cuda" and on_this_machine and engine.tensor_parallel_size > len(cuda_gpus()):
        raise UserError(
            f"engine.tensor_parallel_size={engine.tensor_parallel_size}, but only {len(cuda_gpus())} CUDA GPUs "
            "can be used here. Lower it, or spread the model over machines with "
            "engine.distributed_executor_backend=ray."
        )


def _check_executor(engine: EngineConfig) -> None:
    backend = engine.distributed_executor_backend
    if backend not in (None, *EXECUTOR_BACKENDS):
        raise UserError(
            f"engine.distributed_executor_backend={backend} is unknown. Use {' or '.join(EXECUTOR_BACKENDS)}, or null."
        )
    if backend == "ray" and find_spec("ray") is None:
        raise UserError("engine.distributed_executor_backend=ray needs the package ray. Install it on every machine.")


def _check_tracker(tracker: TrackerConfig) -> None:
    if tracker.name not in TRACKERS:
        raise UserError(f"tracker.name={tracker.name} is unknown. Use {' or '.join(TRACKERS)}.")
    if tracker.name == "wandb" and tracker.mode not in TRACKER_MODES:
        raise UserError(f"tracker.mode={tracker.mode} is unknown. Use {' or '.join(TRACKER_MODES)}.")
