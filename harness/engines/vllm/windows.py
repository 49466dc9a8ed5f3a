"""Layers with a sliding window, where it changes nothing that eviction has to know of."""

from collections.abc import Mapping
from dataclasses import fields

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


def with_full_cache(
    specs: Mapping[str, KVCacheSpec], keeps_everything: bool, max_model_len: int
) -> dict[str, KVCacheSpec]:
    """Give layers with a window the cache of full attention, where they may have it.

    They may if the window is not shorter than the context, as it then never slides, and if nothing is ever evicted: all
    tokens then stay, and the layer's attention masks those outside its window by itself.

    Args:
        specs: by layer, as vLLM has them.
        keeps_everything: the policy never evicts.
        max_model_len: tokens of prompt and answer together.

    Returns:
        the same; layers whose window would slide under eviction are left as they are.
    """
    return {
        name: _without_window(spec) if keeps_everything or _window(spec) >= max_model_len else spec
        for name, spec in specs.items()
    }


def _window(spec: KVCacheSpec) -> int:
    return getattr(spec, "sliding_window", None) or 0


def _without_window(spec: KVCacheSpec) -> KVCacheSpec:
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec) or not _window(spec):
        return spec
    names = {field.name for field in fields(AttentionSpec) if field.init}
    return FullAttentionSpec(**{name: getattr(spec, name) for name in names})
