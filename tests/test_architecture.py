"""The rules of the house that a reviewer would otherwise have to check by hand."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("harness", "policies", "conf")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
ENGINES = {f"harness.engines.{name}" for name in ("choose", "vllm", "hf", "kvpress")}
ENGINE_FREE = {"torch", "vllm"} | ENGINES
COMMANDS = {"harness.run", "harness.report", "harness.bench", "harness.compare", "harness.score"}
OTHER_BENCHMARKS = ("harness.benchmarks.ruler", "harness.benchmarks.needle", "harness.benchmarks.generated")
ABOVE_CONFIG = COMMANDS | ENGINE_FREE | {"transformers", "harness.benchmarks", "harness.store", "policies"}
# (who, must not import): a name stands for itself and for everything below it.
FORBIDDEN = [
    ("policies", {"harness", "vllm", "hydra", "wandb", "omegaconf"}),
    ("harness.statistics", COMMANDS | ENGINE_FREE | {"harness.benchmarks", "harness.store", "harness.config"}),
    ("harness.benchmarks", COMMANDS | ENGINE_FREE | {"harness.store", "harness.config", "policies"}),
    ("harness.benchmarks.longbench", {"harness.benchmarks.loading", *OTHER_BENCHMARKS} | {"harness.benchmarks.mini"}),
    ("harness.benchmarks.ruler", {"harness.benchmarks.tasks", "harness.benchmarks.longbench", *OTHER_BENCHMARKS[1:]}),
    ("harness.benchmarks.needle", {"harness.benchmarks.tasks", "harness.benchmarks.longbench", OTHER_BENCHMARKS[0]}),
    ("harness.engines", COMMANDS | {"harness.benchmarks", "harness.store", "harness.tracking"}),
    ("harness.engines.vllm", {"harness.config", "harness.engines.hf", "harness.engines.kvpress"}),
    ("harness.engines.hf", {"vllm", "harness.config", "harness.engines.vllm", "harness.engines.kvpress"}),
    ("harness.engines.kvpress", {"vllm", "harness.config", "harness.engines.vllm", "harness.engines.hf"}),
    ("harness.store", COMMANDS | ENGINE_FREE | {"transformers", "pandas", "wandb", "harness.benchmarks"}),
    ("harness.tracking", {"harness.run", "harness.bench"} | ENGINE_FREE),
    ("harness.run", {"vllm", "harness.bench", "harness.report", "harness.__main__"}),
    ("harness.bench", {"vllm", "harness.run", "harness.report", "harness.benchmarks"}),
    ("harness.report", ENGINE_FREE | {"transformers", "harness.run", "policies"}),
    ("harness.report.reading", {f"harness.report.{part}" for part in ("tables", "figures", "page", "document")}),
    ("harness.report.tables", {f"harness.report.{part}" for part in ("figures", "page", "document")}),
    ("harness.report.figures", {f"harness.report.{part}" for part in ("page", "document")}),
    *((f"harness.{name}", ABOVE_CONFIG) for name in ("config", "config_checks", "config_keys")),
]
HEAVY = {"torch", "vllm", "wandb", "transformers", "pandas", "datasets", "altair", "vl_convert"}
START_UP = ("__main__", "config", "config_checks", "config_keys", "errors", "hardware", "report/__main__")
FOREIGN_PLACES = re.compile(
    r"(?<![\w./])/(?:root|home|opt|work)/(?!\.\.\.)|https?://\S*(?:/simple\b|/whl\b|\.whl\b|packages/)"
)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offences(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{module_name(path)} imports {name}"
        for path in sources(*PACKAGES)
        if is_below(module_name(path), package)
        for name in sorted(imports(ast.parse(path.read_text())))
        if any(is_below(name, other) for other in forbidden)
    ]


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN, ids=[package for package, _ in FORBIDDEN])
def test_arrows_run_one_way(package, forbidden):
    assert any(is_below(module_name(path), package) for path in sources(*PACKAGES))
    assert offences(package, forbidden) == []


def test_only_the_engine_imports_vllm():
    found = [offence for package in PACKAGES for offence in offences(package, {"vllm"})]
    assert [offence for offence in found if not offence.startswith("harness.engines.vllm.")] == []


def test_the_check_of_arrows_sees_a_forbidden_import():
    assert any("vllm" in offence for offence in offences("harness.engines.vllm", {"vllm"}))


@pytest.mark.parametrize("name", START_UP)
def test_start_up_imports_nothing_heavy(name):
    tree = ast.parse((ROOT / "harness" / f"{name}.py").read_text())
    at_top = set().union(*(imports(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)))
    assert {n for n in at_top if n.split(".")[0] in HEAVY} == set()


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES)}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def functions():
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_functions_are_short():
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in functions()}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_functions_are_annotated():
    def is_annotated(node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        return node.returns is not None and not untyped

    assert [name for name, node in functions() if not is_annotated(node)] == []


def project_files() -> list[Path]:
    """Tracked files and files about to be."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [
        ROOT / name for name in names if name and (ROOT / name).is_file() and ROOT / name != Path(__file__).resolve()
    ]


def test_no_file_names_a_machine_path_or_a_package_index():
    found = []
    for path in project_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if FOREIGN_PLACES.search(line)]
    assert found == []
