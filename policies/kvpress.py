"""Any scorer of kvpress (Devoto et al., arXiv 2510.00636, NVIDIA/kvpress) as a policy."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch

from policies.attention import to_slots
from policies.base import Policy, Ranking
from policies.kvpress_presses import BY_DEPTH, BY_HEAD, CACHE, FED, build_press
from policies.options import check_range
from policies.shares import best_tokens, mean_tokens, split_by_wishes
from policies.views import Signal, Unit, View


@dataclass(frozen=True, kw_only=True)
class Kvpress(Policy):
    """Score = what a `ScorerPress` of kvpress gives to the prompt; selection and freed pages are ours.

    Acts once, when the prompt was attended, as a press does: C + generated tokens are resident. Needs what the press
    asks for and costs what it costs, one request at a time, so that a press may look at its batch. Every KV head
    keeps its own tokens. `policies.kvpress_presses` says which presses there are and why others are refused.

    A press reads the attention module of a Hugging Face model. It gets a stand-in of the layer's geometry instead: the
    queries that our engines watched in place of hidden states, with projections that change nothing, so that its own
    code computes the score. Only what it does before that is not its own: `ExpectedAttentionPress` gets mean and
    covariance of its queries, `CapPress` their mean, `ObservedAttentionPress` the attention already summed.

    Two presses keep unequally many tokens, here as pages of `block_size` tokens of which each head keeps one at least:
    `AdaKVPress` around a scorer shares out H C tokens among the heads of a layer (kvpress masks keys and frees none);
    `PyramidKVPress` L H C among the layers, as its own code says: equally many where the last would get less than its
    window (its `beta` is 20, its window 64: C below 1,280, prompts above 2 C + 64). `pyramid_kv` has the paper's rule.

    Deviations: equal scores keep the later token, where kvpress keeps any, and scores are compared as all are here;
    counts by depth are rounded to a sum of exactly L H C.

    Attributes:
        press: class in kvpress, or "module:Class".
        arguments: of the press, but its compression ratio; for `AdaKVPress` also `press` and `arguments` of the scorer.
    """

    name: ClassVar[str] = "kvpress"
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)

    press: str = "KeyDiffPress"
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Build the press, protect the sinks that it leaves out of its statistics, then check the common options."""
        press, scorer = build_press(self.press, self.arguments)
        object.__setattr__(self, "_press", press)
        object.__setattr__(self, "_scorer", scorer)
        if Signal.QUERY_MOMENTS in self.signals:
            object.__setattr__(self, "protect_first", max(self.protect_first, scorer.n_sink))
        limit = f"policy.budget={self.budget}"
        check_range("policy.options.arguments.window_size", self.query_window, 0, self.budget - 1, limit=limit)
        check_range("policy.options.arguments.beta", getattr(press, "beta", 1), 1)
        super().__post_init__()

    @property
    def signals(self) -> frozenset[Signal]:
        """What the press that scores is fed with."""
        cls = type(self._scorer)
        return FED.get(cls.__name__, CACHE) if cls.__module__.startswith("kvpress.") else CACHE

    @property
    def allocation(self) -> Literal["equal", "ragged"]:
        """Ragged for the two presses that keep unequally many tokens."""
        return "ragged" if self.press in (BY_HEAD, BY_DEPTH) else "equal"

    @property
    def query_window(self) -> int:
        """The window of the press; TOVA has none and looks at the last query."""
        return getattr(self._scorer, "window_size", 1) if Signal.WINDOW_QUERIES in self.signals else 0

    @property
    def decode_unit(self) -> Unit:
        """Nothing is evicted while decoding."""
        return Unit.NONE

    def score(self, view: View) -> torch.Tensor:
        """The scores of the press, float32 [N, H, T]."""
        order = view.positions.argsort(dim=-1).expand(-1, view.keys.shape[1], -1)
        num_tokens = order.shape[-1]
        self._scorer.compression_ratio = 1 - (self.plan(view.phase, num_tokens) + 0.5) / num_tokens
        scores = [self._score_one(view, n, order[n : n + 1]) for n in range(len(order))]
        return to_slots(torch.cat(scores).float(), order)

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Pages by the press's own rule, int64 [L, N, H]."""
        num_layers, _, num_heads, num_tokens = ranking.scores.shape
        mean = mean_tokens(ranking)
        if self.press == BY_HEAD:
            share = self._press.alpha_safeguard
            safe = max(1, int(mean * share)) if share else 0
            wishes = best_tokens(ranking, num_heads * mean, at_least=safe).double()
            return split_by_wishes(ranking, wishes, over_layers=False)
        self._press.compression_ratio = 1 - mean / num_tokens
        config = SimpleNamespace(num_hidden_layers=num_layers)
        layers = [SimpleNamespace(config=config, layer_idx=layer) for layer in range(num_layers)]
        budgets = [float(self._press.get_layer_budget(layer, num_tokens)) for layer in layers]
        wishes = torch.tensor(budgets, dtype=torch.float64, device=ranking.scores.device).reshape(-1, 1, 1)
        return split_by_wishes(ranking, wishes.expand_as(ranking.lengths), over_layers=True)

    def _score_one(self, view: View, n: int, order: torch.Tensor) -> torch.Tensor:
        """Scores of one request in the order of positions, [1, H, T]."""
        keys, values = (_ordered(states[n : n + 1], order) for states in (view.keys, view.values))
        module, hidden, kwargs, attentions = _StandIn(view, keys), _Nothing("hidden_states"), {}, None
        if view.window_queries is not None:
            module.num_query_heads, hidden = view.window_queries.shape[1], _as_hidden(view.window_queries[n : n + 1])
            cos = torch.ones_like(hidden[..., : keys.shape[-1]])
            kwargs = {"position_embeddings": (cos, torch.zeros_like(cos))}
        if view.query_mean is not None:
            mean = view.query_mean[n : n + 1].to(keys.dtype)
            module.num_query_heads = mean.shape[1]
            hidden = mean.flatten(1)[:, None].expand(-1, keys.shape[2], -1)
            if hasattr(self._scorer, "get_query_statistics"):
                self._give_statistics(view, n, mean)
        if view.attention_mass is not None:
            attentions = _ordered(view.attention_mass[n : n + 1, ..., None], order).transpose(2, 3)
        return self._scorer.score(module, hidden, keys, values, attentions, kwargs)

    def _give_statistics(self, view: View, n: int, mean: torch.Tensor) -> None:
        """Let an `ExpectedAttentionPress` take the moments as they are; it rotates them itself."""
        cov = view.query_cov[n : n + 1].to(mean.dtype)

        def statistics(module: object, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            used = cov if self._scorer.use_covariance else None
            return self._scorer.apply_avg_rope(module, mean, used, hidden.shape[1])

        self._scorer.get_query_statistics = statistics


class _Nothing:
    """In place of what no engine watches: using it says so."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - it never returns
        raise NotImplementedError(f"the press asks for {self._what}, which policy=kvpress does not have")


class _StandIn:
    """The attention module as presses use it."""

    def __init__(self, view: View, keys: torch.Tensor) -> None:
        """Take the geometry of one layer."""
        self._inv_freq = view.inv_freq
        self.layer_idx, self.num_hidden_layers = view.layer, view.num_layers
        self.num_key_value_heads, self.head_dim = keys.shape[1], keys.shape[-1]
        self.config = self
        self.num_query_heads: int | None = None

    @property
    def num_attention_heads(self) -> int:
        """Query heads; known where queries are watched."""
        if self.num_query_heads is None:
            raise NotImplementedError("the press asks for query heads, which policy=kvpress does not watch for it")
        return self.num_query_heads

    @staticmethod
    def q_proj(hidden: torch.Tensor) -> torch.Tensor:
        """Queries of hidden states, which are the queries."""
        return hidden

    def rotary_emb(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions [1, P], [1, P, D] in the dtype of `like`."""
        angles = positions[..., None].float() * self._inv_freq.float()
        return tuple(turn.repeat(1, 1, 2).to(like.dtype) for turn in (angles.cos(), angles.sin()))


def _ordered(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] by position."""
    return states.take_along_dim(order[..., None], dim=2)


def _as_hidden(queries: torch.Tensor) -> torch.Tensor:
    """Rotated queries [1, Q, W, D] as [1, W + 1, Q x D]; presses want more tokens than their window has."""
    return torch.nn.functional.pad(queries.transpose(1, 2).flatten(2), (0, 0, 1, 0))
