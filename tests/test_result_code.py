"""What a run id counts as its code: all that can change results, and nothing of other policies.

On a copy of the sources, edited for real and digested by a new process.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.store.result_code import ENTRY_POINT_GROUP, policy_classes, result_code
from policies import available_policies
from policies import registry as registries

ROOT = Path(__file__).resolve().parents[1]
DIGEST = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from harness.store.result_code import policy_classes, result_code
def codes(names):
    return {name: asdict(result_code([name], "mine:Engine")) for name in names}
def codes_after_an_edit(file):
    text = Path(file).read_text()
    Path(file).write_text(text + "EXTRA = 1\\n")
    try:
        return codes(["full", "h2o", "kvpress"])
    finally:
        Path(file).write_text(text)
found = [codes_after_an_edit(file) for file in sys.argv[1:]] or [codes(policy_classes())]
print(json.dumps([found, sorted({"torch", "policies", "mine"} & set(sys.modules))]))
"""
ENGINE = "from beside import constant\n\n\nclass Engine:\n    pass\n"
KEPT = "import neighbour, torch\nfrom policies.h2o import H2O\nfrom . import numbers\n\n\nclass Kept(H2O):\n    pass\n"
USE_ATTENTION = {
    "elastic_cache",
    "kvpress",
    "ada_kv",
    "chunkkv",
    "corm",
    "h2o",
    "lagkv",
    "pyramid_kv",
    "sentencekv",
    "snapkv",
    "tova",
}


class Sources:
    """A copy of the project beside somebody's engine `mine`, which imports `beside`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for package in ("harness", "policies"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "mine.py").write_text(ENGINE)
        (root / "beside.py").write_text("constant = 1\n")

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace the first of some words, which must be there."""
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new, 1))

    def append(self, file: str, text: str) -> None:
        """Add lines to a file."""
        with (self.root / file).open("a") as opened:
            opened.write(text)

    def codes(self) -> dict[str, dict]:
        """The code of a run of every policy."""
        return self._digest()[0]

    def codes_by_edit(self, files: Iterable[str]) -> dict[str, dict[str, dict]]:
        """The code of runs of some policies when only that file has one more line."""
        return dict(zip(files, self._digest(*files), strict=True))

    def _digest(self, *files: str) -> list[dict[str, dict]]:
        command = [sys.executable, "-c", DIGEST, *files]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        codes, imported = json.loads(done.stdout)
        assert imported == []
        return codes


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> dict[str, dict]:
    """The codes of the sources as they are."""
    return Sources(tmp_path_factory.mktemp("untouched")).codes()


@pytest.fixture
def changed(untouched) -> Callable[[Sources], set[str]]:
    """Which policies have other code than in the untouched copy; a policy that is new is not among them."""

    def compare(sources: Sources) -> set[str]:
        codes = sources.codes()
        return {name for name in untouched if codes[name] != untouched[name]}

    return compare


@pytest.fixture
def sources(tmp_path) -> Sources:
    """A copy to edit."""
    return Sources(tmp_path)


def test_the_policies_are_those_of_the_registry():
    assert policy_classes() == available_policies()
    assert registries.ENTRY_POINT_GROUP == ENTRY_POINT_GROUP


def test_an_edited_policy_is_another_run_and_the_others_are_not(sources, changed):
    sources.append("policies/h2o.py", "EXTRA = 1\n")
    assert changed(sources) == {"h2o"}


def test_what_several_policies_import_counts_for_these(sources, changed):
    sources.append("policies/attention.py", "EXTRA = 1\n")
    assert changed(sources) == USE_ATTENTION


def test_a_new_policy_changes_no_other(sources, changed, untouched):
    (sources.root / "policies/mine.py").write_text("from policies.h2o import H2O\n\n\nclass Mine(H2O):\n    pass\n")
    sources.edit("policies/registry.py", "BUILT_IN = {", 'BUILT_IN = {\n    "mine": "policies.mine:Mine",')
    assert changed(sources) == set()
    assert {"policies.mine:Mine", "policies.h2o", "policies.attention"} <= sources.codes()["mine"]["own"].keys()


def test_another_class_under_a_name_is_another_run(sources, changed):
    sources.edit("policies/registry.py", "policies.tova:TOVA", "policies.tova:AttentionPolicy")
    assert changed(sources) == {"tova"}


DECIDE_ALL = (
    "policies/base.py",
    "policies/registry.py",
    "policies/selection.py",
    "harness/run/answering.py",
    "harness/engines/vllm/scheduler.py",
    "harness/engines/vllm/signals/mass.py",
    "harness/engines/contract.py",
    "harness/benchmarks/longbench/metrics.py",
    "harness/benchmarks/longbench/tasks.py",
    "harness/models.py",
    "harness/engines/kvpress/worker.py",
    "harness/engines/hf/selection.py",
    "harness/metrics.py",
    "mine.py",
    "beside.py",
)


def test_what_decides_all_results_counts_for_all(sources, untouched):
    for file, codes in sources.codes_by_edit(DECIDE_ALL).items():
        assert [name for name, code in codes.items() if code == untouched[name]] == [], file


def test_docstrings_comments_layout_and_what_only_shows_results_do_not_count(sources, changed):
    for file in ("policies/h2o.py", "harness/benchmarks/longbench/metrics.py", "policies/registry.py"):
        sources.edit(file, '"""', '"""Said better. ')
        sources.append(file, "\n\n# a comment\n")
    sources.edit("policies/h2o.py", "    def score", "\n\n    # a comment\n    def score")
    for file in ("harness/progress.py", "harness/run/summary.py", "harness/run/sweep.py"):
        sources.append(file, "EXTRA = 1\n")
    assert changed(sources) == set()


def test_a_text_that_is_no_docstring_counts(sources, changed):
    sources.append("policies/h2o.py", 'TEXT = """first"""\n')
    before = sources.codes()["h2o"]
    sources.edit("policies/h2o.py", '"""first"""', '"""second"""')
    assert sources.codes()["h2o"] != before


def test_a_file_that_does_not_parse_is_named(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("class Engine:\n    def generate(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"halfway\.py is not Python: .*line 2.* Mend it"):
        result_code([], "halfway:Engine")


@pytest.fixture
def acme(tmp_path, monkeypatch) -> Path:
    """A package with a policy as pip would leave it; returns the folder of the package."""
    package = tmp_path / "site-packages" / "acme"
    (package / "inner").mkdir(parents=True)
    info = package.parent / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nacme_policy = acme.inner.kept:Kept\n")
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("from ..setup import *\n")
    (package / "inner" / "kept.py").write_text(KEPT)
    for module in (package / "setup.py", package / "inner" / "numbers.py", package / "unused.py"):
        module.write_text("value = 1\n")
    (package.parent / "neighbour.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(package.parent)
    return package


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("inner/kept.py", True),
        ("inner/numbers.py", True),
        ("inner/__init__.py", True),
        ("setup.py", True),
        ("unused.py", False),
        ("../neighbour.py", False),
    ],
)
def test_an_edited_policy_of_another_package_is_another_run(acme, file, counts):
    before = result_code(["acme_policy"], "vllm")
    assert {"acme.inner.kept:Kept", "policies.h2o"} <= before.own.keys()
    (acme / file).write_text((acme / file).read_text() + "extra = 1\n")
    assert (result_code(["acme_policy"], "vllm") != before) == counts


LOADED = """
import sys
from harness.run.experiment import run
from tests.scripted_run import scripted_config
run(scripted_config(sys.argv[1], sys.argv[2], "benchmark.tasks=[qasper]"), "a test")
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("harness", "policies")))
"""


def test_every_module_that_a_run_loads_counts_or_is_known_to_have_no_effect(byte_model, tmp_path):
    from harness.store.result_code import WITHOUT_EFFECT, _sources, _started_by_name

    command = [sys.executable, "-c", LOADED, str(byte_model), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.splitlines()[-1].split() if not name.startswith(WITHOUT_EFFECT)}
    assert {"harness.run.answering", "policies.paged_eviction", "harness.benchmarks.longbench.metrics"} <= loaded
    own = result_code(["paged_eviction"], "vllm").own
    counted = _sources("harness.run.experiment", *_started_by_name()).keys() | {name.split(":")[0] for name in own}
    assert loaded - counted == set()
