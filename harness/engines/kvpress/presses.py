"""Which kvpress press stands for which policy.

A press acts once, when the whole prompt was attended, on prompt tokens only: C + generated tokens are resident, also
where the policy goes on to evict while decoding. Press and policy of one row of `COUNTERPARTS` score alike, except:

* tova: the press never drops the last prompt token (`protect_last=1`; the policy's 0 is accepted too);
* expected_attention: the press drops a query of each prompt's sinks from its statistics as the policy does, and keeps
  the sinks by a score above all others;
* lagkv: the press fills places that a lag cannot share evenly by the order of its top-k, the policy by age;
* chunkkv: the press averages SnapKV's pooled scores, sums over heads, and keeps whole chunks only, so that its count
  is near C, not C;
* random: another generator, and a draw per KV head.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from harness.errors import UserError
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
        also: option -> value that is accepted beside the policy's default, although the press has no such option.
    """

    press: Callable[[Any], Press]
    translated: tuple[str, ...] = ()
    also: tuple[tuple[str, object], ...] = ()


COUNTERPARTS = {
    "chunkkv": Counterpart(
        lambda policy: {
            "name": "ChunkKVPress",
            "chunk_length": policy.chunk_length,
            "press": {"name": "SnapKVPress", "window_size": policy.window},
        },
        ("chunk_length", "window"),
    ),
    "expected_attention": Counterpart(
        lambda policy: {
            "name": "ExpectedAttentionPress",
            "n_sink": policy.protect_first,
            "n_future_positions": policy.num_future,
            "epsilon": policy.epsilon,
            "use_covariance": policy.use_covariance,
        },
        ("protect_first", "num_future", "epsilon", "use_covariance"),
    ),
    "inverse_key_l2": Counterpart(lambda policy: {"name": "KnormPress"}),
    "keydiff": Counterpart(lambda policy: {"name": "KeyDiffPress"}),
    "kvpress": Counterpart(
        lambda policy: {**policy.arguments, "name": policy.press}, translated=("press", "arguments")
    ),
    "lagkv": Counterpart(
        lambda policy: {"name": "LagKVPress", "n_sink": policy.protect_first, "lag_size": policy.lag},
        ("protect_first", "lag"),
    ),
    "random": Counterpart(lambda policy: {"name": "RandomPress", "seed": policy.seed}, ("seed",)),
    "snapkv": Counterpart(
        lambda policy: {"name": "SnapKVPress", "window_size": policy.window, "kernel_size": policy.kernel},
        ("window", "kernel"),
    ),
    "streaming_llm": Counterpart(
        lambda policy: {"name": "StreamingLLMPress", "n_sink": policy.protect_first}, ("protect_first",)
    ),
    "tova": Counterpart(lambda policy: {"name": "TOVAPress"}, also=(("protect_last", 1),)),
}


def press_for(name: str, budget: int | None, block_size: int, options: dict[str, Any]) -> Press | None:
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
            raise UserError(f"policy.name={name} needs policy.budget, in tokens.")
        return {**options, "name": name.removeprefix(PREFIX)}
    policy = build_policy(name, budget=budget, block_size=block_size, options=options)
    if not policy.evicts:
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
    for option, value in options.items():
        if option in (*counterpart.translated, "prefill_chunk"):
            continue
        if value != defaults[option] and (option, value) not in counterpart.also:
            raise UserError(
                f"policy.options.{option}={value} of policy={name} is unknown to kvpress's {press}. "
                f"Use {defaults[option]}, or engine=vllm."
            )
