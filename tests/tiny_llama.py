"""A tiny random Llama with grouped heads, on disk, that both transformers and vLLM load."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 128
UNEVEN = ((0.1, 1.0), (0.5, 0.02), (1.5, 0.3))
"""Factors of the keys by layer and KV head, over and over."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")


def tiny_llama_config(num_kv_heads: int = 2) -> LlamaConfig:
    """3 layers, 2 query heads a KV head, of size 32 (the smallest that vLLM's CPU kernels take)."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2 * num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
        dtype="float32",
    )


def tiny_llama(seed: int = 0, uneven: bool = False, num_kv_heads: int = 2) -> LlamaForCausalLM:
    """The model in memory, float32, in eval mode.

    The wide initialisation keeps greedy text varied and the gap between the two best tokens large.

    Args:
        seed: of the weights.
        uneven: make attention sharp in some heads and flat in others, so that they need unequally many tokens.
        num_kv_heads: an even number of them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_llama_config(num_kv_heads)).float().eval()
    if uneven:
        for factor, layer in zip(UNEVEN, model.model.layers, strict=True):
            weight = layer.self_attn.k_proj.weight.detach()
            factors = torch.tensor(factor).repeat(num_kv_heads // len(factor))
            weight.mul_(factors.repeat_interleave(len(weight) // num_kv_heads)[:, None])
    return model


def save_tiny_llama(path: Path, seed: int = 0, uneven: bool = False, num_kv_heads: int = 2) -> Path:
    """Write config, safetensors, generation config and a word-level tokenizer ("w4".."w127") under `path`.

    Returns:
        `path`.
    """
    model = tiny_llama(seed, uneven, num_kv_heads)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, 128 words."""
    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(len(SPECIAL_TOKENS), VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """`num_tokens` token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
