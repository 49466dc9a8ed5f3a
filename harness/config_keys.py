"""Names on the command line: which keys there are, and which one a misspelt one was meant to be."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra.conf import HydraConf
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.errors import UserError

OPEN_KEYS = ("policy.options", "model.template_arguments")  # what they hold is known to a policy, to a chat template
GROUPS_WITHOUT_KEY = ("experiment", "preset")
HYDRA_GROUPS_WITHOUT_FIELD = {"hydra.env"}
MIN_LIKENESS = 0.6
FULL_ERROR = "HYDRA_FULL_ERROR"
_OPEN = re.compile(rf"({'|'.join(map(re.escape, OPEN_KEYS))})\.[^=]*=")


def known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every key of a schema by its dotted name, those that hold others included."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        yield f"{prefix}{each.name}"
        if is_dataclass(hints[each.name]):
            yield from known_keys(hints[each.name], f"{prefix}{each.name}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one was meant to be, None if none is like it; `_`, `-` and `.` do not count."""
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(_letters(each), each)
    close = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=MIN_LIKENESS)
    return by_letters[close[0]] if close else None


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that `key` was meant to be: rather one in the same place, else one with such a last name."""
    place = key.rpartition(".")[0]
    beside = [other for other in known if other.rpartition(".")[0] == place]
    last = {other.rpartition(".")[2]: other for other in reversed(known)}
    return nearest(key, beside) or last.get(nearest(key.rpartition(".")[2], last) or "") or nearest(key, known)


def refuse_unknown_keys(config: DictConfig, schema: type) -> None:
    """Refuse every key that the schema does not have: `+key=value` adds them. What `OPEN_KEYS` hold may be anything.

    Raises:
        UserError: names the keys, each with the nearest known one.
    """
    unknown = sorted(_unknown_keys(config, schema))
    if unknown:
        raise UserError(" ".join(_unknown_text(key, schema) for key in unknown))


def refuse_unknown_hydra_keys(config: DictConfig) -> None:
    """Refuse keys below `hydra` that Hydra does not have.

    Args:
        config: what is below `hydra`.

    Raises:
        UserError: names the keys, each with the nearest known one.
    """
    known = [f"hydra.{key}" for key in known_keys(HydraConf)]
    unknown = sorted(set(_unknown_keys(config, HydraConf, "hydra.")) - HYDRA_GROUPS_WITHOUT_FIELD)
    if unknown:
        raise UserError(" ".join(f"{key} is not a key.{_hint(nearest_key(key, known))}" for key in unknown))


def with_open_keys(arguments: Sequence[str]) -> list[str]:
    """Arguments in which an option that the configuration does not list needs no `+`: the policy itself refuses it."""
    return [f"++{argument}" if _OPEN.match(argument) else argument for argument in arguments]


def without_pluses(override: str) -> str:
    """The override as `with_open_keys` takes it from a user."""
    bare = override.lstrip("+")
    return bare if _OPEN.match(bare) else override


@contextmanager
def composition_errors_named(schema: type) -> Iterator[None]:
    """Turn what Hydra says of a wrong command line into one line with the nearest right name, and exit code 1."""
    if FULL_ERROR in os.environ:
        yield
        return
    os.environ[FULL_ERROR] = "1"  # else Hydra prints and exits by itself
    try:
        yield
    except (HydraException, OmegaConfBaseException, UserError) as error:
        print(f"error: {composition_text(error, schema)}", file=sys.stderr)
        sys.exit(1)
    finally:
        os.environ.pop(FULL_ERROR, None)


def _unknown_keys(config: DictConfig, schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for key in config:
        if key not in hints:
            yield f"{prefix}{key}"
        elif is_dataclass(hints[key]) and not OmegaConf.is_missing(config, key):
            below = config._get_node(key)
            if isinstance(below, DictConfig) and not below._is_none():
                yield from _unknown_keys(below, hints[key], f"{prefix}{key}.")


def composition_text(error: Exception, schema: type) -> str:
    """What is wrong with a configuration that Hydra could not compose, in one line."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return (
            f"{group}={option} is not an option of {group}.{_hint(nearest(option, error.options), f'{group}=')} "
            f"Options: {', '.join(error.options)}."
        )
    cause = error.__cause__
    key = getattr(cause, "full_key", None)
    if "To append to your config use" in str(error):
        return _unknown_text(key or str(error).split("'")[1], schema)
    lines = [str(error)] if cause is None else [str(error), str(cause)]
    return " ".join(line.strip() for line in "\n".join(lines).splitlines() if line.strip())


def _unknown_text(key: str, schema: type) -> str:
    known = [*known_keys(schema), *GROUPS_WITHOUT_KEY]
    return f"{key} is not a key.{_hint(nearest_key(key, known))} `--help` lists all of them."


def _hint(name: str | None, prefix: str = "") -> str:
    return "" if name is None else f" Did you mean {prefix}{name}?"


def _letters(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()
