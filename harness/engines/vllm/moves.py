"""From kept slots to copies: which token goes where when the tail is cut.

Shapes have fixed sizes that follow from the counts alone, so nothing waits for the device.
"""

import torch

from policies import Phase


def plan_moves(keep: torch.Tensor, num_keep: int, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets that bring every kept token below `num_keep`.

    After prefill the survivors keep their order, so that pages are cut from them in order (the paper, section 4). In
    decode kept tokens of the tail move into the holes: with whole blocks, the newest block over the evicted one.
    Attention does not care about slot order, because keys carry their rotation.

    Args:
        keep: bool [..., T] with exactly `num_keep` True in every row.
        num_keep: tokens that stay.
        phase: see above.

    Returns:
        int64 [..., M] each; where fewer than M moves are needed the rest copy a slot onto itself.
    """
    if phase is Phase.DECODE:
        return _fill_holes(keep, num_keep)
    source = _true_first(keep)[..., :num_keep]
    return source, torch.arange(num_keep, device=keep.device).expand_as(source)


def _fill_holes(keep: torch.Tensor, num_keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    head, tail = keep[..., :num_keep], keep[..., num_keep:]
    num_moves = min(head.shape[-1], tail.shape[-1])
    target = _true_first(~head)[..., :num_moves]
    source = _true_first(tail)[..., :num_moves] + num_keep
    needed = torch.arange(num_moves, device=keep.device) < tail.sum(dim=-1, keepdim=True)
    return torch.where(needed, source, target), target


def _true_first(mask: torch.Tensor) -> torch.Tensor:
    """Indices of the last axis, True entries first, each group in ascending order."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
