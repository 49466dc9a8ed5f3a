"""Policies by name: the built-in ones and those that other packages register.

Another package adds a policy through the entry-point group `kv_eviction.policies`:
`my_policy = "my_package.my_module:MyPolicy"`.
"""

import difflib
import functools
import importlib
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin, get_type_hints

from policies import think
from policies.base import Policy, check_choice
from policies.prompt_share import MOST_BLOCKS, PromptShare

ENTRY_POINT_GROUP = "kv_eviction.policies"

BUILT_IN = {
    "ada_kv": "policies.ada_kv:AdaKV",
    "cascading": "policies.cascading:Cascading",
    "chunkkv": "policies.chunkkv:ChunkKV",
    "corm": "policies.corm:CORM",
    "elastic_cache": "policies.elastic_cache:ElasticCache",
    "expected_attention": "policies.expected_attention:ExpectedAttention",
    "full": "policies.full:Full",
    "h2o": "policies.h2o:H2O",
    "head_classes": "policies.head_classes:HeadClasses",
    "inverse_key_l2": "policies.inverse_key_l2:InverseKeyL2",
    "keydiff": "policies.keydiff:KeyDiff",
    "kv_compress": "policies.kv_compress:KVCompress",
    "kvpress": "policies.kvpress:Kvpress",
    "lagkv": "policies.lagkv:LagKV",
    "mix_attention": "policies.mix_attention:MixAttention",
    "paged_eviction": "policies.paged_eviction:PagedEviction",
    "paged_eviction_literal": "policies.paged_eviction:PagedEvictionLiteral",
    "pyramid_kv": "policies.pyramid_kv:PyramidKV",
    "quest": "policies.quest:Quest",
    "random": "policies.random:Random",
    "sentencekv": "policies.sentencekv:SentenceKV",
    "snapkv": "policies.snapkv:SnapKV",
    "streaming_llm": "policies.streaming_llm:StreamingLLM",
    "tova": "policies.tova:TOVA",
}

NEEDS = {"kvpress": "kvpress"}
"""Policy -> an optional package without which it cannot be built."""

KINDS = {
    bool: ("true or false", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("text", str),
}


def available_policies() -> dict[str, str]:
    """Name -> "module:Class" of every policy that can be used here."""
    return {name: cls for name, cls in _all_policies().items() if name not in NEEDS or find_spec(NEEDS[name])}


def policy_class(name: str) -> type[Policy]:
    """The class registered under `name`.

    Raises:
        ValueError: unknown name, the message lists the known ones, the closest first; or a name taken twice.
    """
    third_party = _third_party()
    available = {**third_party, **BUILT_IN}
    if name in BUILT_IN and name in third_party:
        raise ValueError(
            f"policy.name={name} is built in, and {third_party[name]} is registered by it too. Rename that."
        )
    if name not in available:
        close = difflib.get_close_matches(name, available, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"policy.name={name} is unknown.{hint} Known policies: {', '.join(sorted(available))}.")
    module, _, attribute = available[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def build_policy(name: str, *, budget: float | None, block_size: int, options: dict[str, Any] | None = None) -> Policy:
    """Build a policy from plain data, as it travels through `additional_config` to every process.

    Args:
        name: registered name.
        budget: resident tokens per layer and KV head; or a float, the share of each prompt (`Policy.for_prompt`);
            None only for a policy that takes none.
        block_size: slots a KV block.
        options: the policy's own fields.

    Raises:
        ValueError: unknown name or option, or a value that the policy refuses.
    """
    cls, options = _with_options_of_think(policy_class(name), dict(options or {}))
    known = {field.name for field in fields(cls)} - {"budget", "block_size", "prompt_share"}
    hints = get_type_hints(cls)
    for option, value in options.items():
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"policy.options.{option} is not an option of policy={name}.{hint} Options: {', '.join(sorted(known))}."
            )
        _check_type(f"policy.options.{option}", value, hints[option])
    if not cls.takes_budget:
        if budget is not None:
            why = "lets the data decide" if cls.evicts else "never evicts"
            raise ValueError(f"policy={name} {why}, so policy.budget={budget} has no effect. Remove it.")
        budget = 2 * block_size
    elif budget is None:
        raise ValueError(
            f"policy={name} needs policy.budget: tokens, a multiple of {block_size}, or a share of each prompt, as "
            "0.25."
        )
    if not isinstance(budget, float):
        return cls(budget=budget, block_size=block_size, **options)
    if not 0 < budget <= 1:
        raise ValueError(
            f"policy.budget={budget} is no share of the prompt. Use one above 0 and up to 1, or a whole number "
            "of tokens."
        )
    if cls(budget=MOST_BLOCKS * block_size, block_size=block_size, **options).reads_less:
        raise ValueError(
            f"policy={name} reads policy.budget tokens at each step, and a share of each prompt ({budget}) is only for "
            "what stays. Give a whole number of tokens."
        )
    share = PromptShare(budget, block_size, lambda tokens: cls(budget=tokens, block_size=block_size, **options))
    return cls(budget=MOST_BLOCKS * block_size, block_size=block_size, prompt_share=share, **options)


def _with_options_of_think(cls: type[Policy], options: dict[str, Any]) -> tuple[type[Policy], dict[str, Any]]:
    """Every policy takes ThinK's options; without them, or with a share of 0, it is itself."""
    if options.get("think") in (None, 0):
        return cls, {option: value for option, value in options.items() if option not in think.OPTIONS}
    return think.with_think(cls), options


def _all_policies() -> dict[str, str]:
    return {**_third_party(), **BUILT_IN}


def _third_party() -> dict[str, str]:
    return _registered(tuple(sys.path))


@functools.cache
def _registered(places: tuple[str, ...]) -> dict[str, str]:
    """What the installed packages register; `places`, where Python looks, is what it depends on. Read once: 6 ms."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def _check_type(option: str, value: object, hint: object) -> None:
    """Refuse what a class would take and misread: on a command line `no` is a text, and so true."""
    if get_origin(hint) is Literal:
        check_choice(option, value, get_args(hint))
    elif hint in KINDS:
        kind, types = KINDS[hint]
        if not isinstance(value, types) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{option}={'null' if value is None else value} is not {kind}.")
