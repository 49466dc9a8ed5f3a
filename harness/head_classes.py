"""Measures which KV heads a model needs whole, for `policy=head_classes`: `python -m harness.head_classes`.

A needle lies in filler and the answer is known. The prompt is attended in full; then one head at a time is cut to its
sinks and its window, as the policy would, and the loss on the answer's tokens is compared with that of the full cache.
A head's score is the mean rise. On the reference engine, so that any Llama-like model will do, one answer a head and
row; a stand-in for what DuoAttention trains and HeadKV measures over many examples.

Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.engines.hf.attention import reference_attention
from harness.engines.hf.cache import CacheShape, LayerCache, ReferenceCache
from harness.errors import UserError, exit_code
from harness.store.manifest import write_atomically
from policies.base import Phase

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_DEPTHS = 4
NUM_SHOWN = 10


@dataclass(frozen=True)
class Needle:
    """A prompt and the tokens that answer it."""

    prompt: list[int]
    answer: list[int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return exit_code(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.head_classes", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id of a causal LM; without it the embedded model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for policy.options.file")
    parser.add_argument("--rows", type=int, default=8, help=f"needles, at {NUM_DEPTHS} depths in turn")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=128, help="tokens of a head that is cut, as policy.budget")
    parser.add_argument("--sinks", type=int, default=4, help="of them at the start, as policy.options.protect_first")
    parser.add_argument("--minutes", type=float, default=10, help="no row is begun after so long")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _run(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    from harness.models import prepare_embedded_model
    from harness.tokenizer import load_tokenizer

    if not 0 <= options.sinks < options.budget < options.length or options.rows < 1:
        raise UserError(
            f"--sinks={options.sinks}, --budget={options.budget}, --length={options.length}, --rows={options.rows} "
            "make no sense. Give 0 <= sinks < budget < length and at least one row."
        )
    path = options.model or str(prepare_embedded_model())
    tokenizer, stop = load_tokenizer(path, None)
    needles = make_needles(tokenizer, stop, options.rows, options.length, options.seed)
    try:
        model = AutoModelForCausalLM.from_pretrained(path).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"--model={path} cannot be loaded ({error}).") from error
    end_s = time.monotonic() + 60 * options.minutes
    rises = []
    for number, needle in enumerate(needles, start=1):
        if rises and time.monotonic() > end_s:
            print(f"time is up after {len(rises)} of {len(needles)} rows", file=sys.stderr)
            break
        loss, rise = measure(model, needle, options.budget, options.sinks)
        rises.append(rise)
        print(f"row {number}: loss {loss:.3f} a token, at most {rise.max():.3f} more without a head", flush=True)
    scores = torch.stack(rises).mean(dim=0)
    settings = {"rows": len(rises)} | {key: getattr(options, key) for key in ("length", "budget", "sinks", "seed")}
    write_atomically(options.out, json.dumps({"model": path, **settings, "scores": scores.tolist()}) + "\n")
    for layer, head in _ranked(scores)[:NUM_SHOWN]:
        print(f"layer {layer:3} head {head:2}: {scores[layer, head]:+.4f}")
    print(f"policy=head_classes policy.options.file={options.out} policy.options.share=0.5")


def make_needles(
    tokenizer: "PreTrainedTokenizerBase", stop: tuple[int, ...], num_rows: int, length: int, seed: int
) -> list[Needle]:
    """Rows of benchmark=needle with prompts of `length` tokens, depths in turn.

    Raises:
        UserError: the length is too short for a needle.
    """
    from harness.benchmarks.needle.generate import generate
    from harness.benchmarks.prompting import build_sample, encode_row

    num_each = -(-num_rows // NUM_DEPTHS)
    rows = generate([length], NUM_DEPTHS, num_each, seed, "prose", lambda row: len(encode_row(row, tokenizer).ids))
    in_turn = [row for first in range(num_each) for row in rows[first::num_each]]
    return [
        Needle(
            build_sample(row, tokenizer, length, stop).prompt_token_ids,
            tokenizer.encode(f" {row.answers[0]}", add_special_tokens=False),
        )
        for row in in_turn[:num_rows]
    ]


@torch.no_grad()
def measure(model: "PreTrainedModel", needle: Needle, budget: int, num_sinks: int) -> tuple[float, torch.Tensor]:
    """Loss on the answer, nats a token, with the full cache, and by how much each head's cut raises it, [L, H].

    The last token of the prompt is attended after the cut, so that the whole answer is told from what is left.
    """
    shape = CacheShape.of(model.config)
    num_prompt = len(needle.prompt) - 1
    cache = ReferenceCache.empty(shape, num_prompt, keep_queries=False)
    with reference_attention(model):
        _logits(model, cache, needle.prompt[:num_prompt])
        cache.num_seen = num_prompt
        loss = _answer_loss(model, cache, needle)
        rise = torch.zeros(shape.num_layers, shape.num_kv_heads)
        for layer, head in _heads(shape):
            rise[layer, head] = _answer_loss(model, _cut(cache, layer, head, budget, num_sinks), needle) - loss
    return loss, rise


def _heads(shape: CacheShape) -> Iterator[tuple[int, int]]:
    return ((layer, head) for layer in range(shape.num_layers) for head in range(shape.num_kv_heads))


def _cut(cache: ReferenceCache, layer: int, head: int, budget: int, num_sinks: int) -> ReferenceCache:
    """The same tokens, but only sinks and window in one head."""
    cut = _copy(cache)
    num_tokens = cache.num_seen
    window = range(max(num_sinks, num_tokens - budget + num_sinks), num_tokens)
    cut.layers[layer].heads[head].evict({*range(num_sinks), *window}, Phase.PREFILL_END)
    return cut


def _copy(cache: ReferenceCache) -> ReferenceCache:
    """A cache that grows by itself; tensors are shared, as a `HeadCache` replaces and never writes them."""
    return replace(cache, layers=[LayerCache([replace(head) for head in layer.heads]) for layer in cache.layers])


def _answer_loss(model: "PreTrainedModel", cache: ReferenceCache, needle: Needle) -> float:
    """Mean cross-entropy of the answer's tokens after the prompt; the cache is left as it was."""
    logits = _logits(model, _copy(cache), [needle.prompt[-1], *needle.answer[:-1]])
    return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(needle.answer)).item()


def _logits(model: "PreTrainedModel", cache: ReferenceCache, token_ids: list[int]) -> torch.Tensor:
    """Attend new tokens, logits [n, V]."""
    positions = torch.arange(cache.num_seen, cache.num_seen + len(token_ids))
    output = model(
        input_ids=torch.tensor([token_ids]), position_ids=positions[None], use_cache=False, reference_cache=cache
    )
    return output.logits[0]


def _ranked(scores: torch.Tensor) -> list[tuple[int, int]]:
    """Layers and heads, the highest score first."""
    order = scores.flatten().argsort(descending=True, stable=True).tolist()
    return [divmod(index, scores.shape[1]) for index in order]


if __name__ == "__main__":
    sys.exit(main())
