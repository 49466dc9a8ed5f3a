"""The plugin's own settings: plain data in vLLM's `additional_config`, readable in every process."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from harness.budget import parse_budget
from harness.engines.vllm.refusals import refuse_settings
from policies import Policy, build_policy
from policies.prompt_share import for_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "kv_eviction"
NEAR = 0.8
PATH = "the path of a file or folder, or null", (str, NoneType)
KINDS = {
    "policy": ("the name of a policy", (str,)),
    "options": ("a mapping of the policy's options", (dict,)),
    "reserve": ("true or false", (bool,)),
    "trace": PATH,
    "retention": PATH,
    "counters": PATH,
}


@dataclass(frozen=True)
class EvictionSettings:
    """What `additional_config={"kv_eviction": {...}}` may hold.

    Attributes:
        policy: name of a registered policy.
        budget: resident tokens per layer and KV head, or the share of each prompt, as 0.25 or "25%"; None for a policy
            that never evicts.
        options: the policy's own options.
        reserve: admit a request only if the pool can hold the peak of every admitted one, so that none is ever
            preempted. False admits as stock vLLM does; a prompt that is read in chunks counts as budget and one chunk.
        trace: file to which the scheduler appends KV block usage a step; None for no trace.
        retention: run folder in which the positions kept are recorded for every request; None for no record.
        counters: file through which the scheduler publishes running totals (`/metrics`); None for none.
    """

    policy: str
    budget: float | None = None
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

    def model_policy(self, vllm_config: "VllmConfig", block_size: int) -> Policy:
        """The policy for the engine's model, as one tensor-parallel rank sees it.

        Raises:
            ValueError: it does not fit the model, or needs to see all its KV heads.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        num_layers, policy = model.get_num_layers(parallel), self.build_policy(block_size)
        whole = for_model(policy, num_layers, model.get_total_num_kv_heads())
        if parallel.tensor_parallel_size == 1:
            return whole
        if policy.measured or any(len(set(flags)) > 1 for flags in getattr(whole, "whole_rows", None) or ()):
            raise ValueError(
                f"policy={policy.name} decides over all KV heads together, and tensor_parallel_size="
                f"{parallel.tensor_parallel_size} divides them. Use tensor_parallel_size=1."
            )
        return for_model(policy, num_layers, model.get_num_kv_heads(parallel))


def read_settings(vllm_config: "VllmConfig") -> EvictionSettings:
    """The settings of this engine.

    Raises:
        ValueError: the plugin's classes are in use but `additional_config` has no usable "kv_eviction", or another
            setting of the engine is not supported.
    """
    settings = parse_settings((vllm_config.additional_config or {}).get(CONFIG_KEY))
    if settings.retention is not None and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "KV eviction cannot run: retention evicts once more from finished requests, whose blocks prefix caching "
            "keeps; set enable_prefix_caching=False or leave retention out."
        )
    refuse_settings(vllm_config, settings.build_policy(vllm_config.cache_config.block_size), settings.reserve)
    return settings


def parse_settings(data: object) -> EvictionSettings:
    """Check the value of "kv_eviction".

    Raises:
        ValueError: it is missing, no mapping, without a policy, or has an unknown key or a value that does not fit.
    """
    known = EvictionSettings.__dataclass_fields__
    if not isinstance(data, dict) or "policy" not in data:
        raise ValueError(
            f'additional_config["{CONFIG_KEY}"]={data!r} names no policy. '
            'Give a mapping such as {"policy": "paged_eviction", "budget": 512}.'
        )
    if unknown := sorted(set(data) - set(known)):
        hints = [f" Did you mean {close[0]}?" for name in unknown if (close := get_close_matches(name, known, n=1))]
        raise ValueError(
            f'additional_config["{CONFIG_KEY}"] does not know {", ".join(unknown)}.{"".join(hints)} '
            f"It takes {', '.join(known)}."
        )
    budget = parse_budget(data.get("budget"), f'additional_config["{CONFIG_KEY}"]["budget"]')
    for name in [name for name in data if name in KINDS]:
        (kind, types), value = KINDS[name], data[name]
        if not isinstance(value, types) or (isinstance(value, bool) and name != "reserve"):
            raise ValueError(
                f'additional_config["{CONFIG_KEY}"]["{name}"]={json.dumps(value, default=repr)} is not {kind}.'
            )
    return EvictionSettings(**{**data, "budget": budget})


def check_folders(settings: EvictionSettings) -> None:
    """Refuse files that could not be written; asked where the engine is started, as its workers may be elsewhere.

    Raises:
        ValueError: names the setting and the folder that does not exist.
    """
    for name, folder in _folders(settings):
        if not folder.is_dir():
            raise ValueError(
                f'additional_config["{CONFIG_KEY}"]["{name}"]={getattr(settings, name)} is not usable: there is no '
                f"folder {folder}. Make it first."
            )


def _folders(settings: EvictionSettings) -> Iterator[tuple[str, Path]]:
    """(setting, folder that must exist)."""
    if settings.retention is not None:
        yield "retention", Path(settings.retention)
    for name in ("trace", "counters"):
        if (path := getattr(settings, name)) is not None:
            yield name, Path(path).parent


def refuse_near_misses(additional_config: Mapping[str, Any]) -> None:
    """Refuse keys that are "kv_eviction" misspelt: the full cache would be served without a word.

    Raises:
        ValueError: names the key.
    """
    for key in additional_config:
        if key != CONFIG_KEY and get_close_matches(_plain(key), [_plain(CONFIG_KEY)], cutoff=NEAR):
            raise ValueError(f'additional_config has "{key}", which nothing reads. Did you mean "{CONFIG_KEY}"?')


def _plain(key: str) -> str:
    return re.sub("[^a-z]", "", str(key).lower())
