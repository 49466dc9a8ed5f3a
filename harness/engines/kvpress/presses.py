"""Which kvpress press stands for which policy.

A press acts once, when the whole prompt was attended, on prompt tokens only: C + generated tokens are resident, also
where the policy goes on to evict while decoding. Press and policy of one row of `COUNTERPARTS` score alike, except:

* tova: the press never drops the last prompt token (`protect_last=1`; the policy's 0 is accepted too);
* expected_attention: the press drops a query of each prompt's sinks from its statistics as the policy does, and keeps
  the sinks by a score above all others;
* lagkv: the press fills places that a lag cannot share evenly by the order of its top-k, the policy by age;
* chunkkv: the press averages SnapKV's pooled scores, sums over heads, and keeps whole chunks only, so that its count
  is near C, not C;
* ada_kv, and expected_attention with `head_adaptive`: the press masks keys and frees none, and counts single tokens
  where the policy keeps whole pages (with blocks of one token they agree); its pooling is avg and its floor a minimum;
* pyramid_kv: the press shares out C where the policy shares out C less the window, so its slope is steeper, and keeps
  equally many in all layers if that leaves the last layer less than its window; single tokens, avg pooling;
* random: another generator, and a draw per KV head.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from harness.errors import UserError
from policies.kvpress_presses import as_data
from policies.registry import build_policy, policy_class

PREFIX = "kvpress:"
"""`policy.name=kvpress:AdaKVPress` names a press itself; `policy.options` are then its arguments."""
NOT_H2O = (
    "policy=h2o has no counterpart in kvpress: ObservedAttentionPress averages the attention, keeps no recent window "
    f"and stops after the prompt. Run that one as policy.name={PREFIX}ObservedAttentionPress, or use engine=vllm."
)

Press = dict[str, Any]
"""A press as plain data: its class under "name", its arguments beside it; an argument may itself be such a press."""


@dataclass(frozen=True)
class Counterpart:
    """A press for a policy.

    Attributes:
        press: from the built policy to the press.
        translated: options of the policy that the press has too.
        requires: option -> the value that the press implements, where the policy's default is another.
        also: option -> value that is accepted beside the policy's default, although the press has no such option.
    """

    press: Callable[[Any], Press]
    translated: tuple[str, ...] = ()
    requires: tuple[tuple[str, object], ...] = ()
    also: tuple[tuple[str, object], ...] = ()


def _adaptive(press: Press, policy: Any) -> Press:  # noqa: ANN401
    """The press with budgets of heads by their scores."""
    return {"name": "AdaKVPress", "alpha_safeguard": policy.floor, "press": press}


def _snapkv(policy: Any, name: str = "SnapKVPress") -> Press:  # noqa: ANN401
    return {"name": name, "window_size": policy.window, "kernel_size": policy.kernel}


def _expected_attention(policy: Any) -> Press:  # noqa: ANN401
    press = {
        "name": "ExpectedAttentionPress",
        "n_sink": policy.protect_first,
        "n_future_positions": policy.num_future,
        "epsilon": policy.epsilon,
        "use_covariance": policy.use_covariance,
    }
    return _adaptive(press, policy) if policy.head_adaptive else press


COUNTERPARTS = {
    "ada_kv": Counterpart(
        lambda policy: _adaptive(_snapkv(policy), policy),
        ("window", "kernel", "floor"),
        requires=(("pooling", "avg"), ("floor_rule", "minimum")),
    ),
    "chunkkv": Counterpart(
        lambda policy: {
            "name": "ChunkKVPress",
            "chunk_length": policy.chunk_length,
            "press": {"name": "SnapKVPress", "window_size": policy.window},
        },
        ("chunk_length", "window"),
    ),
    "expected_attention": Counterpart(
        _expected_attention,
        ("protect_first", "num_future", "epsilon", "use_covariance", "head_adaptive", "floor"),
    ),
    "inverse_key_l2": Counterpart(lambda policy: {"name": "KnormPress"}),
    "keydiff": Counterpart(lambda policy: {"name": "KeyDiffPress"}),
    "kvpress": Counterpart(lambda policy: as_data(policy.press, policy.arguments), translated=("press", "arguments")),
    "lagkv": Counterpart(
        lambda policy: {"name": "LagKVPress", "n_sink": policy.protect_first, "lag_size": policy.lag},
        ("protect_first", "lag"),
    ),
    "pyramid_kv": Counterpart(
        lambda policy: _snapkv(policy, "PyramidKVPress") | {"beta": policy.beta},
        ("window", "kernel", "beta"),
        requires=(("pooling", "avg"),),
    ),
    "random": Counterpart(lambda policy: {"name": "RandomPress", "seed": policy.seed}, ("seed",)),
    "snapkv": Counterpart(_snapkv, ("window", "kernel")),
    "streaming_llm": Counterpart(
        lambda policy: {"name": "StreamingLLMPress", "n_sink": policy.protect_first}, ("protect_first",)
    ),
    "tova": Counterpart(lambda policy: {"name": "TOVAPress"}, also=(("protect_last", 1),)),
}


def press_for(name: str, budget: float | None, block_size: int, options: dict[str, Any]) -> Press | None:
    """The press that does what a policy does to a prompt; None for the full cache.

    Args:
        name: a policy, or "kvpress:" and the class of a press.
        budget, block_size, options: as in `policies.registry.build_policy`; arguments of the press for "kvpress:".

    Raises:
        UserError: there is no such press, or none with these options.
        ValueError: the policy refuses its settings.
    """
    if name.startswith(PREFIX):
        if budget is None:
            raise UserError(f"policy.name={name} needs policy.budget, in tokens or as a share of the prompt.")
        return {**options, "name": name.removeprefix(PREFIX)}
    policy = build_policy(name, budget=budget, block_size=block_size, options=options)
    if policy.is_idle:
        return None
    if name not in COUNTERPARTS:
        raise UserError(NOT_H2O if name == "h2o" else _no_counterpart(name))
    counterpart = COUNTERPARTS[name]
    press = counterpart.press(policy)
    _check_options(name, options, counterpart, press["name"])
    return press


def _no_counterpart(name: str) -> str:
    known = ", ".join(sorted(COUNTERPARTS))
    return (
        f"policy={name} has no counterpart in kvpress. Use engine=vllm, a policy that has one ({known}), "
        f"or a press by its class, as policy.name={PREFIX}AdaKVPress."
    )


def _check_options(name: str, options: dict[str, Any], counterpart: Counterpart, press: str) -> None:
    """Refuse options that the press would ignore; `prefill_chunk` has no effect on `prefill=after` anyway.

    Raises:
        UserError: names option, value and remedy.
    """
    defaults = {field.name: field.default for field in fields(policy_class(name))}
    expected = defaults | dict(counterpart.requires)
    for option, value in (defaults | options).items():
        if option in (*counterpart.translated, "prefill_chunk"):
            continue
        if value != expected[option] and (option, value) not in counterpart.also:
            raise UserError(
                f"policy.options.{option}={value} of policy={name} is unknown to kvpress's {press}. "
                f"Use {expected[option]}, or engine=vllm."
            )
