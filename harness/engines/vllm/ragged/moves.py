"""From kept slots to copies inside a head's own pages, where heads keep unequally many tokens.

All heads of a request together keep as many tokens as the plan says, so a list of all its copies has a length that is
known without asking the device.

Letters: L layers, N requests, H KV heads, T slots, B slots a page, M copies of a request.
"""

import torch

from harness.engines.vllm.ragged.placement import true_places
from policies import Phase


def slots_of(pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of the pool int64 [..., W x B], in slot order, of pages int64 [..., W]."""
    return (pages[..., None] * block_size + torch.arange(block_size, device=pages.device)).flatten(-2)


def plan_moves(
    keep: torch.Tensor, num_kept: torch.Tensor, slots: torch.Tensor, phase: Phase, limit: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies after which every head's kept tokens fill its first slots.

    As in the equal case, survivors of a prompt keep their order, and while decoding kept tokens of the tail move into
    the holes. Copies in list order never overwrite what a later one reads.

    Args:
        keep: bool [L, N, H, T].
        num_kept: int64 [L, N, H], True ones in each row of `keep`.
        slots: int64 [L, N, H, T], slots of the pool.
        phase: see above.
        limit: most copies that a request can need.

    Returns:
        Source and target slots int64 [N, M], and bool [N, M], False where no copy is needed.
    """
    place = torch.arange(keep.shape[-1], device=keep.device)
    behind = place >= num_kept[..., None]
    if phase is Phase.DECODE:
        source, needed = true_places(_by_request(keep & behind), limit)
        target, _ = true_places(_by_request(~keep & ~behind), limit)
    else:
        source, needed = true_places(_by_request(keep), limit)
        target, _ = true_places(_by_request(~behind), limit)
    all_slots = _by_request(slots)
    return all_slots.gather(1, source), all_slots.gather(1, target), needed


def _by_request(values: torch.Tensor) -> torch.Tensor:
    """[L, N, H, T] -> [N, L x H x T]."""
    return values.transpose(0, 1).flatten(1)
