"""Single samples as plain data for the page's script, in packets that are unpacked when shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.benchmarks.tasks import TASKS
from harness.report.page.packing import packed
from harness.report.reading.prompts import load_prompts
from harness.report.reading.retention import Maps, read_maps
from harness.report.reading.runs import Group, Run
from harness.store.predictions import Prediction
from harness.store.prompts import Prompt, by_name

MAX_MAPS_PER_TASK = 2
LEVELS = "0123456789abcdef"


class SamplePackets:
    """The samples of one group: an index that is small, and one packet of details a task."""

    def __init__(self, group: Group, samples_per_task: int) -> None:
        """Choose the first `samples_per_task` samples of each task, in the order of the data, that any run has."""
        self._runs = [run for run in group.runs if run.predictions]
        self._by_run = [{sample.sample_id: sample for sample in run.predictions} for run in self._runs]
        self._chosen = _choose(self._by_run, samples_per_task)
        self._prompts, self.missing_prompts = load_prompts(self._runs) if self._runs else ({}, "no sample")
        self._maps = [read_maps(run) for run in self._runs]

    def index(self) -> dict[str, Any]:
        """Runs, and per task the samples with their score in every run (None: not in it)."""
        return {
            "runs": [_run(run) for run in self._runs],
            "missingPrompts": self.missing_prompts,
            "mapsPerTask": MAX_MAPS_PER_TASK if any(self._maps) else 0,
            "numSamples": max((len(samples) for samples in self._by_run), default=0),
            "tasks": {
                task: [[sample_id, [self._score(samples, sample_id) for samples in self._by_run]] for sample_id in ids]
                for task, ids in self._chosen.items()
            },
        }

    def packets(self) -> dict[str, str]:
        """Details by task: JSON, deflated, in base64."""
        return {task: packed(self._details(ids)) for task, ids in self._chosen.items()}

    def _score(self, samples: Mapping[str, Prediction], sample_id: str) -> float | None:
        return round(100 * samples[sample_id].score, 1) if sample_id in samples else None

    def _details(self, sample_ids: Sequence[str]) -> dict[str, Any]:
        mapped = {sample_id for maps in self._maps for sample_id, _ in maps}
        with_maps = [sample_id for sample_id in sample_ids if sample_id in mapped][:MAX_MAPS_PER_TASK]
        return {sample_id: self._detail(sample_id, sample_id in with_maps) for sample_id in sample_ids}

    def _detail(self, sample_id: str, with_maps: bool) -> dict[str, Any]:
        answered = {index: samples[sample_id] for index, samples in enumerate(self._by_run) if sample_id in samples}
        anyone = next(iter(answered.values()))
        maps = {index: _maps_of(self._maps[index], sample_id) for index in answered} if with_maps else {}
        return {
            "prompt": _prompt(self._prompts.get(sample_id)),
            "answers": anyone.answers,
            "promptTokens": anyone.num_prompt_tokens,
            "truncated": anyone.truncated,
            "runs": {index: _answer(one) for index, one in answered.items()},
            "maps": {index: found for index, found in maps.items() if found},
        }


def _choose(by_run: Sequence[Mapping[str, Prediction]], samples_per_task: int) -> dict[str, list[str]]:
    task_of = {sample_id: sample.task for samples in by_run for sample_id, sample in samples.items()}
    chosen: dict[str, list[str]] = {task: [] for task in TASKS}
    for sample_id in by_name(task_of):
        if len(chosen[task_of[sample_id]]) < samples_per_task:
            chosen[task_of[sample_id]].append(sample_id)
    return {task: ids for task, ids in chosen.items() if ids}


def _run(run: Run) -> dict[str, Any]:
    return {"label": run.label, "budget": run.budget, "id": run.manifest.run_id}


def _prompt(prompt: Prompt | None) -> dict[str, Any] | None:
    return None if prompt is None else {key: getattr(prompt, key) for key in ("question", "head", "cut", "tail")}


def _answer(one: Prediction) -> dict[str, Any]:
    return {
        "text": one.prediction,
        "score": round(100 * one.score, 2),
        "tokens": one.num_output_tokens,
        "finish": one.finish_reason,
        "evictions": one.num_evictions,
        "evicted": one.num_evicted_tokens,
        "peak": one.peak_resident_tokens,
        "final": one.final_resident_tokens,
        "ttft": one.ttft_s,
        "e2e": one.e2e_s,
    }


def _maps_of(maps: Maps, sample_id: str) -> dict[str, Any]:
    """Maps by phase: one text a layer, one digit a bin, "0" nothing kept, "f" everything."""
    return {
        phase: {
            "tokens": one.num_tokens,
            "prompt": one.num_prompt_tokens,
            "rows": ["".join(LEVELS[round(share * (len(LEVELS) - 1))] for share in row) for row in one.shares],
        }
        for (name, phase), one in maps.items()
        if name == sample_id
    }
