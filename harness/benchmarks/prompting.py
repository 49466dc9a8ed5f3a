"""From a row to the token ids a model gets: chat template, middle cut, stop tokens.

Follows pred.py of THUDM/LongBench at 2e00731f with three differences, all there to keep the prompt within the model:
the cut is made on token ids (the official script turns both halves into text and tokenises that again, which may give
more tokens than the limit and splits characters), the tokens of the chat template are part of the limit, and the
template's own tokens are never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.benchmarks.chat import ChatTemplate, opens_reasoning
from harness.benchmarks.longbench.prompts import official_template
from harness.benchmarks.rows import Row
from harness.benchmarks.tasks import TASKS, get_task
from harness.benchmarks.tokens import Encoded, Span, cut_spans, encode_chat, encode_plain
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

OWN_TEMPLATE = ChatTemplate()  # the tokenizer's own


@dataclass(frozen=True)
class Sample:
    """A row made ready for a model.

    Attributes:
        sample_id: "<task>/<row id>", unique within a benchmark.
        prompt_token_ids: everything the model reads, BOS and chat template included.
        num_prompt_tokens_before_cut: tokens of the same prompt if nothing is cut.
        truncated: whether the middle of the prompt was cut out.
        chat_template: whether the chat template is around the prompt.
        max_new_tokens: tokens to generate at most.
        stop_token_ids: the answer ends at any of these.
        min_new_tokens: tokens before which no stop token is accepted.
        prompt_sha256: SHA-256 (hex) of the prompt text inside its chat template, before the cut.
        task_prompt_sha256: the same of the prompt text alone.
        opens_reasoning: whether the chat template begins a reasoning block, which the answer then starts inside.
        needle_spans, value_spans: where `row.needles`, and the answers in them, lie in `prompt_token_ids`: first token
            and the one after the last; none if a part of any was cut out.
    """

    sample_id: str
    task: str
    row: Row
    prompt_token_ids: list[int]
    num_prompt_tokens_before_cut: int
    truncated: bool
    chat_template: bool
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    min_new_tokens: int
    prompt_sha256: str
    task_prompt_sha256: str
    opens_reasoning: bool = False
    needle_spans: tuple[Span, ...] = ()
    value_spans: tuple[Span, ...] = ()


def prompt_template(task_name: str) -> str:
    """Return the prompt template of a task, with `{context}` and `{input}` as placeholders.

    Raises:
        UserError: no such task; or one of LongBench's whose text cannot be had, see `official_template`.
    """
    task = get_task(task_name)
    return official_template(task) if task.prompt is None else task.prompt


def render(row: Row) -> str:
    """Return the prompt of a row: what LongBench's `template.format(**row)` returns, to the byte.

    Braces inside the row's own text are left alone, because `str.format` does not look into the values.

    Raises:
        UserError: see `prompt_template`.
    """
    return prompt_template(row.task).format(context=row.context, input=row.input)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Return every end-of-sequence id that the tokenizer, the model or its generation settings name, in order.

    Chat models end a turn with another token than a text (Llama 3: 128009 and 128001), and each of the three places
    may name only one of them.
    """
    ids: set[int] = set()
    for place in (tokenizer, model_config, generation_config):
        named = getattr(place, "eos_token_id", None)
        ids.update(named if isinstance(named, list | tuple) else [] if named is None else [named])
    return tuple(sorted(ids))


def iter_samples(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
    stop_token_ids: tuple[int, ...],
    template: ChatTemplate | None = OWN_TEMPLATE,
    min_prompt_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
) -> Iterator[Sample]:
    """Make samples lazily, in the order of the rows; see `build_sample`.

    Rows whose uncut prompt has fewer than `min_prompt_tokens` or more than `max_prompt_tokens` tokens are left out.

    Raises:
        UserError: a sample cannot be built, or the two limits leave no row.
    """
    num_samples = num_left_out = 0
    for row in rows:
        sample = build_sample(row, tokenizer, max_model_len, stop_token_ids, template)
        num_tokens = sample.num_prompt_tokens_before_cut
        too_short = min_prompt_tokens is not None and num_tokens < min_prompt_tokens
        too_long = max_prompt_tokens is not None and num_tokens > max_prompt_tokens
        if too_short or too_long:
            num_left_out += 1
            continue
        num_samples += 1
        yield sample
    if num_left_out and not num_samples:
        raise UserError(
            f"no row is left: benchmark.min_prompt_tokens={min_prompt_tokens} and "
            f"benchmark.max_prompt_tokens={max_prompt_tokens} rule out every prompt. Widen them."
        )


def build_sample(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
    stop_token_ids: tuple[int, ...],
    template: ChatTemplate | None = OWN_TEMPLATE,
) -> Sample:
    """Make the sample of one row; prompt and answer together fit into `max_model_len` tokens.

    Args:
        stop_token_ids: end-of-sequence ids, see the function of that name.
        template: around the prompt; None for a model that was not trained on chats. A tokenizer without a chat
            template has the same effect, and few-shot and code tasks never get one.

    Raises:
        UserError: `max_model_len` leaves no room for a prompt, or the chat template changes the user's text.
    """
    task = TASKS[row.task]
    encoded = encode_row(row, tokenizer, template)
    ids, start, end = encoded.ids, encoded.start, encoded.end
    limit = max_model_len - task.max_new_tokens - (len(ids) - (end - start))
    if limit < 2:
        raise UserError(
            f"model.max_model_len={max_model_len} leaves no room for a prompt of {row.task}: {task.max_new_tokens} "
            f"tokens are for the answer and {len(ids) - (end - start)} for the chat template. Raise it to at least "
            f"{max_model_len - limit + 2}."
        )
    prompt_token_ids = ids[:start] + middle_cut(ids[start:end], limit) + ids[end:]
    spans = cut_spans(encoded, len(ids) - len(prompt_token_ids))
    if task.stop_at_newline:
        stop_token_ids = (*stop_token_ids, tokenizer.encode("\n", add_special_tokens=False)[-1])
    return Sample(
        sample_id=f"{row.task}/{row.row_id}",
        task=row.task,
        row=row,
        prompt_token_ids=prompt_token_ids,
        num_prompt_tokens_before_cut=len(ids),
        truncated=len(prompt_token_ids) < len(ids),
        chat_template=_template_of(row, tokenizer, template) is not None,
        max_new_tokens=task.max_new_tokens,
        stop_token_ids=stop_token_ids,
        min_new_tokens=int(task.stop_at_newline),
        prompt_sha256=_sha256(encoded.text),
        task_prompt_sha256=_sha256(render(row)),
        opens_reasoning=opens_reasoning(encoded.text),
        needle_spans=spans[: len(row.needles)],
        value_spans=spans[len(row.needles) :],
    )


def prompt_sha256(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None = OWN_TEMPLATE) -> str:
    """Return `Sample.prompt_sha256` of a row; nothing is tokenised."""
    text, used = render(row), _template_of(row, tokenizer, template)
    if used is not None:
        return _sha256(used.render(text, tokenizer) + row.answer_prefix)
    return _sha256(f"{text} {row.answer_prefix}" if row.answer_prefix else text)


def middle_cut(token_ids: list[int], limit: int) -> list[int]:
    """Keep the first and the last `int(limit / 2)` tokens of a prompt longer than `limit`, as pred.py does.

    `limit` is at least 2; an odd one keeps one token less than it allows.
    """
    if len(token_ids) <= limit:
        return token_ids
    half = limit // 2
    return token_ids[:half] + token_ids[-half:]


def encode_row(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None = OWN_TEMPLATE) -> Encoded:
    """Return the uncut prompt of a row; its spans are those of the needles, then those of the answers in them.

    Raises:
        UserError: the chat template changes the text.
    """
    text = render(row)
    needles = [(text.index(needle), needle) for needle in row.needles]
    values = [(at + needle.index(answer), answer) for (at, needle), answer in zip(needles, row.answers, strict=False)]
    marked = [(at, at + len(part)) for at, part in needles + values]
    used = _template_of(row, tokenizer, template)
    if used is None:
        return encode_plain(text, tokenizer, row.answer_prefix, marked)
    return encode_chat(text, tokenizer, row.answer_prefix, marked, used)


def _template_of(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None) -> ChatTemplate | None:
    """The template around this row's prompt, None where there is none."""
    if template is None or not TASKS[row.task].chat_template or not template.is_there(tokenizer):
        return None
    return template


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
