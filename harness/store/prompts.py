"""`prompts.jsonl`: how prompts begin and end, of rows that are made for a run and that nobody could load again."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.errors import UserError
from harness.store.manifest import write_atomically

FILE_NAME = "prompts.jsonl"
MAX_CHARS = 4000
MAX_PER_TASK = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt, uncut by the model's context and without chat template.

    Attributes:
        question: what is asked, the row's own `input`, and before it what has to be found, if that is known.
        head, tail: its first and last characters, at most `MAX_CHARS` together.
        cut: characters between them.
    """

    sample_id: str
    question: str
    head: str
    cut: int
    tail: str


def excerpt(sample_id: str, question: str, text: str) -> Prompt:
    """The prompt `text` without its middle, if it is long."""
    half = MAX_CHARS // 2
    if len(text) <= MAX_CHARS:
        return Prompt(sample_id, question[-half:], text, 0, "")
    return Prompt(sample_id, question[-half:], text[:half], len(text) - 2 * half, text[-half:])


def by_name(sample_ids: Iterable[str]) -> list[str]:
    """Order "x-2" before "x-10"; the first of a task are those that are kept, and shown."""
    return sorted(sample_ids, key=lambda sample_id: (len(sample_id), sample_id))


def write_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Write the file anew."""
    lines = (json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomically(folder / FILE_NAME, "".join(lines))


def read_prompts(folder: Path) -> dict[str, Prompt]:
    """The prompts of a run by sample, none if it kept none.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return {}
    try:
        found = [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}). Delete it: the page does without.") from None
    return {prompt.sample_id: prompt for prompt in found}
