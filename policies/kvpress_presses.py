"""Which presses of kvpress 0.5.5 `policies.kvpress` can run, what each is fed with, and why the others cannot be.

`AdaKVPress` is around one of them, which its arguments name as `policy.options` does: `press`, and `arguments` of it.

kvpress is optional and imported only where a press is built. Its requirements are older than vLLM's, so that it is
installed without them: `pip install --no-deps kvpress==0.5.5`, and this package's extra `kvpress` for what it imports.
"""

import difflib
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from policies.views import Signal

if TYPE_CHECKING:
    from kvpress import AdaKVPress, ScorerPress

CACHE = frozenset({Signal.KEYS, Signal.VALUES})
FED = {
    "CURPress": CACHE,
    "CapPress": CACHE | {Signal.QUERY_MOMENTS},
    "ExpectedAttentionPress": CACHE | {Signal.QUERY_MOMENTS},
    "KeyDiffPress": CACHE,
    "KnormPress": CACHE,
    "LagKVPress": CACHE,
    "ObservedAttentionPress": CACHE | {Signal.ATTENTION_MASS},
    "PyramidKVPress": CACHE | {Signal.WINDOW_QUERIES},
    "RandomPress": CACHE,
    "SnapKVPress": CACHE | {Signal.WINDOW_QUERIES},
    "StreamingLLMPress": CACHE,
    "TOVAPress": CACHE | {Signal.WINDOW_QUERIES},
}
"""Press -> what its score is computed from. A scorer from elsewhere gets keys and values."""
BY_HEAD = "AdaKVPress"
BY_DEPTH = "PyramidKVPress"

_SKETCH = "it draws a random sketch without a seed, so that a run could not be repeated"
_WHOLE_PROMPT = "it needs the queries of the whole prompt, which no engine remembers"
_DOWNLOAD = "it downloads what was trained for a model of that name on the hub"
_OUTPUT = "it needs the weights of the output projection"
_UNEQUAL = "it keeps unequally many tokens"
_CHANGES = "it changes what is cached, and not only which tokens are"
_SECOND_PASS = "it runs the model over the prompt again"
_DECODING = "it says when a press acts, here the engine does"
REFUSED = {
    "BlockPress": f"{_DECODING}. Use policy=keydiff_chunked for KeyDiff in blocks",
    "CAMPress": _CHANGES,
    "ChunkKVPress": "it keeps whole chunks, near the budget and not at it. Use policy=chunkkv",
    "ChunkPress": "it gives each chunk of the prompt its own budget",
    "CompactorPress": f"{_SKETCH}, and {_WHOLE_PROMPT}",
    "ComposedPress": "it applies one press after the other",
    "CompressionRatioDecodingPress": _DECODING,
    "CriticalAdaKVPress": f"{_OUTPUT}, and {_UNEQUAL} per head",
    "CriticalKVPress": _OUTPUT,
    "DMSPress": f"{_UNEQUAL}, by a threshold",
    "DecodingPress": _DECODING,
    "DuoAttentionPress": f"{_UNEQUAL} per head, and {_DOWNLOAD}. Use policy=head_classes",
    "EntropyGatedChunkKVPress": "it keeps whole chunks, near the budget and not at it. Use policy=chunkkv",
    "ExpectedAttentionStatsPress": _DOWNLOAD,
    "FastKVzipPress": f"{_UNEQUAL} per head, and {_DOWNLOAD}",
    "FinchPress": "it looks for a delimiter token between context and question",
    "KVComposePress": f"{_SECOND_PASS}, and {_UNEQUAL} per layer",
    "KVgradPress": _SECOND_PASS,
    "KVzapPress": f"{_DOWNLOAD}, and needs hidden states",
    "KVzipPress": f"{_SECOND_PASS}, and {_UNEQUAL} per head",
    "KeyRerotationPress": f"{_CHANGES}. Use policy=streaming_llm policy.options.position_mode=cache",
    "LUKVPress": f"{_UNEQUAL} per head, and {_DOWNLOAD}",
    "LeverageScorePress": _SKETCH,
    "MergingPress": _CHANGES,
    "NonCausalAttnPress": _WHOLE_PROMPT,
    "PerLayerCompressionPress": f"{_UNEQUAL} per layer",
    "PrefillDecodingPress": _DECODING,
    "QFilterPress": _DOWNLOAD,
    "RestoreKVPress": _SECOND_PASS,
    "SimLayerKVPress": f"{_UNEQUAL} per layer",
    "ThinKPress": f"{_CHANGES}. Use policy.options.think with any policy",
}
"""Press -> why it is no policy here."""


def build_press(
    name: str, arguments: dict[str, Any], option: str = "policy.options"
) -> tuple["ScorerPress | AdaKVPress", "ScorerPress"]:
    """The press of this class name, or "module:Class" for a `ScorerPress` from elsewhere, and the press that scores.

    Args:
        name: the class.
        arguments: of the press; of an `AdaKVPress` also what it is around, a name under "press" and its "arguments".
        option: where `press` and `arguments` were set.

    Raises:
        ValueError: kvpress is missing, or the press is unknown, refused, or does not take the arguments.
    """
    cls = _press_class(name, option)
    if "compression_ratio" in arguments:
        raise ValueError(f"{option}.arguments.compression_ratio follows from policy.budget. Remove it.")
    arguments, scorer = dict(arguments), None
    if name == BY_HEAD:
        inner, of_inner = _inner(arguments, option)
        _, scorer = build_press(inner, of_inner, f"{option}.arguments")
        arguments = {key: value for key, value in arguments.items() if key != "arguments"} | {"press": scorer}
    try:
        press = cls(**arguments)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"{option}.arguments={arguments} do not fit {name}: {error}.") from error
    for argument, only in (("seed", None), ("use_random_leverage", True)):
        if getattr(press, argument, 0) is only:
            raise ValueError(f"{option}.press={name} with {argument}={only} is refused: {_SKETCH}.")
    return press, scorer or press


def as_data(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A press as `harness.engines.kvpress` takes it: the class under "name", its arguments beside it."""
    if name != BY_HEAD:
        return {**arguments, "name": name}
    inner = as_data(*_inner(arguments, "policy.options"))
    return {**{key: value for key, value in arguments.items() if key != "arguments"}, "press": inner, "name": name}


def _inner(arguments: dict[str, Any], option: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the press that an `AdaKVPress` is around."""
    name, of_inner = arguments.get("press"), arguments.get("arguments", {})
    if not isinstance(name, str) or name == BY_HEAD:
        raise ValueError(
            f"{option}.arguments.press={name} is no press whose scores heads could share by. "
            f"Use {option}.arguments={{press: SnapKVPress}}."
        )
    if not isinstance(of_inner, dict):
        raise ValueError(f"{option}.arguments.arguments={of_inner} are no arguments. Use {{name: value}}.")
    return name, of_inner


def load_kvpress() -> ModuleType:
    """Import kvpress, and undo that it wraps every attention function of transformers, for presses that mask.

    Raises:
        ImportError: it is not installed.
    """
    is_new = "kvpress" not in sys.modules
    import kvpress

    if is_new:
        functions = kvpress.attention_patch.ALL_ATTENTION_FUNCTIONS
        for name in list(functions):
            del functions[name]  # the wrapped one, beside which the original is still registered
    return kvpress


def _press_class(name: str, option: str) -> type:
    try:
        kvpress = load_kvpress()
    except ImportError as error:
        raise ValueError(
            f"policy=kvpress needs the package kvpress ({error}). "
            'Run `pip install --no-deps kvpress==0.5.5` and `pip install "fire<0.8" "termcolor<4"`.'
        ) from error
    if name in REFUSED:
        raise ValueError(f"{option}.press={name} cannot be a policy: {REFUSED[name]}.")
    module, _, attribute = name.rpartition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute) if module else getattr(kvpress, name)
    except (ImportError, AttributeError) as error:
        close = difflib.get_close_matches(name, [*FED, BY_HEAD], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"{option}.press={name} is unknown ({error}).{hint} Presses: {', '.join(sorted([*FED, BY_HEAD]))}, or "
            "module:Class of a ScorerPress."
        ) from error
    if name != BY_HEAD and not (isinstance(cls, type) and issubclass(cls, kvpress.ScorerPress)):
        raise ValueError(f"{option}.press={name} is no ScorerPress, so that it scores no tokens.")
    return cls
