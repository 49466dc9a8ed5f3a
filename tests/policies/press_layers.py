"""What presses of kvpress are called with in a Hugging Face model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel


@contextmanager
def layers_as_presses_see_them(
    model: PreTrainedModel, prompt: Sequence[int], *, eager: bool = False
) -> Iterator[list[tuple[Any, ...]]]:
    """Module, hidden states, keys, values, attention (None unless `eager`) and keyword arguments of each layer."""
    seen, handles = [], []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hook = lambda module, args, kwargs, output: seen.append((module, kwargs, output[1]))  # noqa: E731
        handles.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    cache = DynamicCache()
    model.set_attn_implementation("eager" if eager else "sdpa")
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=cache)
    for handle in handles:
        handle.remove()
    yield [
        (module, kwargs["hidden_states"], layer.keys, layer.values, attentions if eager else None, kwargs)
        for (module, kwargs, attentions), layer in zip(seen, cache.layers, strict=True)
    ]
    for layer in model.model.layers:
        del layer.self_attn.rotary_emb
