"""The token ids of a prompt text, and where parts of the text lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.benchmarks.chat import ChatTemplate
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "a"
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    Attributes:
        ids: everything the model reads.
        start, end: the part that may be cut, which is the prompt without its chat template.
        text: the same as text, without the special tokens that the tokenizer adds.
        spans: for every marked character range the range of tokens that hold any of it.
    """

    ids: list[int]
    start: int
    end: int
    text: str
    spans: tuple[Span, ...] = ()


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, marked: Sequence[Span]) -> Encoded:
    """Encode a prompt without a chat template; all of it may be cut, a BOS at its head included, as in pred.py.

    An EOS that the tokenizer puts behind a text is left out: what follows is the answer.

    Args:
        prefix: what stands before the answer, put behind the prompt after one space; "" for nothing.
        marked: character ranges of `text` that are wanted as token ranges.
    """
    whole = f"{text} {prefix}" if prefix else text
    if not marked:
        ids = _without_end(tokenizer(whole, verbose=False).input_ids, tokenizer)
        return Encoded(ids, 0, len(ids), whole)
    encoded = tokenizer(whole, return_offsets_mapping=True, verbose=False)
    ids = _without_end(encoded.input_ids, tokenizer)
    return Encoded(ids, 0, len(ids), whole, _spans(encoded.offset_mapping, marked, 0, 0))


def encode_chat(
    text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, marked: Sequence[Span], template: ChatTemplate
) -> Encoded:
    """Encode a prompt inside the chat template, the prefix of the answer being the start of the model's turn.

    The whole text is tokenised at once, as a chat server does, and the prompt is found in it by character offsets; a
    token across the border counts as the template's. A template may strip white space around the prompt. If the
    tokenizer adds a BOS to plain text and the template has none, it is put in front, as pred.py does.

    Raises:
        UserError: the chat template changes the text.
    """
    whole = template.render(text, tokenizer)
    prompt = text.strip()
    first_char = whole.find(prompt)
    if first_char < 0:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} changes the user's text, so its prompts cannot be cut. "
            "Choose another with model.chat_template, or none of them with model.chat_template=none."
        )
    last_char = first_char + len(prompt)
    encoded = tokenizer(whole + prefix, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded.offset_mapping
    start = next(index for index, (begin, _) in enumerate(offsets) if begin >= first_char)
    end = len(offsets) - next(index for index, (_, stop) in enumerate(reversed(offsets)) if stop <= last_char)
    added, _ = special_affixes(tokenizer)
    shift = len(added) if encoded.input_ids[: len(added)] != added else 0
    spans = _spans(offsets, marked, first_char - text.index(prompt), shift)
    return Encoded(added[:shift] + encoded.input_ids, start + shift, end + shift, whole + prefix, spans)


def special_affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and behind a text, such as BOS and EOS."""
    bare = tokenizer(PROBE, add_special_tokens=False).input_ids
    whole = tokenizer(PROBE).input_ids
    places = range(len(whole) - len(bare) + 1)
    first = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
    return whole[:first], whole[first + len(bare) :]


def _without_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    _, behind = special_affixes(tokenizer)
    return ids[: len(ids) - len(behind)] if behind and ids[-len(behind) :] == behind else ids


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
