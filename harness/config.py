"""The configuration: its schema, and the checks that need no model, no data and no GPU.

Hydra composes `conf/` on top of these dataclasses, so a wrong key or type is refused by name. They are not frozen,
because OmegaConf would then refuse every override; treat them as read-only after `to_dataclass`.
"""

import sys
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from harness.budget import FULL_CACHE_POLICY, check_budget, warn_of_idle_policy
from harness.errors import UserError
from harness.hardware import cuda_gpus, inference_device

CPU_BLOCK_MULTIPLE = 32
GPU_BLOCK_MULTIPLE = 16
CPU_KV_CACHE_GIB = 4.0
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
ENGINES_WITHOUT_POOL = ("hf", "kvpress")
KEYS_OF_ALL_ENGINES = ("name", "block_size")
EXECUTOR_BACKENDS = ("mp", "ray")
TRACKERS = ("none", "wandb")
TRACKER_MODES = ("online", "offline")
Schema = TypeVar("Schema")


@dataclass
class ModelConfig:
    """A model and the geometry of its KV cache.

    Attributes:
        path: hub id or local folder; None for the weights embedded in a package.
        revision: hub revision, None for the newest.
        max_model_len: tokens of prompt and answer together.
        weights_gib: size of the weights in `dtype`.
    """

    name: str = MISSING
    path: str | None = None
    revision: str | None = None
    dtype: str = MISSING
    max_model_len: int = MISSING
    weights_gib: float = MISSING
    num_layers: int = MISSING
    num_query_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING


@dataclass
class PolicyConfig:
    """What to keep.

    Attributes:
        budget: tokens that stay resident per layer and KV head; None for the full cache.
        options: the policy's own fields.
    """

    name: str = MISSING
    budget: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class BenchmarkConfig:
    """Which rows, and how prompts are cut. `harness.benchmarks.longbench` gives the keys their meaning."""

    name: str = MISSING
    source: str = MISSING
    path: str | None = None
    revision: str | None = None
    tasks: list[str] | None = None
    limit: int | None = None
    sample: int | None = None
    lengths: list[int] | None = None
    depths: int | None = None
    haystack: str | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    on_bad_row: str = "fail"
    longbench_e: bool = False
    edit_similarity: str = "difflib"
    seed: int = 0


@dataclass
class EngineConfig:
    """How the engine runs; every key can change batch shapes and so, in the last bit, results.

    Attributes:
        block_size: tokens a KV block; None is replaced by the smallest that the device can do.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens one step may process.
        num_kv_blocks: size of the KV pool in blocks; None to let `kv_cache_gib` decide.
        kv_cache_gib: size of the KV pool; None on a GPU means what vLLM finds free.
        reserve: admit a request only if the pool holds the peak of every admitted one, so that none is preempted.
        in_process: run the engine in this process, not in one of its own; None is replaced by True on CPU, where it
            starts quicker, and False on GPU, where its memory is surely free again after it.
        tensor_parallel_size: GPUs that share the model (on CPU: processes).
        distributed_executor_backend: who starts the workers: "mp" (this machine) or "ray" (a Ray cluster, for a model
            that outgrows one machine); None lets vLLM choose.
    """

    name: str = MISSING
    block_size: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    enforce_eager: bool = True
    async_scheduling: bool = True
    reserve: bool = True
    in_process: bool | None = None
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    seed: int = 0


@dataclass
class TrackerConfig:
    """Where runs are reported beside the run folder.

    Attributes:
        name: "none" or "wandb"; the other keys are for "wandb", with the meaning they have there.
        mode: "online" or "offline".
        entity: account or team, None for the user's default.
        tags: beside policy, model and benchmark, which every run is tagged with.
    """

    name: str = MISSING
    mode: str | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class HarnessConfig:
    """One run.

    Attributes:
        overwrite: throw an existing run of this very configuration away and start anew.
        record_retention: write down which prompt positions each layer kept of every sample (vLLM engine only).
    """

    model: ModelConfig = MISSING
    policy: PolicyConfig = MISSING
    benchmark: BenchmarkConfig = MISSING
    engine: EngineConfig = MISSING
    tracker: TrackerConfig = MISSING
    results_dir: str = MISSING
    overwrite: bool = False
    record_retention: bool = False


def register_schema() -> None:
    """Make the schema known to Hydra as `harness_schema`."""
    ConfigStore.instance().store(name="harness_schema", node=HarnessConfig)


def read_composed(config: DictConfig, schema: type[Schema]) -> Schema:
    """A composed configuration as an object of its schema, its values complete but unchecked.

    Raises:
        UserError: a key without a value.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"no value for {', '.join(missing)}. Give each as key=value.")
    composed = OmegaConf.to_object(config)
    if not isinstance(composed, schema):
        raise TypeError(f"the configuration was composed without {schema.__name__}: {type(composed).__name__}")
    return composed


def to_dataclass(config: DictConfig) -> HarnessConfig:
    """Turn a composed configuration into checked plain dataclasses, device defaults filled in.

    Raises:
        UserError: a key without a value, or values that do not fit together.
    """
    harness = read_composed(config, HarnessConfig)
    if harness.model.dtype not in BYTES_OF_DTYPE:
        raise UserError(f"model.dtype={harness.model.dtype} is unknown. Use {', '.join(BYTES_OF_DTYPE)}.")
    _check_unused(harness.engine)
    harness.engine = _fill_engine(harness.engine)
    harness.policy = _fill_policy(harness.policy)
    _check_engine(harness.engine)
    _check_executor(harness.engine)
    check_budget(harness.policy.name, harness.policy.budget, harness.engine.block_size)
    _check_tracker(harness.tracker)
    warn_of_idle_policy(harness.policy.name, harness.policy.budget, harness.model.max_model_len)
    return harness


def as_plain(config: HarnessConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values."""
    return asdict(config)


def _check_unused(engine: EngineConfig) -> None:
    """Refuse settings of vLLM's engine where another one runs."""
    if engine.name not in ENGINES_WITHOUT_POOL:
        return
    for setting in fields(engine):
        value = getattr(engine, setting.name)
        if setting.name not in KEYS_OF_ALL_ENGINES and value != setting.default:
            raise UserError(f"engine.{setting.name}={value} has no effect with engine={engine.name}. Remove it.")


def _fill_engine(engine: EngineConfig) -> EngineConfig:
    on_cpu = inference_device() == "cpu"
    block_size = engine.block_size or (CPU_BLOCK_MULTIPLE if on_cpu else GPU_BLOCK_MULTIPLE)
    if engine.name in ENGINES_WITHOUT_POOL:
        return replace(engine, block_size=block_size)
    kv_cache_gib = engine.kv_cache_gib
    if kv_cache_gib is None and engine.num_kv_blocks is None and on_cpu:
        kv_cache_gib = CPU_KV_CACHE_GIB
    in_process = on_cpu if engine.in_process is None else engine.in_process
    return replace(engine, block_size=block_size, kv_cache_gib=kv_cache_gib, in_process=in_process)


def _fill_policy(policy: PolicyConfig) -> PolicyConfig:
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
    if device == "cuda" and engine.tensor_parallel_size > len(cuda_gpus()):
        raise UserError(
            f"engine.tensor_parallel_size={engine.tensor_parallel_size}, but only {len(cuda_gpus())} CUDA GPUs "
            "can be used here. Lower it."
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
