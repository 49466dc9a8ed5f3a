"""The contract between a policy and whatever runs it (vLLM, the Hugging Face reference, a test).

A policy answers two questions and owns no cache:

* how many tokens stay (`Policy.plan`): a pure function of phase and length, called by a scheduler that sees no tensor;
* which tokens matter (`Policy.score`): tensors in, importance out, higher = keep.

Which slots that leaves is shared code (`policies.selection`, and `policies.ragged_selection` where layers and heads
keep unequally many).

Letters in shapes: N requests with equally many resident tokens, H KV heads, Q query heads (Q = H x group),
T resident tokens in slot order, D head size. Slot order is position order after prefill; later,
evicted slots are refilled by newer tokens, so only `positions` tells the age of a token.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch

from policies.prompt_share import PromptShare
from policies.views import Phase, Ranking, ReadSignal, ReadView, Signal, Unit, View


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of all evicting policies; options are dataclass fields.

    Attributes:
        budget: C, resident tokens per layer and KV head after an eviction; a multiple of `block_size`, at least two.
        block_size: B, slots a KV block.
        prefill: "after" evicts once the whole prompt was attended; "chunked" after every `prefill_chunk` prompt tokens.
        prefill_chunk: prompt tokens a chunk in "chunked" mode, a multiple of `block_size`.
        protect_first: tokens at positions below this always stay.
        protect_last: the newest so many tokens always stay.
        prompt_share: set by `build_policy` where the budget is a share of each prompt, else None. Then `budget`, and
            what follows from it, are those of `for_prompt` only.

    Class attributes, read from the instance, so that a policy may make them properties of its options:
        name: name in the registry and in `conf/policy/`.
        signals: what `score` needs.
        allocation: "equal" if all layers and KV heads keep equally many tokens; "ragged" if `split` gives each its own
            number of pages. Then `budget` and `plan` mean the average over layers and heads, and `per_head` is True.
        measured: True if the data decide how many tokens stay. Then `plan` answers with the fewest that could, and only
            where a decision is due; `demand` gives the number. Ragged policies only.
        takes_budget: False if the policy needs no budget, because it never evicts or the data decide.
        per_head: True if every KV head keeps its own tokens; False if all heads of a layer share one choice, by the
            mean of their scores.
        scores_stay: True if a token's score follows from its own key, value and position alone, so that it is computed
            once.
        layers_together: True if `score` treats its N rows alike, so that rows of several layers may come at once, which
            saves kernels; `View.layer` is a tensor then.
        same_in_all_layers: True if the choice follows from the positions alone and is the same in all layers, so that
            it is made once, and positions are kept once. Then `signals` is empty and `per_head` False.
        rewrite_phases: phases in which `rewrite` changes what the tokens that stay hold. Not beside `scores_stay` or
            `same_in_all_layers`, nor with "ragged".
        query_window: queries that `Signal.WINDOW_QUERIES` holds, or of the prompt that `Signal.SQUARED_ATTENTION` sums.
        modes: prefill modes in which the definition makes sense.
        reads_less: True if `read` chooses which pages of what is kept are read at each decode step.
        read_signals: what `read` needs beside the queries.
        full_read_layers: so many first layers always read all they keep.
        lenders: for each layer the one whose keys and values it attends, itself or an earlier one; None if all attend
            their own. Ragged policies without signals only.
        sentence_ends: token ids that end a sentence, of policies that read `ReadSignal.SENTENCES`.
        warning: what a run says before it starts, where the settings leave the policy little to decide.
    """

    name: ClassVar[str]
    signals: ClassVar[frozenset[Signal]] = frozenset()
    allocation: ClassVar[Literal["equal", "ragged"]] = "equal"
    measured: ClassVar[bool] = False
    takes_budget: ClassVar[bool] = True
    per_head: ClassVar[bool] = False
    scores_stay: ClassVar[bool] = False
    layers_together: ClassVar[bool] = False
    same_in_all_layers: ClassVar[bool] = False
    rewrite_phases: ClassVar[frozenset[Phase]] = frozenset()
    modes: ClassVar[tuple[str, ...]] = ("after", "chunked")
    evicts: ClassVar[bool] = True
    reads_less: ClassVar[bool] = False
    read_signals: ClassVar[frozenset[ReadSignal]] = frozenset()
    full_read_layers: ClassVar[int] = 0
    sentence_ends: ClassVar[Sequence[int] | None] = None
    lenders: ClassVar[Sequence[int] | None] = None
    warning: ClassVar[str | None] = None

    budget: int
    block_size: int
    prefill: Literal["after", "chunked"] = "after"
    prefill_chunk: int = 512
    protect_first: int = 0
    protect_last: int = 0
    prompt_share: PromptShare | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse impossible settings.

        Raises:
            ValueError: names the option, its value and what would be allowed.
        """
        check_multiple("policy.budget", self.budget, self.block_size, minimum=2 * self.block_size)
        check_choice("policy.options.prefill", self.prefill, ("after", "chunked"))
        if self.prefill not in self.modes:
            raise ValueError(
                f"policy.options.prefill={self.prefill} is not defined for policy={self.name}. Use {self.modes[0]}."
            )
        if self.prefill == "chunked":
            check_multiple("policy.options.prefill_chunk", self.prefill_chunk, self.block_size, self.block_size)
        for option in ("protect_first", "protect_last"):
            if getattr(self, option) < 0:
                raise ValueError(f"policy.options.{option}={getattr(self, option)} is negative. Use 0 or more.")
        protected = self.protect_first + self.protect_last
        if protected > self.budget:
            raise ValueError(
                f"policy.budget={self.budget} is smaller than protect_first({self.protect_first}) + "
                f"protect_last({self.protect_last}). Raise policy.budget to at least {protected} or protect less."
            )
        self._check_protected_blocks()

    def _check_protected_blocks(self) -> None:
        """Refuse protection that whole blocks cannot give: each block with a protected token stays, and the newest."""
        if Unit.BLOCK not in (self.prefill_unit, self.decode_unit):
            return
        num_first = math.ceil(self.protect_first / self.block_size)
        num_last = max(1, math.ceil(self.protect_last / self.block_size))
        if self.prefill_unit is Unit.BLOCK:  # the newest block of a prompt may hold a single token
            num_last = 1 + math.ceil(max(0, self.protect_last - 1) / self.block_size)
        needed = (num_first + num_last) * self.block_size
        if needed > self.budget:
            raise ValueError(
                f"policy.budget={self.budget} cannot hold protect_first({self.protect_first}) + "
                f"protect_last({self.protect_last}) in whole blocks of {self.block_size}. Raise policy.budget to at "
                f"least {needed} or protect less."
            )

    @property
    def prefill_unit(self) -> Unit:
        """What is evicted at once from a prompt."""
        return Unit.TOKEN

    @property
    def decode_unit(self) -> Unit:
        """What is evicted at once while decoding."""
        return Unit.TOKEN

    @property
    def query_window(self) -> int:
        """Queries that `Signal.WINDOW_QUERIES` or `Signal.SQUARED_ATTENTION` is about."""
        return 0

    @property
    def shared_by_layers(self) -> bool:
        """True if decode decisions are one for all layers, by the mean of their normalised scores."""
        return False

    @property
    def cache_positions(self) -> bool:
        """True if tokens are rotated by their place among the resident ones instead of their original position."""
        return False

    @property
    def is_idle(self) -> bool:
        """True if an engine may run as if there were no policy."""
        return not (self.evicts or self.reads_less)

    @property
    def by_page(self) -> bool:
        """True if each layer and KV head needs a page table of its own."""
        return self.allocation == "ragged" or self.reads_less

    def unit(self, phase: Phase) -> Unit:
        """What is evicted at once in `phase`."""
        return self.decode_unit if phase is Phase.DECODE else self.prefill_unit

    def for_model(self, num_layers: int, num_kv_heads: int) -> Self:
        """The policy for a model of this shape; engines ask before anything starts, and use what they get.

        They do through `policies.prompt_share.for_model`.

        Raises:
            ValueError: an option does not fit the model.
        """
        return self

    def for_vocabulary(self, texts: Callable[[], Sequence[str]]) -> Self:
        """The policy for a tokenizer; engines that run it ask once, and use what they get.

        Args:
            texts: gives the text of every token id; slow, so only to be called where it is needed.
        """
        return self

    def for_prompt(self, num_prompt_tokens: int) -> "Policy":
        """The policy for a prompt of so many tokens: itself, unless the budget is a share of the prompt."""
        return self if self.prompt_share is None else self.prompt_share.policy(num_prompt_tokens)

    def for_budget(self, budget: int) -> "Policy":
        """The one that `for_prompt` gave with this budget."""
        return self if self.prompt_share is None else self.prompt_share.build(budget)

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """How many of `num_resident` tokens stay; pure, so that a scheduler can account blocks without tensors.

        Token unit: at most the budget. Block unit: whole blocks leave. In prefill as many as are needed for the budget,
        the partial newest block staying; in decode one, when the newest block is full and the budget is exceeded.

        Args:
            phase: when the decision is made.
            num_resident: tokens that a layer and KV head holds, on average.
            num_seen: tokens attended so far; None: as many as are resident.
        """
        unit = self.unit(phase)
        if unit is Unit.NONE or num_resident <= self.budget:
            return num_resident
        if unit is Unit.TOKEN:
            return self.budget
        partial = num_resident % self.block_size
        if phase is Phase.DECODE:
            return num_resident if partial else num_resident - self.block_size
        return partial + (self.budget - partial) // self.block_size * self.block_size

    @abstractmethod
    def score(self, view: View) -> torch.Tensor:
        """Importance of every resident token, higher = keep.

        Args:
            view: one layer of N requests.

        Returns:
            float32 [N, H, T], or [N, 1, T] where all heads score alike.
        """

    def rewrite(self, view: View, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds of the tokens that stay, once they were chosen; asked in `rewrite_phases` only.

        Args:
            view: as `score` saw it, with keys and values whatever `signals` says.
            keep: bool [N, H or 1, T], the slots that stay.

        Returns:
            Keys and values [N, H, T, D] in the view's dtype; what they say of slots that leave does not matter.
        """
        raise NotImplementedError(f"policy {self.name} changes no keys and values")

    def split(self, ranking: Ranking) -> torch.Tensor:
        """How many pages each layer and KV head keeps; equally many, unless `allocation="ragged"`.

        Each keeps the best tokens of its own by (protected, score, position).

        Returns:
            int64 [L, N, H], of sum `mean_pages * L * H` over L and H for each request, at least 1, at least what
            protected tokens need, and at most what `lengths` can fill (`policies.shares` has the arithmetic).
        """
        return torch.full_like(ranking.lengths, ranking.mean_pages)

    def demand(self, ranking: Ranking) -> torch.Tensor:
        """How many pages a layer and head has to keep on average; asked of `measured` policies only.

        An engine asks where `plan` answers with less than is resident, lets `(pages - 1) * B + rest` tokens stay on
        average, and then calls `split` with that number in `Ranking.mean_pages`.

        Args:
            ranking: the candidates; its `mean_pages` is what `plan` answered, in pages.

        Returns:
            int64 [N], at least `ranking.mean_pages` and at most what `lengths` can fill.
        """
        raise NotImplementedError(f"policy {self.name} plans how many tokens stay")

    def read(self, view: ReadView) -> torch.Tensor:
        """Which pages attention reads in a decode step; asked where `reads_less`, of all but `full_read_layers`.

        Args:
            view: one layer of N requests that decode.

        Returns:
            bool [N, H, W]; an engine adds the newest page of each head, and ignores pages that are not held.
        """
        raise NotImplementedError(f"policy {self.name} reads all it keeps")


def check_multiple(option: str, value: int, divisor: int, minimum: int) -> None:
    """Raise ValueError unless `value` is a multiple of `divisor` and at least `minimum`."""
    if value % divisor == 0 and value >= minimum:
        return
    nearest = [v for v in (value // divisor * divisor, (value // divisor + 1) * divisor) if v >= minimum] or [minimum]
    if value < minimum:
        raise ValueError(f"{option}={value} is below the minimum of {minimum}. Use {minimum} or more.")
    raise ValueError(
        f"{option}={value} is not a multiple of engine.block_size={divisor}. Use {' or '.join(map(str, nearest))}."
    )


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{option}={value} is unknown. Use one of: {', '.join(choices)}.")
