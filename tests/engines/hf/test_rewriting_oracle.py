"""Policies that change what is cached, against transformers with a cache that plain loops have changed."""

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from harness.engines.hf.generate import run_reference
from policies import build_policy
from tests.tiny_llama import random_prompt, tiny_llama

BLOCK, BUDGET, NUM_NEW = 8, 48, 20
PROMPT = random_prompt(110, seed=4)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def attend_prompt(model):
    """Cache, attention [Q, S, S] and rotated queries [Q, S, D] of each layer, and the last logits, by transformers."""
    queries, cache = [], DynamicCache()
    handles = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: queries.append(output))
        for layer in model.model.layers
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    output = model(torch.tensor([PROMPT]), past_key_values=cache, output_attentions=True)
    model.set_attn_implementation(before)
    for handle in handles:
        handle.remove()
    heads = [layer.unflatten(-1, (model.config.num_attention_heads, -1)).transpose(1, 2) for layer in queries]
    cos, sin = model.model.rotary_emb(heads[0], torch.arange(len(PROMPT))[None])
    rotated = [apply_rotary_pos_emb(layer, layer, cos, sin)[0][0] for layer in heads]
    return cache, [layer[0] for layer in output.attentions], rotated, output.logits[0, -1]


def continue_from(model, cache, logits, place):
    """Greedy logits; after each step the token at `place` of the full cache leaves."""
    found = [logits]
    for step in range(NUM_NEW - 1):
        token = torch.tensor([[int(found[-1].argmax())]])
        output = model(token, position_ids=torch.tensor([[len(PROMPT) + step]]), past_key_values=cache)
        found.append(output.logits[0, -1])
        for layer in cache.layers:
            stays = [slot for slot in range(layer.keys.shape[2]) if slot != place]
            layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]
    return torch.stack(found)


def merge(states, anchors):
    """[1, H, S, D] -> [1, H, C, D]: mean of each anchor and the tokens that are nearest to it."""
    merged = []
    for anchor in anchors:
        near = [p for p in range(states.shape[2]) if min(anchors, key=lambda a: (abs(a - p), a)) == anchor]
        merged.append(states[:, :, near].double().mean(dim=2).float())
    return torch.stack(merged, dim=2)


@torch.no_grad()
def test_elastic_cache_answers_from_merged_keys_and_values(model):
    policy = build_policy("elastic_cache", budget=BUDGET, block_size=BLOCK, options={"distance": 9})
    cache, attention, _, logits = attend_prompt(model)
    for layer, weights in zip(cache.layers, attention, strict=True):
        importance = weights.sum(dim=(0, 1))
        fixed = [*range(4), len(PROMPT) - 1]
        importance[fixed] = float("inf")
        anchors = sorted(importance.topk(BUDGET).indices.tolist())
        layer.keys, layer.values = merge(layer.keys, anchors), merge(layer.values, anchors)
    trace = run_reference(model, policy, PROMPT, NUM_NEW)
    expected = continue_from(model, cache, logits, place=BUDGET - 9)
    torch.testing.assert_close(trace.logits, expected, atol=2e-4, rtol=1e-4)
    assert trace.token_ids == expected.argmax(dim=-1).tolist()


@torch.no_grad()
def test_think_answers_from_keys_without_their_least_channels(model):
    window, share = 12, 0.5
    options = {"think": share, "think_window": window}
    policy = build_policy("streaming_llm", budget=BUDGET, block_size=BLOCK, options=options)
    cache, _, queries, logits = attend_prompt(model)
    stays = [*range(4), *range(len(PROMPT) - BUDGET + 4, len(PROMPT))]
    for layer, asking in zip(cache.layers, queries, strict=True):
        layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]
        old = layer.keys[0, :, :-window]
        asked = asking[:, -window:].square().mean(dim=1).unflatten(0, (old.shape[0], -1)).mean(dim=1)
        for head, scores in enumerate(asked * layer.keys[0].square().mean(dim=1)):
            layer.keys[0, head, :-window, scores.argsort()[: int(share * len(scores))]] = 0
    trace = run_reference(model, policy, PROMPT, NUM_NEW)
    expected = continue_from(model, cache, logits, place=4)
    torch.testing.assert_close(trace.logits, expected, atol=2e-4, rtol=1e-4)
    whole = run_reference(model, build_policy("streaming_llm", budget=BUDGET, block_size=BLOCK), PROMPT, NUM_NEW)
    assert (trace.logits[1:] - whole.logits[1:]).abs().max() > 0.1, "half of the channels matter"
