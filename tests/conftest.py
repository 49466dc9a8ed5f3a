"""What every test module may use."""

import json
from collections import Counter
from pathlib import Path

import pytest

from harness.engines.vllm.environment import prepare_environment
from harness.hardware import cuda_gpus

prepare_environment(in_process=True)  # before any test imports torch, whose threads read it


def pytest_collection_modifyitems(items):
    """Fast tests first, then the files with most slow ones, so that the last are short; skip those that need a GPU."""
    slow = {item: item.get_closest_marker("slow") is not None for item in items}
    num_slow = Counter(path for path, _ in {(item.path, item.function) for item in items if slow[item]})
    items.sort(key=lambda item: (slow[item], -num_slow[item.path] * slow[item]))
    if cuda_gpus():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A model folder without weights: one token a byte, no chat template. Enough for every engine but a real one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("byte-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token for token, symbol in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    return folder
