"""The plugin's own settings: plain data in vLLM's `additional_config`, readable in every process."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.engines.vllm.refusals import refuse_settings
from policies import Policy, build_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "kv_eviction"


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
        policy = build_policy(self.policy, budget=self.budget, block_size=block_size, options=self.options)
        if policy.allocation == "ragged":
            raise ValueError(
                f"policy={self.policy} keeps unequally many tokens in layers and heads, which engine=vllm cannot hold "
                "yet. Use engine=hf."
            )
        return policy


def read_settings(vllm_config: "VllmConfig") -> EvictionSettings:
    """The settings of this engine.

    Raises:
        ValueError: the plugin's classes are in use but `additional_config` has no usable "kv_eviction", or another
            setting of the engine is not supported.
    """
    settings = parse_settings((vllm_config.additional_config or {}).get(CONFIG_KEY))
    refuse_settings(vllm_config, settings.reserve)
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
