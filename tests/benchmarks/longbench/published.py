"""The published prediction sets, which lie beside the repository and not in it."""

from pathlib import Path

import pytest

_SETS = Path(__file__).resolve().parents[4] / "shared" / "longbench_preds"

# Published set -> back end of fuzzywuzzy its code scores were made with. That of the LongBench-E set is not documented:
# only difflib gives its figures.
EDIT_SIMILARITY = {
    "llama3-8b-instruct": "difflib",
    "llama2-7b-chat-4k": "difflib",
    "qwen3-8b-ctx3500": "difflib",
    "rwkv-6-7b": "levenshtein",
    "e_llama2-7b-chat-4k": "difflib",
}


def published_set(name: str) -> Path:
    """The folder of a published set; skips the test where it is absent."""
    folder = _SETS / name
    if not folder.is_dir():
        pytest.skip(f"needs the published predictions {name} in ../shared/longbench_preds")
    return folder
