"""The plugin's own settings: plain data in vLLM's `additional_config`, readable in every process."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from policies import Policy, build_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "kv_eviction"
VLLM_VERSION = "0.32.0"


@dataclass(frozen=True)
class EvictionSettings:
    """What `additional_config={"kv_eviction": {...}}` may hold.

    Attributes:
        policy: name of a registered policy.
        budget: resident tokens per layer and KV head; None for a policy that never evicts.
        options: the policy's own options.
        reserve: admit a request only if the pool can hold the peak of every admitted one, so that none is ever
            preempted. False admits as stock vLLM does.
        trace: file to which the scheduler appends KV block usage a step; None for no trace.
        retention: run folder in which the positions kept are recorded for every request; None for no record.
        counters: file through which the scheduler publishes running totals (`/metrics`); None for none.
    """

    policy: str
    budget: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reserve: bool = True
    trace: str | None = None
    retention: str | None = None
    counters: str | None = None

    def build_policy(self, block_size: int) -> Policy:
        """The policy these settings name.

        Raises:
            ValueError: see `policies.build_policy`.
        """
        return build_policy(self.policy, budget=self.budget, block_size=block_size, options=self.options)


def read_settings(vllm_config: "VllmConfig") -> EvictionSettings:
    """The settings of this engine.

    Raises:
        ValueError: the plugin's classes are in use but `additional_config` has no usable "kv_eviction", or another
            setting of the engine is not supported.
    """
    settings = parse_settings((vllm_config.additional_config or {}).get(CONFIG_KEY))
    _refuse_unsupported(vllm_config)
    return settings


def parse_settings(data: object) -> EvictionSettings:
    """Check the value of "kv_eviction".

    Raises:
        ValueError: it is missing, no mapping, without a policy, or has an unknown key.
    """
    known = EvictionSettings.__dataclass_fields__
    if not isinstance(data, dict) or "policy" not in data:
        raise ValueError(
            f'additional_config["{CONFIG_KEY}"]={data!r} names no policy. '
            'Give a mapping such as {"policy": "paged_eviction", "budget": 512}.'
        )
    if unknown := ", ".join(sorted(set(data) - set(known))):
        raise ValueError(f'additional_config["{CONFIG_KEY}"] does not know {unknown}. It takes {", ".join(known)}.')
    return EvictionSettings(**data)


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise ValueError naming the first setting that eviction cannot live with, and the remedy."""
    import vllm

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    problems = {
        f"vLLM {vllm.__version__} is installed, and the plugin hooks into the inside of {VLLM_VERSION}; install "
        f"vllm=={VLLM_VERSION}": vllm.__version__ != VLLM_VERSION,
        "prefix caching is on, but evicted blocks are rewritten in place; set enable_prefix_caching=False": (
            cache.enable_prefix_caching
        ),
        "speculative decoding is on; remove speculative_config": vllm_config.speculative_config is not None,
        "a KV connector is configured; remove kv_transfer_config": vllm_config.kv_transfer_config is not None,
        f"kv_cache_dtype={cache.cache_dtype} is quantised; use kv_cache_dtype=auto": (
            cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32")
        ),
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}; use 1": parallel.pipeline_parallel_size > 1,
        f"decode_context_parallel_size={parallel.decode_context_parallel_size}; use 1": (
            parallel.decode_context_parallel_size > 1
        ),
        f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}; use 1": (
            parallel.prefill_context_parallel_size > 1
        ),
        f"data_parallel_size={parallel.data_parallel_size}; use 1, or one server each": parallel.data_parallel_size > 1,
        "dual batch overlap splits the batch; remove enable_dbo": parallel.use_ubatching,
        "model runner V2 is in use; set VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"KV eviction cannot run: {problem}.")
