"""Run folders as the report sees them: read, checked, put into groups that may be compared, and labelled."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.benchmarks.longbench.aggregates import ENGLISH, Average, average, overall_average
from harness.benchmarks.longbench.own_averages import language_averages
from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.tasks import TASKS
from harness.budget import budget_text
from harness.errors import UserError
from harness.metrics import run_metrics, task_scores
from harness.store.manifest import FILE_NAME as MANIFEST
from harness.store.manifest import Manifest, digest, read_manifest
from harness.store.predictions import FILE_NAME as PREDICTIONS
from harness.store.predictions import Prediction, predictions_sha256, read_predictions

Budget = int | float | None
FULL_CACHE_POLICY = "full"
MINI = "mini"


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        predictions: its scored samples.
        unscored: samples answered but not scored, because the run was killed before.
        variant: settings that tell it from the other runs of its policy and budget, "" if there are none.
    """

    folder: Path
    manifest: Manifest
    predictions: Sequence[Prediction]
    unscored: Sequence[Prediction]
    variant: str = ""

    @property
    def num_unscored(self) -> int:
        """Samples that are answered and have no score."""
        return len(self.unscored)

    @property
    def answered(self) -> Sequence[Prediction]:
        """All samples that are answered, scored or not: what memory, speed and evictions are of."""
        return [*self.predictions, *self.unscored]

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.manifest.config["policy"]["name"]

    @property
    def budget(self) -> Budget:
        """Resident tokens a layer and KV head, or a share of the prompt (below 1); None for the full cache."""
        return self.manifest.config["policy"]["budget"]

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.manifest.config["model"]["name"]

    @property
    def block_size(self) -> int:
        """Tokens a KV block."""
        return self.manifest.config["engine"]["block_size"]

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.manifest.config["engine"]["name"]

    @property
    def max_num_seqs(self) -> int:
        """Requests that ran at once, at most."""
        return self.manifest.config["engine"]["max_num_seqs"]

    @property
    def is_finished(self) -> bool:
        """Whether every sample that was asked for has its score."""
        return self.manifest.status == "finished"

    @property
    def series(self) -> str:
        """Policy and variant: runs of one series differ in their budget only."""
        return f"{self.policy} ({self.variant})" if self.variant else self.policy

    @property
    def label(self) -> str:
        """Series and budget; says so if the run is not finished."""
        budget = "" if self.budget is None else f" @ {budget_text(self.budget)}"
        return f"{self.series}{budget}{'' if self.is_finished else f' [{self.manifest.status}]'}"

    @cached_property
    def scores(self) -> dict[str, TaskScore]:
        """Task scores from the recorded sample scores, in LongBench's order."""
        return task_scores(self.manifest, self.predictions)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """All numbers of the run, see `run_metrics`."""
        return run_metrics(self.manifest, self.answered)

    @cached_property
    def averages(self) -> list[Average]:
        """Means of task scores: all of LongBench, English and code tasks, then LongBench's own by language.

        Own tasks are in none of them; a run of own tasks alone has their mean in the place of the first.
        """
        expected = self._expected()
        english = {task: rows for task, rows in expected.items() if PUBLISHED[task].language != "zh"}
        overall = overall_average(self.scores, expected or self.manifest.data["num_expected"])
        return [overall, average(ENGLISH, self.scores, english), *language_averages(self.scores, expected)]

    def _expected(self) -> dict[str, int]:
        """Rows of every task of LongBench, of tasks left out too, so that an average without them is partial.

        None in a run of own tasks alone.
        """
        benchmark = self.manifest.config["benchmark"]
        recorded = {task: rows for task, rows in self.manifest.data["num_expected"].items() if task in PUBLISHED}
        if not recorded:
            return {}
        if benchmark["longbench_e"]:
            published = {task: PUBLISHED[task].num_rows_e for task in LONGBENCH_E_TASKS}
        else:
            published = {name: task.num_rows for name, task in PUBLISHED.items()}
        if benchmark["source"] == MINI:
            published = dict.fromkeys(published, benchmark["limit"])
        return published | recorded


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: one model in one precision on one kind of device, the same samples, the same scoring.

    Attributes:
        name: fit for a file name, unique in the report.
        title: for people.
        runs: the full cache first, then by budget and name; failed runs are not among them.
    """

    name: str
    title: str
    runs: Sequence[Run]

    @property
    def finished(self) -> list[Run]:
        """The runs whose samples are all there."""
        return [run for run in self.runs if run.is_finished]

    def baseline(self, run: Run) -> Run | None:
        """The full-cache run to hold the scores of `run` against: rather one of its engine, then of its block size."""

        def distance(other: Run) -> tuple[bool, bool]:
            return other.engine != run.engine, other.block_size != run.block_size

        return min(self._full_cache_runs(run), key=distance, default=None)

    def cost_baseline(self, run: Run) -> Run | None:
        """The full-cache run to hold memory against: of the same engine with as many requests at once, else none."""
        alike = [
            other
            for other in self._full_cache_runs(run)
            if (other.engine, other.max_num_seqs) == (run.engine, run.max_num_seqs)
        ]
        return min(alike, key=lambda other: other.block_size != run.block_size, default=None)

    def _full_cache_runs(self, run: Run) -> list[Run]:
        return [other for other in self.finished if other.policy == FULL_CACHE_POLICY and other is not run]


def find_folders(paths: Sequence[Path], file_name: str) -> list[Path]:
    """Every folder at or below `paths` that holds a file of that name, sorted, each once.

    Raises:
        UserError: one of the paths does not exist.
    """
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist. Give run folders, or folders that hold run folders.")
    return sorted({file.parent.resolve() for path in paths for file in path.rglob(file_name)})


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run at or below `paths`.

    Raises:
        UserError: a path does not exist, or a run cannot be read.
    """
    return [_read_run(folder) for folder in find_folders(paths, MANIFEST)]


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """Put runs that may be compared side by side, and give each run its variant; most runs first, no failed ones."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        if run.manifest.status != "failed":
            by_key.setdefault(digest(_comparable(run)), []).append(run)
    names = [_group_name(members[0]) for members in by_key.values()]
    groups = []
    for (key, members), name in zip(by_key.items(), names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}-{key[:6]}"
        groups.append(Group(unique, _group_title(members[0]), _labelled(members)))
    return sorted(groups, key=lambda group: (-len(group.runs), group.name))


def _read_run(folder: Path) -> Run:
    manifest, predictions = read_manifest(folder), read_predictions(folder)
    for task in manifest.data["num_expected"]:
        if task not in TASKS:
            raise UserError(f"{folder} is of task {task}, unknown here. Install the package that registers it.")
    _refuse_damage(folder, manifest, predictions)
    scored = [prediction for prediction in predictions if prediction.score is not None]
    return Run(folder, manifest, scored, [prediction for prediction in predictions if prediction.score is None])


def _refuse_damage(folder: Path, manifest: Manifest, predictions: Sequence[Prediction]) -> None:
    """Refuse predictions that the run did not write, as far as its record tells."""
    if manifest.status == "finished" and manifest.predictions_sha256 not in (None, predictions_sha256(folder)):
        raise UserError(f"{folder / PREDICTIONS} is not what this run wrote when it finished. Put it back, or move it.")
    for task, expected in manifest.data["num_expected"].items():
        found = sum(prediction.task == task for prediction in predictions)
        if found > expected:
            raise UserError(f"{folder / PREDICTIONS} has {found} samples of {task}, which has {expected}. Mend it.")


def _comparable(run: Run) -> list[Any]:
    config, hardware = run.manifest.config, run.manifest.hardware
    benchmark = config["benchmark"]
    keys = ("longbench_e", "min_prompt_tokens", "max_prompt_tokens", "edit_similarity")
    return [
        run.manifest.data["content_sha256"],
        [config["model"][key] for key in ("name", "path", "revision", "dtype", "max_model_len")],
        [benchmark[key] for key in keys],
        [hardware["device"], [gpu["name"] for gpu in hardware["gpus"]]],
    ]


def _group_name(run: Run) -> str:
    benchmark = run.manifest.config["benchmark"]
    limit = "" if benchmark["limit"] is None else f"-limit{benchmark['limit']}"
    return f"{run.model}-{benchmark['name']}{limit}"


def _group_title(run: Run) -> str:
    return f"{run.model} on {run.manifest.config['benchmark']['name']}"


def _labelled(members: Sequence[Run]) -> list[Run]:
    variants = _variants(members)
    named = [replace(run, variant=variant) for run, variant in zip(members, variants, strict=True)]
    return sorted(named, key=lambda run: (run.budget is not None, run.budget or 0, run.series))


def _variants(members: Sequence[Run]) -> list[str]:
    """What to call each run beside policy and budget: differing settings, then, if that is not enough, the run id."""
    engines = [_engine_settings(run) for run in members]
    variants = []
    for run, engine in zip(members, engines, strict=True):
        options = [run.manifest.config["policy"]["options"], *_options_of(run.policy, members)]
        variants.append(", ".join([*_differing(options), *_differing([engine, *engines])]))
    seen = Counter((run.policy, run.budget, variant) for run, variant in zip(members, variants, strict=True))
    return [
        variant if seen[run.policy, run.budget, variant] == 1 else f"{variant} {run.manifest.run_id[-6:]}".strip()
        for run, variant in zip(members, variants, strict=True)
    ]


def _engine_settings(run: Run) -> dict[str, Any]:
    settings = run.manifest.config["engine"]
    return {"engine" if key == "name" else key: value for key, value in settings.items()}


def _options_of(policy: str, members: Sequence[Run]) -> list[dict[str, Any]]:
    return [run.manifest.config["policy"]["options"] for run in members if run.policy == policy]


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The first one's settings as "key=value", those in which the others are not all like it."""
    first = settings[0]
    return [f"{key}={first[key]}" for key in first if any(other.get(key) != first[key] for other in settings[1:])]
