"""The worked example of `policies/README.md`, run as it stands: as another package's policy, by name."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import run_live
from tests.tiny_llama import random_prompt

README = Path(__file__).resolve().parents[3] / "policies" / "README.md"


def example(language):
    """The one block of a language in the README."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return block


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as pip would leave it on the path."""
    (tmp_path / "sticky.py").write_text(example("python"))
    info = tmp_path / "sticky-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sticky\nVersion: 1.0\n")
    group = re.search(r'entry-points\."(.*?)"', example("toml"))[1]
    line = re.search(r'(\w+) = "(.*?)"', example("toml"))
    (info / "entry_points.txt").write_text(f"[{group}]\n{line[1]} = {line[2]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield yaml.safe_load(example("yaml"))
    sys.modules.pop("sticky", None)


def test_the_example_evicts_inside_vllm(installed, shape):
    assert len(example("python").splitlines()) <= 40
    settings = EvictionSettings(installed["name"], 64, installed["options"])
    run = run_live(shape, settings, [GenerationRequest("r0", random_prompt(200), 80, ignore_eos=True)])
    first, *later = run.decisions["r0"]
    assert (first.num_before, first.num_keep) == (200, 64)
    assert [(decision.num_before, decision.num_keep) for decision in later] == [(96, 64)] * 2
    assert all(heads[0][:4] == [0, 1, 2, 3] for decision in run.decisions["r0"] for heads in decision.kept)
