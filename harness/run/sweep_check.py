"""All members of a sweep, checked before the first starts."""

import contextlib
import io
from collections.abc import Iterator, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.benchmarks.generated import TASKS_OF
from harness.config import HarnessConfig
from harness.config_checks import to_dataclass
from harness.config_keys import composition_text
from harness.engines.choose import check_policy, prepare_engine
from harness.models import check_model
from harness.run.planning import Findings, load_rows_of

_row_problems: dict[str, list[str]] = {}
BASIC = ("BasicSweeper", "BasicLauncher")


def problems_of_members(config: DictConfig) -> list[str]:
    """What keeps members of the sweep from running, each with the overrides of the members that it is about.

    Only where Hydra's own sweeper draws up the members and this machine runs them: others may have another device.

    Args:
        config: the sweep's, with its `hydra` part.
    """
    hydra = config.hydra
    parts = (hydra.sweeper, hydra.launcher)
    if not all(str(part._target_).endswith(name) for part, name in zip(parts, BASIC, strict=True)):
        return []
    members: dict[str, list[str]] = {}
    for overrides in _members(config):
        with contextlib.redirect_stderr(io.StringIO()):  # what the run itself will warn of
            problems = _problems(config, overrides)
        for problem in problems:
            members.setdefault(problem, []).append(" ".join(overrides))
    return [f"{problem} [{_named(of)}]" for problem, of in members.items()]


def _members(config: DictConfig) -> Iterator[Sequence[str]]:
    loader = GlobalHydra.instance().config_loader()
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *config.hydra.overrides.task])
    for batch in BasicSweeper.split_arguments(overrides, None):
        yield from batch


def _problems(master: DictConfig, overrides: Sequence[str]) -> list[str]:
    found = Findings()
    try:
        member = GlobalHydra.instance().config_loader().load_sweep_config(master, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        return [composition_text(error, HarnessConfig)]
    with open_dict(member):
        del member["hydra"]
    config = found.of(lambda: to_dataclass(member))
    if config is not None:
        prepare_engine(config.engine)
        found.of(lambda: check_model(config.model))
        found.problems += _problems_of_rows(config)
        found.of(lambda: check_policy(config))
    return found.problems


def _problems_of_rows(config: HarnessConfig) -> list[str]:
    """Rows are read once for all members that have the same; those made to a length are left to the runs."""
    if config.benchmark.source in TASKS_OF:
        return []
    key = repr(config.benchmark)
    if key not in _row_problems:
        found = Findings()
        found.of(lambda: load_rows_of(config))
        _row_problems[key] = found.problems
    return _row_problems[key]


def _named(members: Sequence[str]) -> str:
    return members[0] if len(members) == 1 else f"{members[0]} and {len(members) - 1} more"
