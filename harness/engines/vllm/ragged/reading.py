"""Steps that read fewer pages than are held: chosen in each layer, where the query is known.

Attention then gets a table of the chosen pages. Shapes follow from counts alone, so nothing waits for the device, and
table and lengths lie at addresses that never change. Only requests that decode are looked at, so many at once as
`rows_at_once` allows; prompts take the table as it is.

Letters: L layers, N requests, M of them that decode, H KV heads, G query heads of one, W pages of the longest of those
that are looked at, n new tokens.
"""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionMetadata

from harness.engines.contract import ReadTokens
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.ragged.bounds import PageBounds
from harness.engines.vllm.ragged.sentences import Sentences
from harness.engines.vllm.ragged.steps import HeadSteps
from harness.engines.vllm.slices import CHOICE_BYTES, FLOAT_BYTES, cut, rows_at_once
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
        bounds: PageBounds | None,
        sentences: Sentences | None,
    ) -> None:
        """Allocate.

        Args:
            policy: reads less than it keeps.
            layout: the caches of all layers.
            steps: the step under way.
            bounds, sentences: what the policy needs.
        """
        self.sentences = sentences
        self._policy, self._layout, self._steps, self._bounds = policy, layout, steps, bounds
        table = steps.table
        self._device = table.pages.device
        self._pages = torch.zeros_like(table.pages[0])
        self._lengths = torch.zeros_like(table.surplus[0])
        shape = (table.pages.shape[0], table.pages.shape[2])
        self._read, self._resident = (torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in "rr")
        self._num_steps = self._width = self._prompt_width = 0
        self._places = self._prompts = self._last = torch.empty(0)

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
            int64 [M], the places of those that decode.
        """
        self._places, self._width = self._part(request_ids, decoding)
        self._prompts, self._prompt_width = self._part(request_ids, [not now for now in decoding])
        self._last = last[self._places]
        self._num_steps += len(self._places)
        self._resident += self._steps.lengths[:, self._places].sum(dim=1)
        return self._places

    def _part(self, request_ids: Sequence[str], wanted: Sequence[bool]) -> tuple[torch.Tensor, int]:
        """The places of some requests, and the pages of the longest."""
        places = [place for place, now in enumerate(wanted) if now]
        width = self._steps.width([request_ids[place] for place in places]) if places else 0
        return async_tensor_h2d(places, device=self._device, dtype=torch.int64), width

    def wrote(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Keys [n x H, 1, D] of a layer went to slots int64 [n x H]."""
        if self._bounds is not None and layer >= self._policy.full_read_layers:
            self._bounds.wrote(slots, keys[: len(slots), 0])

    def metadata(self, layer: int, query: torch.Tensor) -> AttentionMetadata | None:
        """What a layer reads with the queries [n, Q, D] of the step; None for all that it holds."""
        num_rows = len(self._places)
        if not num_rows or layer < self._policy.full_read_layers:
            return None
        lengths = self._steps.lengths[layer]
        self._lengths[: len(lengths)] = lengths
        if self._prompt_width:
            whole = self._steps.table.pages[layer, self._prompts, :, : self._prompt_width]
            self._pages[self._prompts, :, : self._prompt_width] = whole
        size = rows_at_once(self._bytes_a_row(query.shape[1] // lengths.shape[1]), self._device)
        for part in cut(num_rows, size):
            self._choose(layer, query, part)
        self._read[layer] += self._lengths[self._places].sum(dim=0)
        return self._steps.metadata_of(layer, self._pages, self._lengths)

    def _choose(self, layer: int, query: torch.Tensor, part: slice) -> None:
        """Have the policy choose for some of the requests that decode, and write down the pages."""
        places = self._places[part]
        numbers, lengths = self._steps.read(layer, places, self._width)
        view = self._view(layer, query, part, numbers, lengths)
        held = pages_of(lengths, view.block_size)[..., None]
        place = torch.arange(self._width, device=self._device)
        chosen = (self._policy.read(view) | (place == held - 1)) & (place < held)
        self._write(places, numbers, chosen, lengths)

    def _write(self, places: torch.Tensor, numbers: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor) -> None:
        """Bring the chosen pages, bool [N, H, W], of `numbers` int64 [N, H, W] to the front, in order."""
        behind, block_size = numbers.shape[-1], self._layout.grid.block_size
        target = torch.where(chosen, chosen.cumsum(dim=-1) - 1, behind)
        front = torch.zeros(*numbers.shape[:-1], behind + 1, dtype=torch.int32, device=numbers.device)
        front.scatter_(-1, target, numbers.int())
        self._pages[places, :, :behind] = front[..., :behind]
        newest = (lengths - 1) % block_size + 1
        self._lengths[places] = ((chosen.sum(dim=-1) - 1) * block_size + newest).int()

    def _view(
        self, layer: int, query: torch.Tensor, part: slice, numbers: torch.Tensor, lengths: torch.Tensor
    ) -> ReadView:
        num_heads, block_size = numbers.shape[1], self._layout.grid.block_size
        queries = query.index_select(0, self._last[part]).unflatten(1, (num_heads, -1)).float()
        fields = {}
        if self._bounds is not None:
            fields["lowest"], fields["highest"] = self._bounds.read(numbers)
        if self.sentences is not None:
            num_slots = self._width * block_size
            fields["keys"] = self._layout.read_keys(numbers, num_slots)
            positions = self.positions.read(numbers, num_slots).long()
            fields |= self.sentences.fields(layer, part, queries, positions)
        return ReadView(layer, lengths, self._width, block_size, queries, **fields)

    def _bytes_a_row(self, group: int) -> int:
        """What choosing holds for a moment for one request and layer whose KV heads have `group` query heads each."""
        grid, layout = self._layout.grid, self._layout
        size, head_size = layout.pages.dtype.itemsize, layout.head_size
        a_page = CHOICE_BYTES
        if self._bounds is not None:
            a_page += head_size * (3 * size + 2 * FLOAT_BYTES) + 3 * FLOAT_BYTES * group
        if self.sentences is None:
            return grid.num_heads * self._width * a_page
        a_slot = head_size * (size + FLOAT_BYTES) + self.sentences.bytes_a_slot(group)
        return grid.num_heads * self._width * (a_page + grid.block_size * a_slot) + self.sentences.bytes_of_marks

    def counts(self) -> ReadTokens | None:
        """What was read so far, of this worker's heads; None before the first decode step. Waits for the device."""
        if not self._num_steps:
            return None
        full = self._policy.full_read_layers
        read = torch.cat([self._resident[:full], self._read[full:]])
        return ReadTokens(self._num_steps, read.tolist(), self._resident.tolist())
