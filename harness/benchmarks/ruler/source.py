"""RULER's generators, taken out of the source files of the installed package `lm-eval`.

Nothing is copied into this project. Each file is checked by its SHA-256; of its definitions those that are wanted are
run with what they need handed to them, so that importing neither downloads anything (lm-eval's module fetches nltk's
data when imported, and builds a list of six million words) nor shares the global random numbers of the process.
"""

import __future__

import ast
import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from harness.benchmarks.lm_eval_files import REMEDY, tasks_folder
from harness.errors import UserError

SHA256 = {
    "cwe_utils.py": "e27159df13850979",
    "fwe_utils.py": "f0bb18891e4d6815",
    "niah_utils.py": "f0c219af1139e7f1",
    "prepare_niah.py": "beb37d90132ce928",
    "qa_utils.py": "e12e3220899cb885",
    "vt_utils.py": "9d71679b55475126",
}


def take(file: str, names: Sequence[str], **supplied: object) -> dict[str, Any]:
    """Run the top-level definitions called `names` of one of lm-eval's RULER files.

    Args:
        supplied: what the definitions use beside each other, by the name they use.

    Raises:
        UserError: lm-eval is not installed, is another version, or lacks one of the names.
    """
    namespace = dict(supplied)
    nodes = [node for node in _tree(file).body if _names(node) & set(names)]
    missing = set(names) - set().union(*map(_names, nodes))
    if missing:
        raise UserError(f"lm-eval's {file} has no {', '.join(sorted(missing))}. {REMEDY}")
    run(ast.Module(nodes, []), file, namespace)
    return namespace


def dict_value(file: str, function: str, key: str) -> Callable[..., Any]:
    """Return, as a function of its variables, the expression that a function writes under a key of a dictionary."""
    (body,) = (node for node in _tree(file).body if function in _names(node))
    (value,) = (
        value
        for node in ast.walk(body)
        if isinstance(node, ast.Dict)
        for name, value in zip(node.keys, node.values, strict=True)
        if isinstance(name, ast.Constant) and name.value == key
    )
    code = compile(ast.Expression(value), file, "eval")
    return lambda **variables: eval(code, dict(variables))


def run(module: ast.Module, file: str, namespace: dict[str, Any]) -> None:
    """Run definitions in a namespace, their annotations unread."""
    exec(compile(module, file, "exec", __future__.annotations.compiler_flag), namespace)


def _tree(file: str) -> ast.Module:
    path = tasks_folder("ruler") / file
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"RULER's generators cannot be read: {error}. {REMEDY}") from error
    digest = hashlib.sha256(source).hexdigest()
    if not digest.startswith(SHA256[file]):
        version = importlib.metadata.version("lm-eval")
        raise UserError(
            f"{file} of lm-eval {version} is not the one this project knows (SHA-256 {digest[:16]}, wanted "
            f"{SHA256[file]}). {REMEDY}"
        )
    return ast.parse(source)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()
