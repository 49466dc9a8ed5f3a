"""The policies, by how many tokens layers and heads keep, and cases of those that are ragged."""

from policies import Policy, available_policies, build_policy
from policies.registry import policy_class

READING = ["quest", "sentencekv"]
"""Those that read less than they keep; they have page tables and equally many tokens everywhere."""
EQUAL = [name for name in available_policies() if policy_class(name).allocation != "ragged" and name not in READING]
"""Those that keep equally many everywhere, at least by default; `full` among them."""
ALWAYS_RAGGED = [name for name in available_policies() if name not in [*EQUAL, *READING]]

WHOLE = [[0, 1], [2, 0]]
RAGGED_CASES = [
    ("ada_kv", {"window": 8}),
    ("ada_kv", {"window": 8, "floor": 0.0, "pooling": "avg", "kernel": 1, "value_weighted": True}),
    ("ada_kv", {"window": 8, "floor_rule": "minimum", "group": "max"}),
    ("ada_kv", {"window": 8, "beta": 20.0}),
    ("pyramid_kv", {}),
    ("pyramid_kv", {"beta": 2.0, "window": 12}),
    ("kv_compress", {"protect_last": 16}),
    ("kv_compress", {"protect_last": 16, "protect_first": 4, "scope": "layer", "window": 8}),
    ("head_classes", {"heads": WHOLE}),
    ("mix_attention", {"full_every": 3, "full_first": 1}),
    ("mix_attention", {"full_every": 3, "share": 2}),
    ("corm", {"window": 8, "protect_last": 24}),
    ("inverse_key_l2", {"skip_layers": 1}),
    ("expected_attention", {"head_adaptive": True, "epsilon": 0.01}),
]
if "kvpress" in EQUAL:
    RAGGED_CASES += [
        ("kvpress", {"press": "AdaKVPress", "arguments": {"press": "SnapKVPress", "arguments": {"window_size": 8}}}),
        ("kvpress", {"press": "PyramidKVPress", "arguments": {"window_size": 8, "beta": 4}}),
    ]
"""Names and options, for a model of 3 layers and 2 KV heads and budgets of 64 tokens or more."""


def ragged_policy(name: str, options: dict, budget: int, block_size: int) -> Policy:
    """A case, without the budget where the data decide."""
    takes_budget = policy_class(name).takes_budget
    return build_policy(name, budget=budget if takes_budget else None, block_size=block_size, options=options)


SENTENCE_ENDS = list(range(4, 14))
READING_CASES = [
    ("quest", {"dense_layers": 1}),
    ("quest", {"dense_layers": 0, "group": "mean"}),
    ("sentencekv", {"ends": SENTENCE_ENDS, "factor": 2.0}),
    ("sentencekv", {"ends": SENTENCE_ENDS, "factor": 1.5, "group": "max", "window": 8}),
]
"""Names and options, for the tiny Llama, a tenth of whose tokens end a sentence, and budgets of 128 tokens or more."""
