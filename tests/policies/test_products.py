"""Products of queries with keys: float32 sums on every device, and no float32 keys where a GPU needs none."""

import pytest
import torch

from policies.products import as_multiplied, products

SHAPE_OF_QUERIES, SHAPE_OF_KEYS, SCALE = (2, 3, 8, 64), (2, 3, 50, 64), 0.125


def sample(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(shape, generator=generator) for shape in (SHAPE_OF_QUERIES, SHAPE_OF_KEYS))
    return queries.to(device, dtype), keys.to(device, dtype)


def wanted(queries, keys):
    return SCALE * queries.double() @ keys.double().transpose(-1, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_dtype(dtype):
    queries, keys = sample(dtype)
    result = products(queries, keys, SCALE)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), wanted(queries, keys), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_multiplies_16_bits_as_they_are(dtype):
    """Shapes and dtypes alone: on the meta device, some of the tokens of longer keys."""
    queries, keys = sample(dtype, "meta")
    assert as_multiplied(queries, keys)[1] is keys
    result = products(queries, keys[:, :, :20], SCALE)
    assert (result.shape, result.dtype) == ((2, 3, 8, 20), torch.float32)


def test_vectors_of_32_bits_are_not_rounded_to_the_keys():
    queries, keys = sample(torch.bfloat16, "meta")
    assert {part.dtype for part in as_multiplied(queries.float(), keys)} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_on_a_gpu_are_float32(dtype):
    queries, keys = sample(dtype, "cuda")
    torch.testing.assert_close(products(queries, keys, SCALE).double(), wanted(queries, keys), rtol=1e-5, atol=1e-5)
