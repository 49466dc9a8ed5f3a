"""Attention over the reference cache, plugged into transformers' `AttentionInterface`.

The cache travels as a keyword argument of the model's forward, which transformers hands down to the attention function;
no state is global.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel

from harness.engines.hf.cache import HeadCache, ReferenceCache
from harness.errors import UserError

IMPLEMENTATION = "kv_eviction_reference"
QUERY_BLOCK = 256
"""Queries whose attention matrix is held at once; bounds memory, changes no result."""
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
"""Arguments by which transformers tells an attention function to compute something else than plain attention."""


@contextmanager
def reference_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` attend through `attend` inside the context and as before after it."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float,
    reference_cache: ReferenceCache,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Write the new tokens of a layer to the cache, then attend over all resident tokens, in float32.

    Args:
        module: the attention layer; `layer_idx` tells which one.
        query: post-RoPE [1, Q, n, D].
        key, value: post-RoPE keys and values of the same tokens, [1, H, n, D].
        attention_mask: None, because transformers builds no mask for an implementation that it does not know.
        dropout: 0, as nothing is trained; kvpress, once imported, wraps attention functions and gives it by place.
        scaling: factor of the logits.
        reference_cache: the request's cache; its `num_seen` is the position of the first of the n tokens.
        options: further settings of the model.

    Returns:
        [1, n, Q, D] in the dtype of `query`, and no weights.

    Raises:
        UserError: the model asks for a sliding window, soft-capped logits or attention sinks.
    """
    _refuse(options)
    if attention_mask is not None:
        raise ValueError("the reference attention takes no mask: one request, no padding")
    layer = reference_cache.layers[module.layer_idx]
    if reference_cache.keep_queries:
        layer.queries.append(query[0])
    positions = list(range(reference_cache.num_seen, reference_cache.num_seen + query.shape[2]))
    group_queries = query[0].float().unflatten(0, (len(layer.heads), -1))
    outputs = []
    for index, (head, queries, keys, values) in enumerate(
        zip(layer.heads, group_queries, key[0], value[0], strict=True)
    ):
        head.append(positions, keys, values)
        outputs.append(_attend_cache(reference_cache, module.layer_idx, index, queries, positions, scaling))
    return torch.cat(outputs).transpose(0, 1)[None].to(query.dtype), None


def _refuse(options: Mapping[str, object]) -> None:
    """Raise UserError for arguments that ask for more than plain attention."""
    for option in UNSUPPORTED:
        if options.get(option) is not None:
            raise UserError(
                f"model uses {option}={options[option]}, which the reference does not compute. "
                "Use a model with plain causal attention in all layers."
            )


def _attend_cache(
    cache: ReferenceCache, layer: int, index: int, queries: torch.Tensor, positions: list[int], scaling: float
) -> torch.Tensor:
    """Attention of one group, float32 [G, n, D], over its own KV head or a lender's, all of it or what is read."""
    lender = layer if cache.lenders is None else cache.lenders[layer]
    head = cache.layers[lender].heads[index]
    if cache.reader is None or not cache.reader.chooses(positions):
        return _attend_head(head, queries, positions, scaling, cache.first_squared)
    slots = cache.reader.slots(layer, index, head, queries[:, 0])
    return _attend_slots(head, queries, slots, scaling)


def _attend_slots(head: HeadCache, queries: torch.Tensor, slots: list[int], scaling: float) -> torch.Tensor:
    """Attention of one new token's group, float32 [G, 1, D], over some of the tokens of a KV head."""
    probabilities = (queries @ head.keys[slots].float().T * scaling).softmax(dim=-1)
    return probabilities @ head.values[slots].float()


def _attend_head(
    head: HeadCache, queries: torch.Tensor, positions: list[int], scaling: float, first_squared: int
) -> torch.Tensor:
    """Attention of one group over one KV head; adds the probabilities and their squares to the head's sums.

    Args:
        head: resident tokens, the queries' own included.
        queries: float32 [G, n, D].
        positions: position of each query.
        scaling: factor of the logits.
        first_squared: position of the first query whose squares count.

    Returns:
        float32 [G, n, D].
    """
    keys, values = head.keys.float(), head.values.float()
    key_positions = torch.tensor(head.positions, device=keys.device)
    query_positions = torch.tensor(positions, device=keys.device)
    outputs = []
    for block, block_positions in zip(
        queries.split(QUERY_BLOCK, dim=1), query_positions.split(QUERY_BLOCK), strict=True
    ):
        future = key_positions[None, :] > block_positions[:, None]
        logits = (block @ keys.T * scaling).masked_fill(future, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        head.attention_mass = head.attention_mass + probabilities.sum(dim=(0, 1))
        squares = probabilities[:, block_positions >= first_squared].square()
        head.squared_attention = head.squared_attention + squares.sum(dim=(0, 1))
        outputs.append(probabilities @ values)
    return torch.cat(outputs, dim=1)
