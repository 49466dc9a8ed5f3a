"""Real rows, where they lie beside the repository, made-up rows and files, and small tokenizers."""

import json
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from harness.benchmarks.longbench.data import load_rows
from harness.benchmarks.longbench.sources import find_rows_file
from harness.benchmarks.rows import Row
from harness.benchmarks.tasks import TASKS

REAL_ROWS = Path(__file__).parents[3] / "../shared/longbench"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant\n\n' }}"
)

needs_real_rows = pytest.mark.skipif(not REAL_ROWS.is_dir(), reason=f"needs real LongBench rows in {REAL_ROWS}")


def real_rows(task, limit=None):
    """Return rows of the published test set."""
    return load_rows(find_rows_file(REAL_ROWS, task), TASKS[task], limit)[0]


def make_row(task="hotpotqa", **changes):
    """Return a small valid row of a task."""
    classes = ("Food", "Date") if TASKS[task].metric == "classification" else None
    values = {
        "row_id": "r1",
        "task": task,
        "context": "Passage 1:\nThe ferry leaves at nine.",
        "input": "When does the ferry leave?",
        "answers": ("nine",),
        "all_classes": classes,
        "length": 12,
        "language": "en",
    }
    return Row(**values | changes)


def record(**changes):
    """A row of hotpotqa as published; a change to `...` leaves the field out."""
    values = {
        "input": "When?",
        "context": "The ferry leaves at nine 🦔 晚安.",
        "answers": ["nine", "9"],
        "length": 9,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    }
    return {name: value for name, value in (values | changes).items() if value is not ...}


def jsonl(*records, end="\n"):
    """Return the records as the bytes of a JSONL file."""
    return b"".join(json.dumps(item, ensure_ascii=False).encode() + end.encode() for item in records)


def write(folder, content, stem="hotpotqa"):
    """Write `<stem>.jsonl` and return its path."""
    file = folder / f"{stem}.jsonl"
    file.write_bytes(content)
    return file


def load(path, limit=None, on_bad_row="fail", longbench_e=False, task="hotpotqa"):
    """Load the rows of a task from a folder or an archive."""
    file = find_rows_file(path, f"{task}_e" if longbench_e else task)
    return load_rows(file, TASKS[task], limit, on_bad_row, longbench_e)


@cache
def make_tokenizer(chat_template=None, adds_bos=False):
    """Return a byte-level BPE tokenizer; `adds_bos` makes it put a BOS before every text, as Llama's does."""
    texts = ["Answer the question based on the given passages. Passage 1:\nThe ferry leaves at nine.", "会议总结：问题"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = chat_template
    return tokenizer
