"""Configurations of runs on the scripted engine, for tests that start them in this process."""

import time
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_module

from harness.config import HarnessConfig, register_schema
from harness.config_checks import to_dataclass
from harness.store.predictions import Prediction, read_predictions

COMMAND = "python -m harness"
GENEROUS_S = 240  # for a machine that others use too


def scripted_config(model: Path, results: Path, *overrides: str) -> HarnessConfig:
    """The checked configuration of a run with these overrides."""
    fixed = ["engine.name=tests.scripted_engine:ScriptedEngine", f"model.path={model}", f"results_dir={results}"]
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf"):
        return to_dataclass(compose("config", [*fixed, *overrides]))


def only_folder(results: Path) -> Path:
    """The folder of the only run in `results`."""
    (folder,) = results.iterdir()
    return folder


def by_id(folder: Path) -> dict[str, Prediction]:
    """The predictions of a run, whatever their order."""
    return {prediction.sample_id: prediction for prediction in read_predictions(folder)}


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; fail if it never does."""
    give_up = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)
