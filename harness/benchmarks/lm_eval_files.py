"""Where the installed package `lm-eval` keeps its tasks. It is read, never imported, which would take seconds."""

import importlib.util
from pathlib import Path

from harness.errors import UserError

LM_EVAL_VERSION = "0.4.13"
REMEDY = f"Run: pip install lm-eval=={LM_EVAL_VERSION}"


def tasks_folder(name: str) -> Path:
    """Return the folder of one of lm-eval's groups of tasks.

    Raises:
        UserError: lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"lm-eval is not installed; the prompts of {name} are read from it. {REMEDY}")
    return Path(spec.submodule_search_locations[0]) / "tasks" / name
