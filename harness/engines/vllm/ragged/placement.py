"""Which pages stay where when blocks are cut: a kept page that lies in a cut block moves into a free page of the rest.

A request that holds n blocks owns their n x L x H pages and no other. Shapes follow from counts alone, so nothing waits
for the device.

Letters: L layers, N requests, H KV heads, W pages a row, K candidates, M copies.
"""

from dataclasses import dataclass

import torch

from harness.engines.vllm.paged import PageGrid

NULL_PAGE = 0
"""Of vLLM's null block, which no request owns: what a copy that is not needed reads and writes."""


@dataclass(frozen=True)
class Placed:
    """Attributes:
    pages: int64 [L, N, H, W], the pages that stay, each in the place that it had in its row.
    source, target: int64 [M] each, whole pages to copy; no target is a source. Copies that are not needed copy the
        null page onto itself.
    """

    pages: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


class Placement:
    """Finds new homes for pages."""

    def __init__(self, grid: PageGrid) -> None:
        """`grid`: numbers the pages."""
        self._grid = grid
        self._stays = torch.zeros(grid.num_numbers, dtype=torch.bool, device=grid.device)

    def place(self, pages: torch.Tensor, keep: torch.Tensor, blocks: torch.Tensor, num_left: int) -> Placed:
        """Keep some pages of N requests in the first `num_left` of their blocks.

        Args:
            pages: int64 [L, N, H, W], what they hold; arbitrary valid numbers behind each row's last page.
            keep: bool [L, N, H, W], the pages that stay, `num_left` x L x H of each request.
            blocks: int64 [N, blocks], what they held.
            num_left: blocks that stay.
        """
        bags = self._grid.numbers(blocks).permute(1, 3, 0, 2)  # [N, blocks, L, H]
        left, cut = bags[:, :num_left].flatten(1), bags[:, num_left:].flatten(1)
        self._stays[left], self._stays[cut] = True, False
        rows, kept = pages.transpose(0, 1).flatten(1), keep.transpose(0, 1).flatten(1)
        homeless = kept & ~self._stays[rows]
        self._stays[torch.where(kept, rows, NULL_PAGE)] = False  # owned by a kept page
        count = min(left.shape[1], cut.shape[1])
        if not count:
            nothing = rows.new_empty(0)
            return Placed(pages, nothing, nothing)
        free, _ = true_places(self._stays[left], count)
        moved, needed = true_places(homeless, count)
        source = torch.where(needed, rows.gather(1, moved), NULL_PAGE)
        target = torch.where(needed, left.gather(1, free), NULL_PAGE)
        order = (homeless.cumsum(dim=1) - 1).clamp(0, count - 1)
        placed = torch.where(homeless, target.gather(1, order), rows)
        num_layers, num_requests = pages.shape[:2]
        shape = (num_requests, num_layers, *pages.shape[2:])
        return Placed(placed.view(shape).transpose(0, 1), source.flatten(), target.flatten())


def true_places(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the first `count` True of each row are, in order.

    Args:
        mask: bool [N, K].
        count: places to return for every row.

    Returns:
        int64 [N, count], and bool [N, count] that is False where the row has fewer; the place is K - 1 there.
    """
    running = mask.cumsum(dim=-1)
    wanted = torch.arange(1, count + 1, device=mask.device).expand(len(mask), -1).contiguous()
    found = torch.searchsorted(running, wanted)
    return found.clamp(max=mask.shape[-1] - 1), wanted <= running[:, -1:]
