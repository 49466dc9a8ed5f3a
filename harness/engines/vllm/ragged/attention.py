"""The backend's own attention, called with one KV head."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadata

from harness.engines.vllm.ragged.reading import Reading
from harness.engines.vllm.ragged.steps import HeadSteps

if TYPE_CHECKING:
    _Base = AttentionImpl
else:
    _Base = object


class ByHead(_Base):
    """Mixin over a backend's implementation: every KV head of every request is a sequence of its own.

    It only reshapes; the stock kernels run unchanged, over the caches of all layers as one. While the step under way is
    not active, the layer's stock implementation serves. Where a policy reads less than it keeps, it is asked here.
    """

    index: int
    stock: AttentionImpl
    pages: torch.Tensor
    steps: HeadSteps
    reading: Reading | None
    writes: bool

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As stock, by head: queries and output [tokens, Q, D] become [tokens x H, Q / H, D]."""
        if not self.steps.active:
            return self.stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if self.reading is not None:
            attn_metadata = self.reading.metadata(self.index, query) or attn_metadata
        shape, order = (-1, self.num_heads, self.head_size), self.steps.query_order
        queries, outputs = query.reshape(shape), output.view(shape)
        if order is None:
            super().forward(layer, queries, key, value, self.pages, attn_metadata, outputs, *args, **kwargs)
            return output
        queries = queries.index_select(0, order)
        ordered = torch.empty_like(queries)
        super().forward(layer, queries, key, value, self.pages, attn_metadata, ordered, *args, **kwargs)
        outputs.index_copy_(0, order, ordered)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As stock, by head: keys and values [tokens, H, D] become [tokens x H, 1, D]; not of a layer that borrows."""
        if not self.steps.active:
            self.stock.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        if not self.writes:
            return
        keys, values = (new.reshape(-1, 1, self.head_size) for new in (key, value))
        super().do_kv_cache_update(layer, keys, values, self.pages, slot_mapping)
        if self.reading is not None:
            self.reading.wrote(self.index, keys, slot_mapping)


def by_head(
    impl: AttentionImpl, index: int, pages: torch.Tensor, steps: HeadSteps, reading: Reading | None, *, writes: bool
) -> AttentionImpl:
    """The same attention implementation over pages.

    Args:
        impl: the layer's.
        index: of the layer.
        pages: of all layers, [pages, 1, B, 2 D].
        steps: the step under way.
        reading: asks what is read; None where that is all.
        writes: False if the layer reads what another one writes.
    """
    wrapped = object.__new__(type("ByHead", (ByHead, type(impl)), {}))
    vars(wrapped).update(vars(impl), num_heads=impl.num_heads // impl.num_kv_heads, num_kv_heads=1)
    vars(wrapped).update(index=index, stock=impl, pages=pages, steps=steps, reading=reading, writes=writes)
    return wrapped
