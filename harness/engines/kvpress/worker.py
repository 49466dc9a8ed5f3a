"""Continues prompts under a kvpress press: the program at the other end of `harness.engines.kvpress.process`.

It is started by its path, with the interpreter of an environment that holds kvpress, and imports nothing of the
harness. One JSON object a line:

* first line out: `{"versions": ..., "bytes_per_token": ...}`, or `{"error": ...}` if the press cannot be had;
* a line in: `{"request_id", "prompt_token_ids", "max_new_tokens", "stop_token_ids", "min_new_tokens"}`, and
  "budget" if the prompt has one of its own;
* a line out for it: see `Session.answer`.

The whole prompt is compressed, question included. A press is told a share, so that it is computed anew for each prompt
from the budget in tokens; a prompt within the budget is not compressed. Decoding is greedy, and the first token is
chosen before the prompt is pruned.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TextIO

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

if TYPE_CHECKING:
    from kvpress import BasePress

REPORTED_PACKAGES = ("kvpress", "torch", "transformers")
NEEDS_EAGER = "ObservedAttentionPress"
"""Reads the attention matrix, which only the eager implementation gives."""
ROTATES_ANEW = "KeyRerotationPress"
"""Moves the kept keys to positions 0, 1, ..., from which decoding then goes on."""
EXIT_REFUSED = 2


class RefusedError(Exception):
    """The press is unknown or cannot be held to a budget."""


def ratio_removed(num_tokens: int, num_kept: int) -> float:
    """The compression ratio by which exactly `num_kept` of `num_tokens` stay, fewer than all.

    kvpress keeps int(num_tokens * (1 - ratio)): aiming at the middle between two integers is safe from rounding.
    """
    return 1 - (num_kept + 0.5) / num_tokens


def build_press(spec: dict[str, Any]) -> "BasePress":
    """A press from plain data: class under "name", arguments beside it, presses among them.

    Raises:
        RefusedError: unknown class, arguments that it does not take, or a press without a compression ratio.
    """
    import kvpress

    arguments = dict(spec)
    name = arguments.pop("name")
    known = {key: cls for key, cls in vars(kvpress).items() if isinstance(cls, type) and key.endswith("Press")}
    if name not in known:
        raise RefusedError(f"policy.name=kvpress:{name} is unknown. Presses: {', '.join(sorted(known))}.")
    nested = {key: build_press(v) if isinstance(v, dict) and "name" in v else v for key, v in arguments.items()}
    try:
        press = known[name](**nested)
    except (TypeError, AssertionError, ValueError) as error:
        raise RefusedError(f"policy.options={arguments} do not fit {name}: {error}") from error
    if not takes_ratio(press):
        raise RefusedError(f"policy.name=kvpress:{name} takes no compression ratio, so no budget can be given to it.")
    return press


def takes_ratio(press: "BasePress") -> bool:
    """Whether a compression ratio can be set."""
    try:
        press.compression_ratio = 0.5
    except (AttributeError, AssertionError, NotImplementedError):
        return False
    return hasattr(type(press), "compression_ratio")


def keeps_exactly(press: "BasePress") -> bool:
    """Whether the press prunes by kvpress's own top-k, and not by chunk, layer or head."""
    from kvpress import ScorerPress

    return isinstance(press, ScorerPress) and type(press).compress is ScorerPress.compress


class Watch:
    """Stands in for a press's forward hook: calls it and sees the cache before and after.

    Attributes:
        peak_tokens: most tokens in the cache at once, summed over layers.
        seconds: time spent in the press.
        kept: prompt positions that stayed, by layer and KV head; only if recorded.
    """

    def __init__(self, press: "BasePress", record: bool) -> None:
        """Take the hook's place, also that of an earlier watch."""
        self._hook = type(press).forward_hook.__get__(press)
        self._record = record
        press.forward_hook = self
        self.peak_tokens = 0
        self.seconds = 0.0
        self.kept: list[list[list[int]]] = []

    def __call__(self, module: torch.nn.Module, inputs: tuple, kwargs: dict[str, Any], output: tuple) -> tuple:
        """Called by torch after each attention layer."""
        cache = kwargs["past_key_values"]
        self.peak_tokens = max(self.peak_tokens, sum(lengths(cache)))
        before = cache.layers[module.layer_idx].keys
        start = time.perf_counter()
        output = self._hook(module, inputs, kwargs, output)
        self.seconds += time.perf_counter() - start
        if self._record:
            kept = kept_positions(before, cache.layers[module.layer_idx].keys)
            self.kept.append(without_masked(kept, getattr(module, "masked_key_indices", None)))
        return output


def lengths(cache: DynamicCache) -> list[int]:
    """Tokens in each layer that was reached."""
    return [layer.keys.shape[-2] for layer in cache.layers if layer.keys is not None]


def kept_positions(before: torch.Tensor, after: torch.Tensor) -> list[list[int]]:
    """Where the keys after compression stood before it, ascending, by KV head; found by their bytes, [1, H, T, D].

    Raises:
        RuntimeError: two keys are equal, or a key was changed.
    """
    heads = []
    for old_rows, new_rows in zip(_row_bytes(before), _row_bytes(after), strict=True):
        place = {row: position for position, row in enumerate(old_rows)}
        if len(place) != len(old_rows) or not set(new_rows) <= place.keys():
            raise RuntimeError("keys cannot be told apart, or the press changes them: no positions to record")
        heads.append(sorted(place[row] for row in new_rows))
    return heads


def without_masked(kept: list[list[int]], masked: tuple[torch.Tensor, ...] | None) -> list[list[int]]:
    """The positions of each KV head but those that a press masks; `masked`: request, head and position of each."""
    if masked is None:
        return kept
    gone = set(zip(masked[1].tolist(), masked[2].tolist(), strict=True))
    return [[position for position in row if (head, position) not in gone] for head, row in enumerate(kept)]


def _row_bytes(keys: torch.Tensor) -> list[list[bytes]]:
    return [[row.tobytes() for row in head.contiguous().view(torch.uint8).cpu().numpy()] for head in keys[0]]


class Session:
    """A loaded model under a press.

    Attributes:
        bytes_per_token: keys and values of one token in all layers, as really cached.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model; the press first, as it may be refused."""
        self._budget: int | None = options.budget
        self._record: bool = options.record_positions
        self._press = None if options.press is None else build_press(options.press)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            attn_implementation="eager" if NEEDS_EAGER in json.dumps(options.press) else "sdpa",
        ).eval()
        if torch.cuda.is_available():
            self._model.to("cuda")
        self.bytes_per_token = self._count_token_bytes()

    @torch.inference_mode()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Continue one prompt.

        Returns:
            `request_id`, `token_ids` without the stop token, `finish_reason`, `ttft_s`, `e2e_s`, `compressed`;
            `kept_tokens`, `final_tokens`: length of each layer's cache after the prompt and at the end; `kept_by_head`:
            the first less what a press masks but leaves in the cache; `prompt_peak_tokens`: most tokens cached at once
            up to the first decode step, summed over layers; `press_s`: in the press; `kept_positions` if recorded.
        """
        start = time.perf_counter()
        prompt, budget = request["prompt_token_ids"], request.get("budget", self._budget)
        cache = DynamicCache()
        logits, watch = self._prefill(prompt, cache, budget)
        ttft_s = time.perf_counter() - start
        kept_tokens, kept_by_head = lengths(cache), self._kept_by_head(cache, watch is not None)
        if watch and keeps_exactly(self._press) and set(kept_tokens) != {budget}:
            raise RuntimeError(f"{type(self._press).__name__} left {sorted(set(kept_tokens))}, not {budget}")
        rotated_anew = watch and type(self._press).__name__ == ROTATES_ANEW
        token_ids, finish_reason = self._decode(request, logits, kept_tokens[0] if rotated_anew else len(prompt), cache)
        reply = {
            "request_id": request["request_id"],
            "token_ids": token_ids,
            "finish_reason": finish_reason,
            "ttft_s": ttft_s,
            "e2e_s": time.perf_counter() - start,
            "compressed": watch is not None,
            "kept_tokens": kept_tokens,
            "final_tokens": lengths(cache),
            "kept_by_head": kept_by_head,
            "prompt_peak_tokens": watch.peak_tokens if watch else sum(kept_tokens),
            "press_s": watch.seconds if watch else 0.0,
        }
        return reply | ({"kept_positions": watch.kept} if watch and self._record else {})

    def _prefill(self, prompt: list[int], cache: DynamicCache, budget: int | None) -> tuple[torch.Tensor, Watch | None]:
        """Attend and compress a prompt; a prompt within the budget is not compressed and has no watch."""
        if self._press is None or len(prompt) <= budget:
            return self._forward(prompt, 0, cache), None
        watch = Watch(self._press, self._record)
        self._press.compression_ratio = ratio_removed(len(prompt), budget)
        with self._press(self._model):
            return self._forward(prompt, 0, cache), watch

    def _decode(
        self, request: dict[str, Any], logits: torch.Tensor, position: int, cache: DynamicCache
    ) -> tuple[list[int], str]:
        stop = request["stop_token_ids"]
        token_ids: list[int] = []
        while True:
            if len(token_ids) < request["min_new_tokens"]:
                logits[stop] = float("-inf")
            token = int(logits.argmax())
            if token in stop:
                return token_ids, "stop"
            token_ids.append(token)
            if len(token_ids) == request["max_new_tokens"]:
                return token_ids, "length"
            logits = self._forward([token], position, cache)
            position += 1

    def _forward(self, token_ids: list[int], position: int, cache: DynamicCache) -> torch.Tensor:
        """Logits [V] after the last of `token_ids`, the first of which has logical position `position`."""
        device = self._model.device
        return self._model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.arange(position, position + len(token_ids), device=device)[None],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[0, -1]

    def _kept_by_head(self, cache: DynamicCache, compressed: bool) -> list[list[int]]:
        counts = [[layer.keys.shape[2]] * layer.keys.shape[1] for layer in cache.layers]
        for module in self._model.modules() if compressed else ():
            masked = getattr(module, "masked_key_indices", None)
            for head in () if masked is None else masked[1].tolist():
                counts[module.layer_idx][head] -= 1
        return counts

    @torch.inference_mode()
    def _count_token_bytes(self) -> int:
        cache = DynamicCache()
        self._forward([0], 0, cache)
        return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--revision")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--press", type=json.loads, help="JSON; see build_press. Without it nothing is compressed")
    parser.add_argument("--budget", type=int, help="prompt tokens that stay, unless a line says otherwise")
    parser.add_argument("--record-positions", action="store_true", help="report which prompt positions stay")
    return parser.parse_args()


def take_stdout() -> TextIO:
    """The real standard output; what libraries print goes to standard error from now on."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def main() -> int:
    """Serve requests until standard input ends."""
    out = take_stdout()

    def write(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        session = Session(parse_arguments())
    except RefusedError as error:
        write({"error": str(error)})
        return EXIT_REFUSED
    versions = {name: version(name) for name in REPORTED_PACKAGES}
    write({"versions": versions, "bytes_per_token": session.bytes_per_token})
    for line in sys.stdin:
        write(session.answer(json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
