"""Classes of heads (DuoAttention, arXiv 2410.10819; HeadKV, arXiv 2410.19258): everything, or sinks and a window."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from policies.classes import WindowOrAll, with_whole_rows
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class HeadClasses(WindowOrAll):
    """Chosen KV heads keep every token; each other head keeps `protect_first` sinks and the most recent, C in all.

    Source: DuoAttention's inference (retrieval heads and streaming heads), HeadKV's in its simplest form (two budgets).
    Which heads is data: a list, or a file of scores of which the best `share` is taken.
    `python -m harness.head_classes` writes one by measuring: it cuts one head at a time to its window and
    notes how much the loss on a needle's answer rises. DuoAttention trains a gate per head, HeadKV scores heads by
    retrieval and reasoning over many examples: neither is here; a list of theirs can be given as `heads`.

    Needs positions only. Acts once the prompt was attended and whenever the newest block is full. The mean follows from
    the share of chosen heads; a block of the pool is free once a page of each layer and head is, and until then the
    windows keep what is left over. Counts are whole pages, the newest as full as everywhere, so at most C.

    Attributes:
        heads: the chosen ones as [layer, KV head] pairs, counted from 0.
        file: JSON with "scores", by layer and KV head; not with `heads`.
        share: of all heads that are chosen by `file`, the highest scores first.
        protect_first: sinks.
    """

    name: ClassVar[str] = "head_classes"

    protect_first: int = 4
    heads: tuple[tuple[int, int], ...] | None = None
    file: str | None = None
    share: float = 0.5

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.share", self.share, 0, 1)
        if self.heads is not None and self.file is not None:
            raise ValueError("policy.options.heads and policy.options.file are both given. Remove one.")
        if self.heads is not None:
            object.__setattr__(self, "heads", tuple(_pair(entry) for entry in _entries(self.heads)))
        super().__post_init__()

    def for_model(self, num_layers: int, num_kv_heads: int) -> Self:
        """A copy that knows which heads keep everything.

        Raises:
            ValueError: there is no list, it names a head that the model lacks, or the file is not one of this model.
        """
        if self.heads is None and self.file is None:
            raise ValueError(
                "policy=head_classes needs policy.options.heads, a list of [layer, head], or policy.options.file. "
                "python -m harness.head_classes measures one."
            )
        chosen = self.heads if self.file is None else _best(self.file, self.share, num_layers, num_kv_heads)
        for layer, head in chosen:
            if not (0 <= layer < num_layers and 0 <= head < num_kv_heads):
                raise ValueError(
                    f"policy.options.heads names [{layer}, {head}], but the model has {num_layers} layers of "
                    f"{num_kv_heads} KV heads. Use layers 0 to {num_layers - 1} and heads 0 to {num_kv_heads - 1}."
                )
        return with_whole_rows(
            self, [[(layer, head) in chosen for head in range(num_kv_heads)] for layer in range(num_layers)]
        )


def _entries(heads: Any) -> list[Any]:  # noqa: ANN401, options come from YAML
    if isinstance(heads, str | dict) or not hasattr(heads, "__iter__"):
        raise ValueError(f"policy.options.heads={heads} is no list. Use a list of [layer, head], as [[0,1],[3,2]].")
    return list(heads)


def _pair(entry: Any) -> tuple[int, int]:  # noqa: ANN401
    pair = tuple(entry) if isinstance(entry, list | tuple) else ()
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise ValueError(f"policy.options.heads holds {entry}. Use pairs of whole numbers, as [[0,1],[3,2]].")
    return pair


def _best(file: str, share: float, num_layers: int, num_kv_heads: int) -> set[tuple[int, int]]:
    """The heads with the highest scores, the earlier one among equals."""
    try:
        scores = json.loads(Path(file).read_text(encoding="utf-8"))["scores"]
        shape = (len(scores), {len(row) for row in scores})
        rated = [(-float(score), layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"policy.options.file={file} holds no scores of heads ({error!r}). Use one that "
            "python -m harness.head_classes wrote."
        ) from None
    if shape != (num_layers, {num_kv_heads}):
        raise ValueError(
            f"policy.options.file={file} is of a model with {shape[0]} layers of {sorted(shape[1])} KV heads, not "
            f"{num_layers} of {num_kv_heads}. Measure this model."
        )
    return {(layer, head) for _, layer, head in sorted(rated)[: round(share * len(rated))]}
