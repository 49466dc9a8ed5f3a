"""The configuration: its schema, and reading what Hydra composed on top of it.

Hydra composes `conf/` on top of these dataclasses, so a wrong key or type is refused by name. They are not frozen,
because OmegaConf would then refuse every override; treat them as read-only after `harness.config_checks.to_dataclass`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from harness.config_help import register_help
from harness.config_keys import refuse_unknown_keys
from harness.errors import UserError

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
ENGINES_WITHOUT_POOL = ("hf", "kvpress")
Schema = TypeVar("Schema")


@dataclass
class ModelConfig:
    """A model and the geometry of its KV cache.

    Attributes:
        path: hub id or local folder; None for the weights embedded in a package.
        revision: hub revision, None for the newest.
        chat_template: None for the tokenizer's own, else one of its templates by name, a Jinja file, or "none".
        template_arguments: further variables of the chat template, such as `enable_thinking`.
        max_model_len: tokens of prompt and answer together.
        weights_gib: size of the weights in `dtype`.
    """

    name: str = MISSING
    path: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
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
        budget: tokens that stay resident per layer and KV head, or the share of each prompt, as 0.25 or "25%"; None for
            the full cache. An int or a float after `to_dataclass`.
        options: the policy's own fields.
    """

    name: str = MISSING
    budget: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class BenchmarkConfig:
    """Which rows, and how prompts are cut. `harness.benchmarks.longbench` gives the keys their meaning.

    Attributes:
        tasks: a list of names, or one name; a list after `to_dataclass`.
    """

    name: str = MISSING
    source: str = MISSING
    path: str | None = None
    revision: str | None = None
    tasks: Any = None
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
        max_num_seqs: requests that run at once; None is replaced by 16 on CPU, and on a GPU by as many as can fill its
            KV pool (`harness.pool`).
        max_num_batched_tokens: tokens one step may process.
        num_kv_blocks: size of the KV pool in blocks; None to let `kv_cache_gib` decide.
        kv_cache_gib: size of the KV pool; None on a GPU means what vLLM finds free.
        enforce_eager: no compilation and no CUDA graphs; None is replaced by True on CPU and False on a GPU.
        async_scheduling: schedule a step while the one before runs (on a GPU); None for where the policy allows it.
        reserve: admit a request only if the pool holds the peak of every admitted one, so that none is preempted.
        in_process: run the engine in this process, not in one of its own; None is replaced by True on CPU, where it
            starts quicker, and False on GPU, where its memory is surely free again after it.
        tensor_parallel_size: GPUs that share the model (on CPU: processes).
        distributed_executor_backend: who starts the workers: "mp" (this machine) or "ray" (a Ray cluster, for a model
            that outgrows one machine); None lets vLLM choose.
    """

    name: str = MISSING
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
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
        record_retention: write down which prompt positions each layer kept of every sample (engine=vllm and hf).
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
    register_help()
    ConfigStore.instance().store(name="harness_schema", node=HarnessConfig)


def read_composed(config: DictConfig, schema: type[Schema]) -> Schema:
    """A composed configuration as an object of its schema, its values complete but unchecked.

    Raises:
        UserError: a key that the schema does not know, or one without a value.
    """
    refuse_unknown_keys(config, schema)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"no value for {', '.join(missing)}. Give each as key=value.")
    composed = OmegaConf.to_object(config)
    if not isinstance(composed, schema):
        raise TypeError(f"the configuration was composed without {schema.__name__}: {type(composed).__name__}")
    return composed


def as_plain(config: HarnessConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values."""
    return asdict(config)
