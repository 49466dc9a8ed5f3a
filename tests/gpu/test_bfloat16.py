"""bfloat16 on FlashAttention, as users have it: long prompts, more than 16 requests, chunks, graphs of both kinds."""

from dataclasses import replace

import pytest

from tests.gpu.bfloat16 import SETTINGS, check, requests_of, two_ways

pytestmark = pytest.mark.gpu

LENGTHS = [*(100 + 37 * index for index in range(18)), 1500, 2048, 2500, 3000, 3500, 3900]


@pytest.fixture(scope="module")
def bfloat16(shape):
    return replace(
        shape, dtype="bfloat16", max_model_len=4096, kv_cache_gib=0.5, num_kv_blocks=4000, max_num_batched_tokens=2048
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_texts_and_positions(bfloat16, name, record_property):
    alone, together = two_ways(bfloat16, name, requests_of(LENGTHS, 48))
    record_property("note", check(name, alone, together))
