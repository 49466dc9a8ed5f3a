"""What transformers itself computes when each layer and head may look only at the keys that a trace says were kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from harness.engines.hf.trace import ReferenceTrace

Positions = list[list[list[int]]]
"""By layer and KV head."""


@dataclass(frozen=True)
class MaskedForward:
    """One eager forward over prompt and generated tokens, S in all.

    Attributes:
        logits: [S, V].
        attentions: one [Q, S, S] a layer, rows are queries.
        queries, rotated_queries: one [Q, S, D] a layer, before and after RoPE.
    """

    logits: torch.Tensor
    attentions: list[torch.Tensor]
    queries: list[torch.Tensor]
    rotated_queries: list[torch.Tensor]


def forwards(num_forwards: int, num_prompt: int, chunk: int) -> list[tuple[int, int]]:
    """First and last position (exclusive) of each forward: prompt chunks, then single tokens."""
    spans = [(start, min(start + chunk, num_prompt)) for start in range(0, num_prompt, chunk)]
    return spans + [(num_prompt + step, num_prompt + step + 1) for step in range(num_forwards - len(spans))]


def kept_masks(
    kept_after: dict[int, Positions], spans: list[tuple[int, int]], num_layers: int, num_heads: int
) -> torch.Tensor:
    """Which key each query may see: bool [L, H, S, S].

    A forward's queries see what the last eviction kept, what was written since, and the past in their own chunk.

    Args:
        kept_after: tokens seen at an eviction -> positions that stayed, by layer and KV head.
        spans: see `forwards`.
        num_layers, num_heads: L and H.
    """
    size = spans[-1][1]
    masks = torch.zeros(num_layers, num_heads, size, size, dtype=torch.bool)
    resident = torch.zeros(num_layers, num_heads, size, dtype=torch.bool)
    for start, end in spans:
        masks[:, :, start:end] = resident[:, :, None]
        masks[:, :, start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
        resident[:, :, start:end] = True
        if end in kept_after:
            resident[:] = False
            for layer, heads in enumerate(kept_after[end]):
                for head, positions in enumerate(heads):
                    resident[layer, head, positions] = True
    return masks


@contextmanager
def layer_masks(model: PreTrainedModel, masks: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Give each layer its own mask [H, S, S] (True = visible); yields the list of pre-RoPE queries [1, S, Q x D]."""
    queries: list[torch.Tensor] = []
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def mask_hook(index: int) -> Callable[[torch.nn.Module, tuple, dict], tuple[tuple, dict]]:
        additive = torch.where(masks[index].repeat_interleave(group, dim=0), 0.0, float("-inf"))[None]
        return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": additive})

    with ExitStack() as stack:
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            handle = attention.register_forward_pre_hook(mask_hook(index), with_kwargs=True)
            stack.callback(handle.remove)
            handle = attention.q_proj.register_forward_hook(lambda module, args, output: queries.append(output))
            stack.callback(handle.remove)
        yield queries


@contextmanager
def shared_projections(model: PreTrainedModel, lenders: Sequence[int]) -> Iterator[None]:
    """Give each layer the keys and values that its lender has projected, before RoPE."""
    projected: dict[tuple[int, str], torch.Tensor] = {}

    def hook(layer: int, name: str) -> Callable[[torch.nn.Module, tuple, torch.Tensor], torch.Tensor]:
        def exchange(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            return projected.setdefault((lenders[layer], name), output)

        return exchange

    with ExitStack() as stack:
        for index, layer in enumerate(model.model.layers):
            for name in ("k_proj", "v_proj"):
                handle = getattr(layer.self_attn, name).register_forward_hook(hook(index, name))
                stack.callback(handle.remove)
        yield


def masked_forward(
    model: PreTrainedModel,
    prompt: list[int],
    trace: ReferenceTrace,
    chunk: int | None = None,
    lenders: Sequence[int] | None = None,
) -> MaskedForward:
    """Run transformers' eager attention over the whole text under the masks of the trace.

    Args:
        model: a Llama.
        prompt: prompt tokens.
        trace: what the reference did with it.
        chunk: prompt tokens a forward; None = the whole prompt in one.
        lenders: see `Policy.lenders`.
    """
    lenders = range(model.config.num_hidden_layers) if lenders is None else lenders
    kept_after = {one.num_seen: [one.kept[lender] for lender in lenders] for one in trace.decisions}
    spans = forwards(len(trace.steps), len(prompt), chunk or len(prompt))
    with shared_projections(model, lenders):
        return forward_under(model, prompt + trace.token_ids, kept_after, spans)


def forward_under(
    model: PreTrainedModel, token_ids: list[int], kept_after: dict[int, Positions], spans: list[tuple[int, int]]
) -> MaskedForward:
    """What transformers computes for a text of which an engine, this one or another, kept these positions.

    Args:
        model: a Llama.
        token_ids: prompt and answer; what no forward of `spans` attends is cut.
        kept_after, spans: see `kept_masks`.
    """
    config = model.config
    masks = kept_masks(kept_after, spans, config.num_hidden_layers, config.num_key_value_heads)
    text = torch.tensor([token_ids[: masks.shape[-1]]])
    before = config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad(), layer_masks(model, masks) as projected:
        output = model(text, use_cache=False, output_attentions=True)
    model.set_attn_implementation(before)
    queries = [layer.unflatten(-1, (model.config.num_attention_heads, -1)).transpose(1, 2) for layer in projected]
    cos, sin = model.model.rotary_emb(queries[0], torch.arange(text.shape[1])[None])
    rotated = [apply_rotary_pos_emb(layer, layer, cos, sin)[0] for layer in queries]
    return MaskedForward(
        output.logits[0], [a[0] for a in output.attentions], [q[0] for q in queries], [r[0] for r in rotated]
    )
