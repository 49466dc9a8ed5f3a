"""What RULER fetches from the network and this project takes from a local folder: essays, SQuAD, HotpotQA."""

import functools
import json
import re
from pathlib import Path
from random import Random
from typing import Any

from harness.benchmarks.filler import sentences
from harness.benchmarks.ruler.source import take
from harness.errors import UserError

ESSAYS = "essays.txt"
QA_FILES = {"ruler_qa_squad": "dev-v2.0.json", "ruler_qa_hotpot": "hotpot_dev_distractor_v1.json"}
_READERS = {"ruler_qa_squad": "read_squad", "ruler_qa_hotpot": "read_hotpotqa"}
OWN_FILLER = "filler of this project"
_FILLER_SENTENCES = 4000


def essay_source(folder: Path | None) -> str:
    """Return what the haystack of the essay tasks is: the file, or OWN_FILLER without one."""
    return str(folder / ESSAYS) if folder is not None and (folder / ESSAYS).is_file() else OWN_FILLER


def essay_words(folder: Path | None, at_least: int) -> list[str]:
    """Return the words of the haystack of the essay tasks, over again where it is short."""
    words = _words(essay_source(folder))
    return words * -(-at_least // len(words))


def missing_file(task: str, folder: Path | None) -> str | None:
    """Return the name of the file that a question-answering task needs and that is not there; None if all is."""
    name = QA_FILES.get(task)
    return name if name and (folder is None or not (folder / name).is_file()) else None


@functools.cache
def questions(task: str, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return questions and documents as lm-eval reads them from the published file.

    Raises:
        UserError: the file is not what was published under its name.
    """
    path = folder / QA_FILES[task]
    reader = take(
        "qa_utils.py",
        [_READERS[task]],
        cache=lambda function: function,
        download_json=lambda url: json.loads(path.read_text(encoding="utf-8")),
    )[_READERS[task]]
    try:
        return reader()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the published file ({error!r}). Fetch it again.") from error


@functools.cache
def _words(source: str) -> list[str]:
    if source == OWN_FILLER:
        text = " ".join(sentences("prose", _FILLER_SENTENCES, Random("ruler/essays")))
    else:
        text = Path(source).read_text(encoding="utf-8")
    words = re.sub(r"\s+", " ", text).strip().split(" ")
    if len(words) < 2:
        raise UserError(f"{source} holds no text. Put the essays there, or remove the file.")
    return words
