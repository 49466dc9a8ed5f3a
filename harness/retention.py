"""`retention.jsonl`: which token positions each layer still held, one line a sample and phase.

A layer is stored as one string. Its lists of ascending positions become whole numbers (how many lists; then for each
list its length and, position by position, the number of positions skipped since the one before), each in LEB128 bytes,
deflated, in base64. Runs of neighbouring positions are runs of zeros, so sinks and windows take next to nothing.
"""

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.errors import UserError

FILE_NAME = "retention.jsonl"
LOW_BITS, MORE = 0x7F, 0x80

Phase = Literal["prefill_end", "end"]


@dataclass(frozen=True)
class RetentionRecord:
    """What was resident of one sample at one moment.

    Attributes:
        sample_id: as in `predictions.jsonl`.
        num_prompt_tokens: positions below it are the prompt, the others the answer.
        phase: "prefill_end": the prompt has been read and evicted from; "end": the last token has been generated.
        layers: for every layer one ascending list of positions a KV head, or a single list that all heads share.
    """

    sample_id: str
    num_prompt_tokens: int
    phase: Phase
    layers: Sequence[Sequence[Sequence[int]]]


def encode_layer(lists: Sequence[Sequence[int]]) -> str:
    """The positions of one layer as text.

    Raises:
        ValueError: positions are negative or not strictly ascending.
    """
    numbers = [len(lists)]
    for positions in lists:
        numbers.append(len(positions))
        following = 0
        for position in positions:
            if position < following:
                raise ValueError(f"position {position} comes after position {following - 1}: not ascending")
            numbers.append(position - following)
            following = position + 1
    return base64.b64encode(zlib.compress(b"".join(map(_leb128, numbers)), 9)).decode()


def decode_layer(text: str) -> list[list[int]]:
    """The inverse of `encode_layer`.

    Raises:
        ValueError: the text is no encoded layer.
    """
    return [positions.tolist() for positions in decode_arrays(text)]


def decode_arrays(text: str) -> list[np.ndarray]:
    """As `decode_layer`, every list as an array of whole numbers: fifty times as fast for thousands of positions.

    Raises:
        ValueError: the text is no encoded layer.
    """
    try:
        numbers = _numbers(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"no encoded layer: {error!r}") from None
    lists, at = [], 1
    for _ in range(int(numbers[0]) if len(numbers) else 1):
        end = at + 1 + int(numbers[at]) if at < len(numbers) else len(numbers) + 1
        if end > len(numbers):
            raise ValueError("no encoded layer: it ends too early")
        lists.append(np.cumsum(numbers[at + 1 : end] + 1) - 1)
        at = end
    if at != len(numbers):
        raise ValueError("no encoded layer: something follows its last list")
    return lists


def append_retention(folder: Path, records: Iterable[RetentionRecord]) -> None:
    """Add records to the run's file, first cutting off a line that a crash left unfinished."""
    path = folder / FILE_NAME
    if path.exists() and not _ends_a_line(path):
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(_line(record) for record in records)


def read_retention(folder: Path) -> list[RetentionRecord]:
    """The records of a run, none if it recorded none; of a sample that was done again the last one of a phase.

    Raises:
        UserError: a line cannot be read.
    """
    return list(iterate_retention(folder, decode_layer))


def iterate_retention(folder: Path, decode: Callable[[str], Sequence[Sequence[int]]]) -> Iterator[RetentionRecord]:
    """As `read_retention`, one record after the other, its layers as `decode` makes them; each is decoded once.

    Raises:
        UserError: a line cannot be read.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    content = path.read_bytes()
    lines: dict[tuple[str, Phase], tuple[int, dict[str, Any]]] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        with _named(path, number):
            fields = json.loads(line)
            lines[fields["sample_id"], fields["phase"]] = number, fields
    for number, fields in lines.values():
        with _named(path, number):
            layers = [decode(layer) for layer in fields["layers"]]
            record = RetentionRecord(fields["sample_id"], fields["num_prompt_tokens"], fields["phase"], layers)
        yield record


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}:{number} is no retention record ({error}). Delete the line.") from None


def _ends_a_line(path: Path) -> bool:
    """Whether the file is empty or its last line is whole; reads one byte, as files grow to many megabytes."""
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END) == 0 or (file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == b"\n")


def _line(record: RetentionRecord) -> str:
    fields = {
        "sample_id": record.sample_id,
        "num_prompt_tokens": record.num_prompt_tokens,
        "phase": record.phase,
        "layers": [encode_layer(layer) for layer in record.layers],
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _leb128(number: int) -> bytes:
    encoded = bytearray()
    while number > LOW_BITS:
        encoded.append(number & LOW_BITS | MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _numbers(encoded: bytes) -> np.ndarray:
    """The numbers of LEB128 bytes: seven bits a byte, the lowest first; a byte below 128 ends a number."""
    content = np.frombuffer(encoded, dtype=np.uint8)
    last = np.flatnonzero(content < MORE)
    if not len(last) or last[-1] != len(content) - 1:
        raise ValueError("no encoded layer: its last number is cut off")
    starts = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(content)) - np.repeat(starts, last - starts + 1)
    return np.add.reduceat((content & LOW_BITS).astype(np.int64) << 7 * place, starts)
