"""Every task by name: LongBench's, RULER's, the needle grid, then tasks of your own.

A task of your own is a row of LongBench's table with a `prompt`, or comes from another package through the entry-point
group `kv_eviction.tasks`: `riddles = "my_package.my_module:RIDDLES"`. It runs when `benchmark.tasks` names it.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

from harness.benchmarks.longbench.tasks import TABLE as LONGBENCH
from harness.benchmarks.needle.tasks import TABLE as NEEDLE_GRID
from harness.benchmarks.ruler.tasks import TABLE as RULER_13
from harness.benchmarks.task import CATEGORIES, NEEDLE, OWN, RULER, Task
from harness.errors import UserError

ENTRY_POINT_GROUP = "kv_eviction.tasks"

_ROWS: dict[str, Task] = {task.name: task for task in (*LONGBENCH, *RULER_13, *NEEDLE_GRID)}
ALL_CATEGORIES = (*CATEGORIES, RULER, NEEDLE, OWN)


class _Tasks(Mapping[str, Task]):
    """The rows above, then the tasks of other packages by name; each of these is imported when first looked up."""

    def __getitem__(self, name: str) -> Task:
        return _ROWS[name] if name in _ROWS else _registered_task(name)

    def __iter__(self) -> Iterator[str]:
        yield from _ROWS
        yield from _registered()

    def __len__(self) -> int:
        return len(_ROWS) + len(_registered())


TASKS: Mapping[str, Task] = _Tasks()


def get_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UserError: there is no such task, and the message gives the nearest names; or another package registers it, and
            it cannot be had from there.
    """
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"The tasks are {', '.join(TASKS)}."
    raise UserError(f"task {name!r} is unknown. {hint}")


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        if point.name in _ROWS or point.name in points:
            raise UserError(f"entry point {point.value} registers task {point.name}, which exists already. Rename it.")
        points[point.name] = point
    return points


@functools.cache
def _registered_task(name: str) -> Task:
    point = _registered()[name]
    try:
        task = point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"task {name} cannot be had from entry point {point.value}: {error}. Mend it.") from error
    if not isinstance(task, Task) or not task.is_own or task.name != name:
        raise UserError(f"entry point {point.value} is {task!r}, must be a Task called {name} with a prompt. Mend it.")
    return task
