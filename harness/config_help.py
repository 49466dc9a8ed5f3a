"""What `--help` says of the groups: every option of each, with its keys and their values."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from omegaconf import OmegaConf

RESOLVER = "harness_options"
WIDTH = 118


def register_help() -> None:
    """Make `${harness_options:GROUP,...}` known to OmegaConf, for the templates of `--help`."""
    OmegaConf.register_new_resolver(RESOLVER, lambda *groups: describe(groups), replace=True)


@cache
def describe(groups: tuple[str, ...]) -> str:
    """The options of the groups of `conf/`, each with its keys and values as its file has them.

    Kept, as Hydra asks in every composition.
    """
    return "\n".join(line for group in groups for line in _group(group))


def _group(group: str) -> list[str]:
    options = sorted((each for each in files("conf").joinpath(*group.split("/")).iterdir()), key=lambda each: each.name)
    found = [option for option in options if option.name.endswith(".yaml")]
    lines = [f"{group.rpartition('/')[2]}"]
    for option in found:
        lines += [f"  {option.name.removesuffix('.yaml')}", *_wrapped(_values(option))]
    return [*lines, ""]


def _values(option: Traversable) -> list[str]:
    """`key=value` of everything the file sets, keys below the group by their dotted names."""
    content = OmegaConf.to_container(OmegaConf.load(str(option)), resolve=False)
    defaults = content.pop("defaults", [])
    same_as = [f"as {each}" for each in defaults if isinstance(each, str) and each != "_self_"]
    chosen = [pair for each in defaults if isinstance(each, dict) for pair in each.items()]
    groups = [f"{key.removeprefix('override /')}={value}" for key, value in chosen]
    return [*same_as, *groups, *_flat(content)]


def _flat(values: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_text(value)}")
    return found


def _text(value: object) -> str:
    if value is None:
        return "null"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else str(value).replace("'", "").replace(" ", "").replace("$", "$$")
    )


def _wrapped(words: list[str]) -> list[str]:
    lines, line = [], "     "
    for word in words:
        if len(line) + len(word) + 1 > WIDTH:
            lines.append(line)
            line = "     "
        line += f" {word}"
    return [*lines, line] if line.strip() else lines
