"""From candidates to copies: which item goes where when the tail is cut.

Items are tokens, or blocks where whole blocks leave. Shapes have fixed sizes that follow from the counts alone, so
nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.engines.vllm.groups import Part, of_layers
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues, PageGrid, SlotAddress, split_slots, take
from policies import Phase
from policies.selection import Candidates


@dataclass(frozen=True)
class Moves:
    """Copies within a request: items int64 [L, N, Hs, M] each, an item being `size` slots.

    The source is a plain number where it is the same everywhere.
    """

    source: torch.Tensor | int
    target: torch.Tensor
    size: int


def plan_moves(candidates: Candidates, phase: Phase, size: int, num_tokens: int, num_keep: int) -> Moves:
    """Sources and targets that bring every kept token below `num_keep`.

    After prefill the survivors keep their order, so that pages are cut from them in order (the paper, section 4). In
    decode kept items of the tail move into the holes: with whole blocks, the newest block over the evicted one.
    Attention does not care about slot order, because keys carry their rotation.

    Args:
        candidates: the lowest leave; of blocks the newest is not among them and stays.
        phase: see above.
        size: slots an item.
        num_tokens, num_keep: tokens before and after.

    Returns:
        Where fewer than M moves are needed the rest copy an item onto itself.

    Raises:
        ValueError: whole blocks leave in decode while the newest is not full.
    """
    num_leaving = (num_tokens - num_keep) // size
    if phase is Phase.DECODE:
        if num_tokens % size:
            raise ValueError(f"blocks of {size} leave while decoding, but {num_tokens} tokens fill no whole blocks")
        return _fill_holes(candidates.lowest(num_leaving), num_tokens // size, size)
    source = candidates.highest(len(candidates) - num_leaving).sort(dim=-1).values
    if size > 1:
        newest = source.new_full((*source.shape[:-1], 1), len(candidates))
        source = torch.cat([source, newest], dim=-1)
    return Moves(source, torch.arange(source.shape[-1], device=source.device).expand_as(source), size)


def _fill_holes(leaving: torch.Tensor, num_items: int, size: int) -> Moves:
    """Kept items among the last k go where the other leaving items [..., k] lie."""
    count = leaving.shape[-1]
    if count == 1:
        return Moves(num_items - 1, leaving, size)
    first = num_items - count
    tail = torch.arange(first, num_items, device=leaving.device).expand_as(leaving)
    target = leaving.sort(dim=-1).values
    goes = (tail[..., :, None] == target[..., None, :]).any(dim=-1)
    kept_first = tail.gather(-1, goes.to(torch.uint8).argsort(dim=-1, stable=True))
    return Moves(torch.where(target < first, kept_first, target), target, size)


def carry_out(moves: Moves, part: Part, holders: Sequence[CacheLayout | PagedValues]) -> None:
    """Copy what lies in the slots of these requests and layers: keys and values, or a value beside each."""
    block_size = holders[0].grid.block_size
    places = [
        split_slots(items if isinstance(items, int) else of_layers(items, part.layers), block_size // moves.size)
        for items in (moves.source, moves.target)
    ]
    addresses: dict[PageGrid, list[SlotAddress]] = {}
    for holder in holders:
        if holder.grid not in addresses:
            pages = part.pages(holder.grid)
            addresses[holder.grid] = [SlotAddress(take(pages, column), offset) for column, offset in places]
        source, target = addresses[holder.grid]
        if moves.size > 1:
            holder.copy_pages(source.page, target.page)
        else:
            holder.move(source, target)
