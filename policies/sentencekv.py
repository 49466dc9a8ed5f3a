"""SentenceKV (Zhu et al., arXiv 2504.00970): of SnapKV's tokens each step reads the sentences that fit it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch.nn.functional import pad

from policies.options import check_range
from policies.page_reading import best_pages, by_page
from policies.snapkv import SnapKV
from policies.views import ReadSignal, ReadView

MARKS = frozenset(".!?。！？")
ALWAYS = 32
"""Kept tokens at the start, and as many at the end, that are always read."""


@dataclass(frozen=True, kw_only=True)
class SentenceKV(SnapKV):
    """Stage 1 keeps C tokens of the prompt by SnapKV's scores; stage 2 reads C / `factor` of all that is kept.

    Source: paper, section 3; authors' code. Stage 1: 32 queries, kernel 7, max pooling. Stage 2, in each decode step,
    layer and KV head: the mean query of the sentence that is being written, this token's included, is multiplied with
    the mean key of every complete sentence, answers' sentences too, as far as its tokens are kept; sentences are read
    from the best until the budget is full, and the first and the last 32 kept tokens always. The token that ends a
    sentence and the first of the next read everything, as nothing is known of it yet.

    The budget C is what is **kept** of the prompt, as everywhere; the authors' budget is what is read, and they keep 3
    times as much (`factor`, in their LongBench script). Stage 1 frees memory; stage 2 frees none.

    Deviations: a sentence is read in whole pages, those that hold a token of it, from the latest page on, until C /
    `factor` tokens, rounded down to pages, are reached; pages that the first and last 32 tokens need count, and are
    read even if they are more; where they leave no page to choose, a run warns. One choice per KV head over its group,
    in both stages (`group`). A token ends a sentence if its text is made of the marks of an end (. ! ? and the Chinese
    ones) or of empty lines; the authors list 13. The mean keys are not stored: they are averaged anew from the keys, so
    choosing reads the keys of all that is kept. What counts as read is what attention reads.

    Attributes:
        read_sentences: stage 2; without it all that is kept is read.
        factor: of what is kept, one part in so many is read.
        ends: token ids that end a sentence; None takes them from the tokenizer.
        window, kernel, pooling, group, value_weighted: see `SnapKV`.
    """

    name: ClassVar[str] = "sentencekv"

    kernel: int = 7
    pooling: Literal["avg", "max"] = "max"
    read_sentences: bool = True
    factor: float = 3.0
    ends: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check this policy's own options, then the others."""
        check_range("policy.options.factor", self.factor, 1)
        if self.ends is not None:
            object.__setattr__(self, "ends", _token_ids(self.ends))
        super().__post_init__()

    @property
    def reads_less(self) -> bool:
        """True with stage 2."""
        return self.read_sentences

    @property
    def read_signals(self) -> frozenset[ReadSignal]:
        """Sentences, with stage 2."""
        return frozenset({ReadSignal.SENTENCES} if self.read_sentences else ())

    @property
    def sentence_ends(self) -> Sequence[int] | None:
        """`ends`."""
        return self.ends

    @property
    def read_pages(self) -> int:
        """Pages that are read of a long row, at least one."""
        return max(1, int(self.budget / self.factor) // self.block_size)

    @property
    def chosen_pages(self) -> int:
        """Pages at least that the first and the last tokens leave to sentences."""
        whole = -(-ALWAYS // self.block_size)
        return max(0, self.read_pages - 2 * whole - 1)

    @property
    def warning(self) -> str | None:
        """Where no sentence may ever be chosen."""
        if not self.reads_less or self.chosen_pages:
            return None
        return (
            f"policy={self.name} reads {self.read_pages} blocks a step at policy.budget={self.budget} and "
            f"policy.options.factor={self.factor:g}, which its first and last tokens may need by themselves: "
            "hardly a sentence is chosen. Raise policy.budget or lower policy.options.factor."
        )

    def for_vocabulary(self, texts: Callable[[], Sequence[str]]) -> Self:
        """A copy that knows which tokens end a sentence.

        Raises:
            ValueError: none does.
        """
        if not self.read_sentences or self.ends is not None:
            return self
        ends = tuple(token for token, text in enumerate(texts()) if ends_sentence(text))
        if not ends:
            raise ValueError(
                "no token of the model's tokenizer ends a sentence. List those that do as policy.options.ends, or set "
                "policy.options.read_sentences=false."
            )
        return replace(self, ends=ends)

    def read(self, view: ReadView) -> torch.Tensor:
        """The pages of the best sentences, bool [N, H, W]."""
        slot = torch.arange(view.sentences.shape[-1], device=view.sentences.device)
        length = view.lengths[..., None]
        complete = (slot < length) & (view.sentences < view.sentence[:, None, None])
        scores = _sentence_scores(view, complete)
        scores = scores.amax(dim=2) if self.group == "max" else scores.mean(dim=2)
        pages = by_page(scores.masked_fill(~complete, float("-inf")), view.block_size).amax(dim=-1)
        ends = (slot < length) & ((slot < ALWAYS) | (slot >= length - ALWAYS))
        always = by_page(ends, view.block_size).any(dim=-1)
        chosen = best_pages(view, pages, self.read_pages, always) & (always | (pages > float("-inf")))
        return chosen | (view.sentence_length <= 1)[:, None, None]


def _token_ids(ends: Sequence[int]) -> tuple[int, ...]:
    """As a tuple.

    Raises:
        ValueError: one is no token id, or it is no list.
    """
    if isinstance(ends, str) or not isinstance(ends, Sequence):
        raise ValueError(f"policy.options.ends={ends} is no list of token ids. Write it as [13,198].")
    for token in ends:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"policy.options.ends has {token!r}, which is no token id. Give whole numbers from 0 on.")
    return tuple(ends)


def ends_sentence(text: str) -> bool:
    """Whether a token's text is made of marks of an end, spaces and line breaks, with a mark or an empty line in it."""
    bare = text.replace(" ", "")
    marks = bare.replace("\n", "")
    return MARKS.issuperset(marks) and bool(marks or bare.count("\n") > 1)


def _sentence_scores(view: ReadView, complete: torch.Tensor) -> torch.Tensor:
    """Of each slot the product of the mean query with the mean key of the slot's sentence.

    That is the mean of the products with its keys. Summed in float64, so that the order of the terms does not matter.

    Args:
        view: tokens in the order of positions.
        complete: bool [N, H, T], the slots that count.

    Returns:
        float32 [N, H, G, T], arbitrary in other slots.
    """
    products = view.sentence_queries @ view.keys.float().transpose(-1, -2)
    products = products.double().masked_fill(~complete[:, :, None], 0)
    begins = (view.sentences[..., 1:] != view.sentences[..., :-1]).long()
    place = pad(begins.cumsum(dim=-1), (1, 0))
    counts = torch.zeros_like(place).scatter_add_(-1, place, complete.long())
    place = place[:, :, None].expand_as(products)
    sums = torch.zeros_like(products).scatter_add_(-1, place, products)
    return (sums / counts.clamp_min(1)[:, :, None]).gather(-1, place).float()
