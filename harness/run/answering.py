"""Rows in, predictions on disk: the part of a run in which the engine works."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from harness.benchmarks.chat import ChatTemplate, is_cut_in_reasoning
from harness.benchmarks.prompting import Sample, iter_samples
from harness.benchmarks.rows import Row
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import ScoringPool
from harness.benchmarks.tasks import TASKS
from harness.engines.contract import Engine, GenerationRequest, GenerationResult
from harness.errors import UserError
from harness.progress import Progress
from harness.run.session import SessionRecord
from harness.store.predictions import SCORES, Prediction, append_prediction, append_score, open_for_append

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness.engines.prompt_plans import PromptPlan

GOOD_ENDS = ("stop", "length")
NUM_NAMED_FAILURES = 3
STOPPED_SCORING_S = 5.0  # what a run that was told to stop may still wait for scores
FAILED_SCORING_S = 120.0


@dataclass(frozen=True)
class Prompting:
    """What turns a row into a prompt; see `harness.benchmarks.prompting`.

    Attributes:
        plan_of: what the policy means to keep of a prompt, see `harness.engines.prompt_plans`.
    """

    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    template: ChatTemplate | None = None
    plan_of: "Callable[[int], PromptPlan] | None" = None

    def samples(
        self, rows: Iterable[Row], min_prompt_tokens: int | None = None, max_prompt_tokens: int | None = None
    ) -> Iterator[Sample]:
        """The rows as samples, those of other lengths left out."""
        return iter_samples(
            rows,
            self.tokenizer,
            self.max_model_len,
            self.stop_token_ids,
            self.template,
            min_prompt_tokens,
            max_prompt_tokens,
        )

    def record(self, tasks: Iterable[str]) -> dict[str, Any]:
        """What a run's manifest says of its prompts."""
        tasks = list(tasks)
        without = [task for task in tasks if self.template is None or not TASKS[task].chat_template]
        found = None if self.template is None else self.template.record(self.tokenizer)
        return {"chat_template": found, "tasks_without": without}


def answer_rows(
    engine: Engine, rows: Sequence[Row], prompting: Prompting, folder: Path, pool: ScoringPool, record: SessionRecord
) -> None:
    """Answer every row, appending each prediction to the run folder as it comes, and its score as that comes.

    All tasks go to the engine as one stream, the longest work first, so that it never idles between tasks. What the
    engine counted is recorded whichever way this ends, as long as the engine can be asked.

    Raises:
        UserError: the engine did not answer some sample; the others are on disk.
    """
    try:
        _answer(engine, rows, prompting, folder, pool, record)
    except BaseException as error:
        patience = STOPPED_SCORING_S if isinstance(error, KeyboardInterrupt) else FAILED_SCORING_S
        with contextlib.suppress(Exception):
            record.measure(engine)
        with contextlib.suppress(Exception):
            write_scores(folder, pool.ready(patience))
        raise


def write_scores(folder: Path, scores: Mapping[str, SampleScore]) -> None:
    """Append scores to the run folder."""
    with open_for_append(folder, SCORES) as file:
        _append_scores(file, scores)


def _append_scores(file: TextIO, scores: Mapping[str, SampleScore]) -> None:
    for sample_id, score in scores.items():
        append_score(file, sample_id, score.score, score.extra, score.empty)


def _answer(
    engine: Engine, rows: Sequence[Row], prompting: Prompting, folder: Path, pool: ScoringPool, record: SessionRecord
) -> None:
    waiting: dict[str, Sample] = {}
    failed: list[str] = []
    num_answered = 0
    started = time.perf_counter()
    with (
        open_for_append(folder) as file,
        open_for_append(folder, SCORES) as scores,
        Progress("samples", len(rows)) as progress,
    ):
        for result in engine.generate(_requests(rows, prompting, waiting)):
            sample = waiting.pop(result.request_id)
            if result.finish_reason in GOOD_ENDS:
                prediction = _prediction(sample, result, prompting)
                append_prediction(file, prediction)
                submit(pool, prediction)
                record.count(prediction.num_output_tokens, time.perf_counter() - started)
                num_answered += 1
            else:
                failed.append(f"{result.request_id} ({result.finish_reason})")
            _append_scores(scores, pool.ready())
            progress.advance(sample.task)
            record.measure_if_due(engine)
    failed += [f"{sample_id} (no answer)" for sample_id in waiting]
    if num_answered + len(failed) != len(rows):
        raise RuntimeError(f"the engine took {num_answered + len(failed)} of {len(rows)} requests")
    record.measure(engine)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(rows)} samples failed: {', '.join(failed[:NUM_NAMED_FAILURES])}"
            f"{', ...' if len(failed) > NUM_NAMED_FAILURES else ''}. Run the same command again to try only these."
        )


def submit(pool: ScoringPool, prediction: Prediction) -> None:
    """Hand a prediction to the scorers."""
    pool.submit(
        prediction.sample_id, prediction.task, prediction.prediction, prediction.answers, prediction.all_classes
    )


def longest_first(rows: Sequence[Row]) -> list[Row]:
    """Order rows by answer length, then context length, descending: a long answer begun last would run alone."""
    return sorted(rows, key=lambda row: (-TASKS[row.task].max_new_tokens, -len(row.context)))


def _requests(rows: Sequence[Row], prompting: Prompting, waiting: dict[str, Sample]) -> Iterator[GenerationRequest]:
    for sample in prompting.samples(longest_first(rows)):
        waiting[sample.sample_id] = replace(sample, prompt_token_ids=[])
        yield GenerationRequest(
            request_id=sample.sample_id,
            prompt_token_ids=sample.prompt_token_ids,
            max_new_tokens=sample.max_new_tokens,
            stop_token_ids=sample.stop_token_ids,
            min_new_tokens=sample.min_new_tokens,
        )


def _prediction(sample: Sample, result: GenerationResult, prompting: Prompting) -> Prediction:
    row = sample.row
    planned = {} if prompting.plan_of is None else asdict(prompting.plan_of(result.num_prompt_tokens))
    text = prompting.tokenizer.decode(result.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Prediction(
        sample_id=sample.sample_id,
        task=sample.task,
        row_id=row.row_id,
        prediction=text,
        answers=list(row.answers),
        all_classes=None if row.all_classes is None else list(row.all_classes),
        length=row.length,
        context_sha256=hashlib.sha256(row.context.encode()).hexdigest(),
        prompt_sha256=sample.prompt_sha256,
        task_prompt_sha256=sample.task_prompt_sha256,
        cut_in_reasoning=is_cut_in_reasoning(text, sample.opens_reasoning),
        num_prompt_tokens=result.num_prompt_tokens,
        truncated=sample.truncated,
        num_output_tokens=len(result.token_ids),
        finish_reason=result.finish_reason,
        ttft_s=result.ttft_s,
        e2e_s=result.e2e_s,
        depth=row.depth,
        needle_spans=[list(span) for span in sample.needle_spans] or None,
        value_spans=[list(span) for span in sample.value_spans] or None,
        **asdict(result.eviction),
        **planned,
    )
