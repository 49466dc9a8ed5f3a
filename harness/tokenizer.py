"""The tokenizer of a model, and the tokens that end its answers."""

from typing import TYPE_CHECKING

from harness.benchmarks.prompting import stop_token_ids
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str, revision: str | None) -> tuple["PreTrainedTokenizerBase", tuple[int, ...]]:
    """The model's tokenizer, and every token id that ends its answers.

    Raises:
        UserError: the files cannot be had.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, revision=revision)
        config = AutoConfig.from_pretrained(model_path, revision=revision)
    except OSError as error:
        raise UserError(
            f"the tokenizer or config of {model_path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {model_path} is of another format (tekken.json), which does not tell where a prompt "
            "lies among its tokens. Use a copy of the model with tokenizer.json and without that file; where it has no "
            "chat template, give one with model.chat_template=FILE.jinja."
        )
    try:
        generation = GenerationConfig.from_pretrained(model_path, revision=revision)
    except OSError:
        generation = None
    return tokenizer, stop_token_ids(tokenizer, config, generation)
