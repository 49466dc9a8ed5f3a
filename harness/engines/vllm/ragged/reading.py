"""Steps that read fewer pages than are held: chosen in each layer, where the query is known.

Attention then gets a table of the chosen pages. Shapes follow from counts alone, so nothing waits for the device, and
table and lengths lie at addresses that never change.

Letters: L layers, N requests, H KV heads, G query heads of one, W pages of the longest row, n new tokens.
"""

from collections.abc import Sequence

import torch
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.utils import CpuGpuBuffer

from harness.engines.contract import ReadTokens
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.ragged.bounds import PageBounds
from harness.engines.vllm.ragged.sentences import Sentences
from harness.engines.vllm.ragged.steps import HeadSteps
from policies import Policy
from policies.page_reading import pages_of
from policies.views import ReadView


class Reading:
    """Asks the policy what each decoding request reads, and counts it.

    Attributes:
        positions: of all tokens, by page; set before the first step.
        sentences: None where the policy needs none.
    """

    positions: PagedValues

    def __init__(
        self,
        policy: Policy,
        layout: CacheLayout,
        steps: HeadSteps,
        decoding: CpuGpuBuffer,
        bounds: PageBounds | None,
        sentences: Sentences | None,
    ) -> None:
        """Allocate.

        Args:
            policy: reads less than it keeps.
            layout: the caches of all layers.
            steps: the step under way.
            decoding: bool buffer of as many requests as a batch can have.
            bounds, sentences: what the policy needs.
        """
        self.sentences = sentences
        self._policy, self._layout, self._steps, self._bounds = policy, layout, steps, bounds
        self._decoding, self._any = decoding, False
        table = steps.table
        self._pages = torch.zeros_like(table.pages[0])
        self._lengths = torch.zeros_like(table.surplus[0])
        shape = (table.pages.shape[0], table.pages.shape[2])
        self._read, self._resident = (torch.zeros(shape, dtype=torch.int64, device=table.pages.device) for _ in "rr")
        self._num_steps = self._width = 0
        self._last = torch.empty(0)

    @staticmethod
    def bytes_of_step(num_rows: int, num_heads: int, width: int) -> int:
        """What is held for the step under way, once for all layers."""
        return torch.int32.itemsize * num_rows * num_heads * (width + 1)

    def begin(self, request_ids: Sequence[str], decoding: Sequence[bool], last: torch.Tensor) -> torch.Tensor:
        """Set up a step, after `HeadSteps.begin`.

        Args:
            request_ids: N requests.
            decoding: which of them decode; the others read all they hold.
            last: int64 [N], the last token of each.

        Returns:
            `decoding` on the device, bool [N].
        """
        num_requests, self._any = len(request_ids), any(decoding)
        self._decoding.np[:num_requests] = decoding
        flags = self._decoding.copy_to_gpu(num_requests)
        self._last = last
        self._width = self._steps.width(request_ids)
        if self._any:
            self._num_steps += sum(decoding)
            self._resident += (self._steps.lengths * flags[:, None]).sum(dim=1)
        return flags

    def wrote(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Keys [n x H, 1, D] of a layer went to slots int64 [n x H]."""
        if self._bounds is not None and layer >= self._policy.full_read_layers:
            self._bounds.wrote(slots, keys[: len(slots), 0])

    def metadata(self, layer: int, query: torch.Tensor) -> AttentionMetadata | None:
        """What a layer reads with the queries [n, Q, D] of the step; None for all that it holds."""
        if not self._any or layer < self._policy.full_read_layers:
            return None
        numbers = self._steps.table.pages[layer, : len(self._last), :, : self._width]
        lengths = self._steps.lengths[layer].long()
        view = self._view(layer, query, numbers.long(), lengths)
        held = pages_of(lengths, view.block_size)[..., None]
        place = torch.arange(self._width, device=query.device)
        decoding = self._decoding.gpu[: len(self._last)]
        chosen = self._policy.read(view) | (place == held - 1) | ~decoding[:, None, None]
        chosen &= place < held
        self._write(numbers, chosen, lengths, view.block_size)
        self._read[layer] += (self._lengths[: len(lengths)] * decoding[:, None]).sum(dim=0)
        return self._steps.metadata_of(layer, self._pages, self._lengths)

    def _write(self, numbers: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, block_size: int) -> None:
        """Bring the chosen pages, bool [N, H, W], of `numbers` int32 [N, H, W] to the front, in order."""
        behind = numbers.shape[-1]
        target = torch.where(chosen, chosen.cumsum(dim=-1) - 1, behind)
        front = torch.zeros(*numbers.shape[:-1], behind + 1, dtype=numbers.dtype, device=numbers.device)
        front.scatter_(-1, target, numbers)
        self._pages[: len(numbers), :, :behind] = front[..., :behind]
        newest = (lengths - 1) % block_size + 1
        self._lengths[: len(numbers)] = ((chosen.sum(dim=-1) - 1) * block_size + newest).int()

    def _view(self, layer: int, query: torch.Tensor, numbers: torch.Tensor, lengths: torch.Tensor) -> ReadView:
        num_heads, block_size = numbers.shape[1], self._layout.grid.block_size
        queries = query.index_select(0, self._last).unflatten(1, (num_heads, -1)).float()
        fields = {}
        if self._bounds is not None:
            fields["lowest"], fields["highest"] = self._bounds.read(numbers)
        if self.sentences is not None:
            num_slots = self._width * block_size
            fields["keys"] = self._layout.read_keys(numbers, num_slots)
            fields |= self.sentences.fields(layer, queries, self.positions.read(numbers, num_slots).long())
        return ReadView(layer, lengths, self._width, block_size, queries, **fields)

    def counts(self) -> ReadTokens | None:
        """What was read so far, of this worker's heads; None before the first decode step. Waits for the device."""
        if not self._num_steps:
            return None
        full = self._policy.full_read_layers
        read = torch.cat([self._resident[:full], self._read[full:]])
        return ReadTokens(self._num_steps, read.tolist(), self._resident.tolist())
