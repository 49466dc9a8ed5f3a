"""The source that decides the results of a run, and its digest.

It is what `harness.run.experiment` imports, directly or not, and the run's own policy and engine with what they import,
wherever these two lie. Other policies do not count, nor do comments, docstrings, layout, modules that only show or keep
results, and other installed packages, whose versions the manifest has. Imports are read from the source: nothing is
imported here, and what a module of another package imports by a computed name is not seen. A module's name counts with
its content, because an import of the same name from another place may be other code: a moved module makes another run.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path

from harness.errors import UserError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PROJECT = ("harness", "policies")
ROOT = "harness.run.experiment"
STARTED_BY_NAME = ("harness/engines/vllm", "harness/engines/kvpress")  # in vLLM's processes, and in another environment
WITHOUT_EFFECT = (
    *("harness.progress", "harness.run.summary", "harness.store", "harness.tracking"),
    *("harness.budget", "harness.config_checks", "harness.pool"),  # what they decide is in the configuration
)
REGISTRY, TABLE, ENTRY_POINT_GROUP = "policies.registry", "BUILT_IN", "kv_eviction.policies"
INSTALLED = ("site-packages", "dist-packages")
NO_SOURCE = "no source"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class ResultCode:
    """Digests of the source that decides the results of a run.

    Attributes:
        shared_sha256: what all runs have in common.
        own: digest by module of what only runs with this policy and engine use; "module:Class" for these two.
    """

    shared_sha256: str
    own: dict[str, str]


def result_code(policies: Iterable[str], engine: str) -> ResultCode:
    """The code of a run of some policies.

    Args:
        policies: registered names; unknown ones have no code.
        engine: `engine.name`, which may be "module:Class".

    Raises:
        UserError: a file that counts is not Python.
    """
    shared = _sources(ROOT, *_started_by_name())
    known = policy_classes()
    classes = [known[name] for name in policies if name in known] + [engine] * (":" in engine)
    own: dict[str, str] = {}
    for each in classes:
        module = each.partition(":")[0]
        sources = _sources(module)
        own[each] = sources.pop(module, NO_SOURCE)
        own |= {name: sha256 for name, sha256 in sources.items() if name not in shared}
    return ResultCode(_sha256(sorted(shared.items())), own)


def source_digest(package: Path) -> str:
    """Digest of all modules in a folder, counted as `result_code` counts them."""
    return _sha256([[path.name, _read(path.stem, path)[0]] for path in sorted(package.glob("*.py"))])


def policy_classes() -> dict[str, str]:
    """Name -> "module:Class" of every policy: `policies.available_policies` without its import of torch."""
    registry = ast.parse(_locate(REGISTRY).read_bytes())
    (built_in,) = (ast.literal_eval(node.value) for node in registry.body if _assigns(node, TABLE))
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | built_in


def _started_by_name() -> Iterator[str]:
    for folder in STARTED_BY_NAME:
        for path in (PROJECT_ROOT / folder).rglob("*.py"):
            yield ".".join(path.relative_to(PROJECT_ROOT).with_suffix("").parts).removesuffix(".__init__")


def _sources(*modules: str) -> dict[str, str]:
    """Digest by name of these modules and of all that they import, as far as it counts."""
    counts = _counting(modules[0])
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        path = _locate(module) if counts(module) else None
        if path is not None:
            found[module], imported = _read(module, path)
            waiting += imported
    return found


def _counting(module: str) -> Callable[[str], bool]:
    """Which imports of `module` count: this project, its own package, and what lies beside that unless installed."""
    package = _top(module)
    home = _home(package)

    def counts(name: str) -> bool:
        if any(name == other or name.startswith(f"{other}.") for other in WITHOUT_EFFECT):
            return False
        if _top(name) in (*PROJECT, package):
            return True
        return home is not None and home.name not in INSTALLED and _home(_top(name)) == home

    return counts


def _read(module: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of a module, and the names of what it imports; those of classes and functions are among them."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        return _digest_and_imports(path.read_bytes(), package, TABLE if module == REGISTRY else None)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not Python: {error}. Mend it.") from error


@functools.cache
def _digest_and_imports(source: bytes, package: str, left_out: str | None) -> tuple[str, tuple[str, ...]]:
    """What `_read` gives; `left_out` is a variable whose value does not count."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not _assigns(node, left_out)]
    return _sha256(_plain(tree)), tuple(_imports(tree, package))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    yield from _parents(package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from _parents(origin)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _parents(module: str) -> Iterator[str]:
    """A module and the packages around it, whose code runs when it is imported."""
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _plain(node: object) -> object:
    """Syntax as lists, without docstrings, places and empty fields, so that every version of Python says the same."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        del node.body[0]
    filled = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *((name, _plain(value)) for name, value in filled)]


def _assigns(node: ast.stmt, variable: str | None) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == variable for t in node.targets)


def _locate(module: str) -> Path | None:
    """The file of a module; None where `module` names no module, or one without source."""
    package, *rest = module.split(".")
    spec = _spec(package)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if str(spec.origin).endswith(".py") else None
    bases = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    files = [file for base in bases for file in (base / "__init__.py", base.parent / f"{base.name}.py")]
    return next((file for file in files if file.is_file()), None)


def _home(package: str) -> Path | None:
    """The folder that holds a top-level module or package."""
    spec = _spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    return next((Path(place).parent for place in places if place), None)


def _spec(package: str) -> ModuleSpec | None:
    with contextlib.suppress(ValueError):  # a module that says nothing of where it comes from
        return importlib.util.find_spec(package)
    return None


def _top(module: str) -> str:
    return module.partition(".")[0]


def _sha256(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
