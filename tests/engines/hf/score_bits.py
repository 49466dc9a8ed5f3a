"""At how many bits scores should be compared: `python -m tests.engines.hf.score_bits`, on SmolLM2, some minutes.

Two things pull. Rounding depends on what else is in the batch, so that scores compared to the last bit let the batch
choose between equal tokens; scores compared at too few bits make unequal tokens equal. For every policy, prompt length,
layer and KV head the choice after the prompt is made at each number of bits, and counted are

* `flips`: choices that differ between the prompt attended at once and the same prompt attended in chunks, which
  is the same mathematics in other matrix shapes;
* `differ`: choices that differ from that by the exact scores, float32 as they are; and of these
* `no tie`: those in which some token was exchanged for one whose score differs by more than rounding makes of one
  score: the largest difference that chunking made in the row, or two units in the last place of float32.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from harness.benchmarks.mini.generate import generate
from harness.engines.hf import selection
from harness.engines.hf.attention import reference_attention
from harness.engines.hf.cache import CacheShape, ReferenceCache
from harness.engines.hf.rotary import Rotary
from harness.engines.hf.signals import build_view
from harness.models import prepare_embedded_model
from policies.base import Phase, Policy
from policies.registry import build_policy

BLOCK_SIZE = 32
BITS = (14, 16, 18, 20, 24)
EXACT = 24
LENGTHS = tuple(range(320, 1729, 128))
CHUNK = 96
TASKS = ("qasper", "multi_news", "samsum", "lcc")
POLICIES = {
    "keydiff": {},
    "inverse_key_l2": {},
    "paged_eviction_literal": {},
    "snapkv": {},
    "tova": {},
    "h2o": {},
    "expected_attention": {},
}
Choice = list[list[set[int]]]


def attend(model: PreTrainedModel, prompt: list[int], chunk: int) -> ReferenceCache:
    """The whole prompt in the cache, attended `chunk` tokens at a time, nothing evicted."""
    cache = ReferenceCache.empty(CacheShape.of(model.config), len(prompt), keep_queries=True)
    with torch.inference_mode(), reference_attention(model):
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            positions = torch.arange(start, start + len(part))[None]
            model(
                input_ids=torch.tensor([part]),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                reference_cache=cache,
            )
            cache.num_seen += len(part)
    return cache


def scores_of(policy: Policy, cache: ReferenceCache, rotary: Rotary) -> list[torch.Tensor]:
    """One tensor a layer, [rows, T] after the mean over heads where they share a choice."""
    layers = range(len(cache.layers))
    scores = [policy.score(build_view(policy, cache, i, Phase.PREFILL_END, rotary))[0] for i in layers]
    return scores if policy.per_head else [layer.mean(dim=0, keepdim=True) for layer in scores]


def choose(policy: Policy, scores: list[torch.Tensor], bits: int) -> Choice:
    """What stays, by the rules of `harness.engines.hf.selection` at this many bits."""
    before, selection.SCORE_BITS = selection.SCORE_BITS, bits
    num_tokens = scores[0].shape[-1]
    positions = [torch.arange(num_tokens).expand(layer.shape[0], -1) for layer in scores]
    kept = selection.choose_kept(policy, Phase.PREFILL_END, scores, positions, num_tokens, policy.budget)
    selection.SCORE_BITS = before
    return kept


def rows_of(*per_layer: list) -> Iterator[tuple]:
    """The rows of all layers, side by side."""
    for layer in zip(*per_layer, strict=True):
        yield from zip(*layer, strict=True)


def is_tie(scores: torch.Tensor, noisy: torch.Tensor, ours: set[int], exact: set[int]) -> bool:
    """Whether what was exchanged scores alike within the noise of its row."""
    noise = torch.maximum((scores - noisy).abs().max(), 2.0**-22 * scores.abs().max())
    lost, won = (scores[sorted(one)] for one in (exact - ours, ours - exact))
    return bool(lost.max() - won.min() <= 2 * noise)


def texts(folder: Path | None) -> list[str]:
    """Contexts of generated rows, or of the first row of each of the folder's files."""
    if folder is None:
        return [" ".join(row["context"] for row in generate(task, 8, 0)) for task in TASKS]
    return [json.loads(open(folder / f"{task}.jsonl", encoding="utf-8").readline())["context"] for task in TASKS]


def prompts_of(path: str, folder: Path | None) -> list[list[int]]:
    """One prompt a length, each from the text whose turn it is; a short text is repeated."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = [tokenizer.encode(text) for text in texts(folder)]
    return [(encoded[i % len(encoded)] * LENGTHS[-1])[:length] for i, length in enumerate(LENGTHS)]


def main() -> None:
    """Print one row a policy and number of bits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, help="folder of LongBench's JSONL files; default: generated rows")
    path = str(prepare_embedded_model())
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    rotary = Rotary.of(model, CacheShape.of(model.config).head_size)
    counts = {(name, bits): [0, 0, 0, 0] for name in POLICIES for bits in BITS}
    for prompt in prompts_of(path, parser.parse_args().path):
        caches = [attend(model, prompt, chunk) for chunk in (len(prompt), CHUNK)]
        budget = len(prompt) // (2 * BLOCK_SIZE) * BLOCK_SIZE
        for name, options in POLICIES.items():
            policy = build_policy(name, budget=budget, block_size=BLOCK_SIZE, options=options)
            whole, chunked = (scores_of(policy, cache, rotary) for cache in caches)
            exact = choose(policy, whole, EXACT)
            for bits in BITS:
                ours, theirs = choose(policy, whole, bits), choose(policy, chunked, bits)
                count = counts[name, bits]
                for mine, other, best, row, noisy in rows_of(ours, theirs, exact, whole, chunked):
                    count[0] += 1
                    count[1] += mine != other
                    count[2] += mine != best
                    count[3] += mine != best and not is_tie(row, noisy, mine, best)
        print(f"{len(prompt)} tokens, budget {budget}", flush=True)
    print("policy bits choices flips differ no_tie")
    for (name, bits), count in counts.items():
        print(name, bits, *count)


if __name__ == "__main__":
    main()
