"""LongBench's prompt templates, read from the installed package `lm-eval`.

No LongBench prompt is copied into this project: lm-eval carries the texts as data (one YAML file a task). Six of them
lack white space the official texts have; `Task.prompt_fix` restores it, and a SHA-256 of the official text guards it.
"""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import yaml

from harness.benchmarks.lm_eval_files import REMEDY, tasks_folder
from harness.benchmarks.task import Task
from harness.errors import UserError


class _DataLoader(yaml.SafeLoader):
    """Reads lm-eval's files as data: what it tags as a Python function becomes None."""


_DataLoader.add_multi_constructor("!", lambda _loader, _suffix, _node: None)


@functools.cache
def official_template(task: Task) -> str:
    """Return the prompt template of one of LongBench's tasks, with `{context}` and `{input}` as placeholders.

    Raises:
        UserError: lm-eval is not installed, or its text is not the official one.
    """
    template = _official_text(task, _lm_eval_text(tasks_folder("longbench") / f"{task.name}.yaml"))
    digest = hashlib.sha256(template.encode()).hexdigest()
    if not digest.startswith(task.prompt_sha256):
        raise UserError(
            f"the prompt of {task.name} in lm-eval {importlib.metadata.version('lm-eval')} is not the official one "
            f"(SHA-256 {digest[:16]}, wanted {task.prompt_sha256}). {REMEDY}"
        )
    return template


def _lm_eval_text(path: Path) -> str:
    try:
        settings = yaml.load(path.read_bytes(), _DataLoader)
        return settings["doc_to_text"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        version = importlib.metadata.version("lm-eval")
        raise UserError(f"no prompt in {path} of lm-eval {version} ({error!r}). {REMEDY}") from error


def _official_text(task: Task, text: str) -> str:
    """Turn lm-eval's Jinja fields into `str.format` fields and restore the official white space."""
    for field, placeholder in (("context", "{context}"), ("question", "{input}"), ("input", "{input}")):
        text = text.replace("{{" + field + "}}", placeholder)
    if task.prompt_fix is None:
        return text
    found, official = task.prompt_fix
    return text.removesuffix(found) + official
