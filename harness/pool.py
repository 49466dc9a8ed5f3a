"""What the memory of a GPU holds, by arithmetic: the defaults of a GPU are chosen so that its KV pool can fill.

With a fixed number of requests a large card never runs out of blocks, and eviction shows its cost alone.
"""

from collections.abc import Sequence

from harness.config import BYTES_OF_DTYPE, ModelConfig
from harness.hardware import GIB

SHARE, BESIDE_GIB = 0.9, 2.0  # what vLLM takes of a card; activations and CUDA graphs, roughly
SHORT_REQUEST, FEWEST, MOST = 1024, 16, 512


def pool_tokens(model: ModelConfig, cards_gib: Sequence[float]) -> int:
    """Tokens that the KV pool holds on these cards together, 0 if the weights leave no room.

    Args:
        model: its geometry, dtype and the size of its weights.
        cards_gib: memory of each card that shares the model.
    """
    room = SHARE * sum(cards_gib) - (model.weights_gib or 0) - BESIDE_GIB * len(cards_gib)
    a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES_OF_DTYPE[model.dtype]
    return max(0, int(room * GIB) // a_token)


def sequences_that_fill(num_tokens: int) -> int:
    """The least power of two of requests that fill the pool with 1,024 tokens each, between 16 and 512."""
    count = FEWEST
    while count * SHORT_REQUEST < num_tokens and count < MOST:
        count *= 2
    return count
