"""The model of a load test: real weights, or its shape alone with random ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config import ModelConfig
from harness.errors import UserError
from harness.models import resolve_model
from harness.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Token ids: those that prompts are drawn from, and those that end an answer."""

    ordinary: Sequence[int]
    stop: tuple[int, ...]


@dataclass(frozen=True)
class _Shape:
    """What `conf/model/` does not say of a Llama model."""

    intermediate_size: int
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    tie_word_embeddings: bool


SHAPES = {
    "llama3.1-8b": _Shape(14336, 128256, 128000, 128009, tie_word_embeddings=False),
    "llama3.2-1b": _Shape(8192, 128256, 128000, 128009, tie_word_embeddings=True),
    "llama3.2-3b": _Shape(8192, 128256, 128000, 128009, tie_word_embeddings=True),
    "smollm2-135m": _Shape(1536, 49152, 1, 2, tie_word_embeddings=True),
}


def prepare_model(model: ModelConfig, load_format: str, folder: Path) -> tuple[str, Vocabulary]:
    """Where the engine finds the model, and its tokens.

    Args:
        model: of the configuration.
        load_format: "auto", or "dummy", for which a folder that holds a config.json is enough.
        folder: where that config.json is written if the model is no local folder already.

    Raises:
        UserError: the device or the weights are missing, or the model's shape is not known.
    """
    if load_format == "auto":
        path = resolve_model(model)
        return path, _vocabulary_of_tokenizer(path, model.revision)
    if model.path is None or not Path(model.path).is_dir():
        write_shape(model, folder)
        model = replace(model, path=str(folder))
    path = resolve_model(model)
    return path, _vocabulary_of_config(Path(path))


def write_shape(model: ModelConfig, folder: Path) -> None:
    """Write the config.json of a Llama model with the geometry of `model`.

    Raises:
        UserError: the model is not one of `SHAPES`.
    """
    from transformers import LlamaConfig

    if model.name not in SHAPES:
        raise UserError(
            f"load_format=dummy knows the shapes of {', '.join(SHAPES)}, not of model={model.name}. "
            "Set model.path to a folder with the model's config.json."
        )
    shape = SHAPES[model.name]
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_query_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.num_query_heads * model.head_dim,
        max_position_embeddings=model.max_model_len,
        dtype=model.dtype,
        **vars(shape),
    ).save_pretrained(folder)


def _vocabulary_of_tokenizer(path: str, revision: str | None) -> Vocabulary:
    tokenizer, stop = load_tokenizer(path, revision)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *stop}
    return Vocabulary([token for token in range(tokenizer.vocab_size) if token not in special], stop)


def _vocabulary_of_config(folder: Path) -> Vocabulary:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = [config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")]
    special = {token for ids in named for token in (ids if isinstance(ids, list) else [ids])}
    return Vocabulary([token for token in range(config["vocab_size"]) if token not in special], ())
