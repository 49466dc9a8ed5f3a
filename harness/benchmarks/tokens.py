"""The token ids of a prompt text, and where parts of the text lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_DATE = "26 Jul 2024"  # Llama 3.x templates write a date into the prompt: else, today's
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    Attributes:
        ids: everything the model reads.
        start, end: the part that may be cut, which is the prompt without its chat template.
        spans: for every marked character range the range of tokens that hold any of it.
    """

    ids: list[int]
    start: int
    end: int
    spans: tuple[Span, ...] = ()


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, marked: Sequence[Span]) -> Encoded:
    """Encode a prompt without a chat template; all of it may be cut, a BOS at its head included, as in pred.py.

    Args:
        prefix: what stands before the answer, put behind the prompt after one space; "" for nothing.
        marked: character ranges of `text` that are wanted as token ranges.
    """
    whole = f"{text} {prefix}" if prefix else text
    if not marked:
        ids = tokenizer(whole, verbose=False).input_ids
        return Encoded(ids, 0, len(ids))
    encoded = tokenizer(whole, return_offsets_mapping=True, verbose=False)
    return Encoded(encoded.input_ids, 0, len(encoded.input_ids), _spans(encoded.offset_mapping, marked, 0, 0))


def encode_chat(text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, marked: Sequence[Span]) -> Encoded:
    """Encode a prompt inside the chat template, the prefix of the answer being the start of the model's turn.

    The whole text is tokenised at once, as a chat server does, and the prompt is found in it by character offsets; a
    token across the border counts as the template's. A template may strip white space around the prompt. If the
    tokenizer adds a BOS to plain text and the template has none, it is put in front, as pred.py does.

    Raises:
        UserError: the chat template changes the text.
    """
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, date_string=TEMPLATE_DATE
    )
    prompt = text.strip()
    first_char = whole.find(prompt)
    if first_char < 0:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} changes the user's text, so its prompts cannot be cut. "
            "Choose another model, or a tokenizer without a chat template."
        )
    last_char = first_char + len(prompt)
    encoded = tokenizer(whole + prefix, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded.offset_mapping
    start = next(index for index, (begin, _) in enumerate(offsets) if begin >= first_char)
    end = len(offsets) - next(index for index, (_, stop) in enumerate(reversed(offsets)) if stop <= last_char)
    added = tokenizer("").input_ids
    shift = len(added) if encoded.input_ids[: len(added)] != added else 0
    spans = _spans(offsets, marked, first_char - text.index(prompt), shift)
    return Encoded(added[:shift] + encoded.input_ids, start + shift, end + shift, spans)


def cut_spans(encoded: Encoded, num_removed: int) -> tuple[Span, ...]:
    """Where the spans lie after `num_removed` tokens were cut out of the middle; none if any of them lost a token."""
    if not num_removed:
        return encoded.spans
    first_gone = encoded.start + (encoded.end - encoded.start - num_removed) // 2
    first_kept = first_gone + num_removed
    if any(end > first_gone and start < first_kept for start, end in encoded.spans):
        return ()
    shifts = (num_removed if start >= first_kept else 0 for start, _ in encoded.spans)
    return tuple((start - shift, end - shift) for (start, end), shift in zip(encoded.spans, shifts, strict=True))


def _spans(offsets: Sequence[Span], marked: Sequence[Span], shift_chars: int, shift_tokens: int) -> tuple[Span, ...]:
    found = []
    for first, last in marked:
        inside = [
            index
            for index, (begin, stop) in enumerate(offsets)
            if stop > first + shift_chars and begin < last + shift_chars
        ]
        found.append((inside[0] + shift_tokens, inside[-1] + 1 + shift_tokens))
    return tuple(found)
