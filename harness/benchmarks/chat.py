"""The chat template around a prompt: which one, with which arguments, on which day; and reasoning in answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_DAY = datetime(2024, 7, 26)  # some templates write a date into the prompt: else, today's
DATE_FORMAT = "%d %b %Y"
NO_TEMPLATE = "none"
DEFAULT = "default"
THINK, END_OF_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ChatTemplate:
    """How a user's text is put to a chat model.

    Attributes:
        name: the tokenizer's name for it, or the file that it was read from.
        source: Jinja; None for the tokenizer's own default, if it has one.
        arguments: further variables of the template, such as `enable_thinking`.
    """

    name: str = DEFAULT
    source: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def is_there(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether there is a template at all."""
        return self.source is not None or tokenizer.chat_template is not None

    def render(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text as the user's turn, up to where the model's begins; dates are always those of one day."""
        dated = {"date_string": TEMPLATE_DAY.strftime(DATE_FORMAT), "strftime_now": TEMPLATE_DAY.strftime}
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=True,
            **dated | dict(self.arguments),
        )

    def record(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What a run's manifest says of it."""
        source = self.source or tokenizer.get_chat_template()
        digest = hashlib.sha256(source.encode()).hexdigest()
        return {"name": self.name, "sha256": digest, "arguments": dict(self.arguments)}


def choose_template(
    tokenizer: PreTrainedTokenizerBase, wanted: str | None, arguments: Mapping[str, Any]
) -> ChatTemplate | None:
    """The template to use; None where prompts go to the model as they are.

    Args:
        wanted: `model.chat_template`: None for the tokenizer's default, the name of one of its templates, a Jinja
            file, or "none".
        arguments: `model.template_arguments`.

    Raises:
        UserError: there is no such template, or several and no default.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else None
    if wanted == NO_TEMPLATE or (wanted is None and tokenizer.chat_template is None):
        if arguments:
            raise UserError(
                f"model.template_arguments={dict(arguments)} has no effect without a chat template. Remove it."
            )
        return None
    if wanted is None:
        if named is not None and DEFAULT not in named:
            raise UserError(
                f"the tokenizer has the chat templates {', '.join(sorted(named))} and no default. "
                "Choose one with model.chat_template=NAME."
            )
        source = named[DEFAULT] if named is not None else tokenizer.chat_template
        return ChatTemplate(DEFAULT, source, dict(arguments))
    if named is not None and wanted in named:
        return ChatTemplate(wanted, named[wanted], dict(arguments))
    file = Path(wanted).expanduser()
    if not file.is_file():
        known = ", ".join(sorted(named)) if named else "none by name"
        raise UserError(
            f"model.chat_template={wanted} is neither a file nor a template of the tokenizer ({known}). "
            f"Correct it, or use {NO_TEMPLATE} for no template."
        )
    return ChatTemplate(str(file), file.read_text(encoding="utf-8"), dict(arguments))


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside a reasoning block, which the model goes on with."""
    return prompt.rstrip().endswith(THINK)


def has_reasoning(answer: str) -> bool:
    """Whether an answer holds a reasoning block, or a part of one."""
    return THINK in answer or END_OF_THINK in answer


def is_cut_in_reasoning(answer: str, was_opened: bool = False) -> bool:
    """Whether an answer ended inside a reasoning block, before anything that it was asked for.

    Args:
        was_opened: the prompt ended inside one, see `opens_reasoning`.
    """
    _, opened, last = answer.rpartition(THINK)
    return bool(opened or was_opened) and END_OF_THINK not in last
