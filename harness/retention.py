"""`retention.jsonl`: which token positions each layer still held, one line a sample and phase.

A layer is stored as one string. Its lists of ascending positions become whole numbers (how many lists; then for each
list its length and, position by position, the number of positions skipped since the one before), each in LEB128 bytes,
deflated, in base64. Runs of neighbouring positions are runs of zeros, so sinks and windows take next to nothing.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    try:
        numbers = _numbers(zlib.decompress(base64.b64decode(text, validate=True)))
        layer = [_positions(numbers) for _ in range(next(numbers))]
    except (zlib.error, StopIteration, RuntimeError) as error:
        raise ValueError(f"no encoded layer: {error!r}") from None
    if next(numbers, None) is not None:
        raise ValueError("no encoded layer: something follows its last list")
    return layer


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
    path = folder / FILE_NAME
    if not path.exists():
        return []
    content = path.read_bytes()
    found: dict[tuple[str, Phase], RetentionRecord] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = _record(line)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}:{number} is no retention record ({error}). Delete the line.") from None
        found[record.sample_id, record.phase] = record
    return list(found.values())


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


def _record(line: bytes) -> RetentionRecord:
    fields = json.loads(line)
    return RetentionRecord(
        sample_id=fields["sample_id"],
        num_prompt_tokens=fields["num_prompt_tokens"],
        phase=fields["phase"],
        layers=[decode_layer(layer) for layer in fields["layers"]],
    )


def _leb128(number: int) -> bytes:
    encoded = bytearray()
    while number > LOW_BITS:
        encoded.append(number & LOW_BITS | MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _numbers(encoded: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in encoded:
        number |= (byte & LOW_BITS) << shift
        shift += 7
        if byte < MORE:
            yield number
            number = shift = 0


def _positions(numbers: Iterator[int]) -> list[int]:
    positions: list[int] = []
    following = 0
    for _ in range(next(numbers)):
        position = following + next(numbers)
        positions.append(position)
        following = position + 1
    return positions
