"""Policies by name: built-in, unknown, and from another package."""

import re
import sys

import pytest
import torch

from policies import Phase, View, available_policies, build_policy
from policies.base import Policy
from policies.registry import BUILT_IN, policy_class
from policies.selection import select

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

from policies.base import Policy, View


@dataclass(frozen=True, kw_only=True)
class KeepEven(Policy):
    """Keep even positions first."""

    name: ClassVar[str] = "keep_even"
    weight: float = 1.0

    def score(self, view: View):
        return self.weight * (view.positions[:, :1] % 2 == 0).float()
'''


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A package as pip would leave it: one module, and metadata with entry points."""
    (tmp_path / "acme_eviction.py").write_text(MODULE)
    info = tmp_path / "acme_eviction-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-eviction\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kv_eviction.policies]\nkeep_even = acme_eviction:KeepEven\nfull = acme_eviction:KeepEven\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("acme_eviction", None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_name_is_the_name_of_its_class(name):
    cls = policy_class(name)
    assert issubclass(cls, Policy)
    assert cls.name == name


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match=r"policy\.name=snap_kv is unknown\. Did you mean snapkv\?") as error:
        build_policy("snap_kv", budget=64, block_size=16)
    assert all(name in str(error.value) for name in BUILT_IN)


def test_a_name_like_no_other_gets_no_guess():
    with pytest.raises(ValueError, match=r"policy\.name=zzz is unknown\. Known policies: ada_kv, cascading, chunkkv, "):
        build_policy("zzz", budget=64, block_size=16)


def test_an_unknown_option_lists_the_known_ones_and_the_closest():
    message = "policy.options.kernl is not an option of policy=snapkv. Did you mean kernel? Options: group, kernel, "
    with pytest.raises(ValueError, match=re.escape(message)):
        build_policy("snapkv", budget=64, block_size=16, options={"kernl": 5})


def test_a_budget_for_a_policy_that_never_evicts_is_refused():
    with pytest.raises(ValueError, match=r"policy=full never evicts, so policy\.budget=64 has no effect"):
        build_policy("full", budget=64, block_size=16)


def test_a_third_partys_policy_is_used_by_name(other_package):
    assert available_policies()["keep_even"] == "acme_eviction:KeepEven"
    policy = build_policy("keep_even", budget=8, block_size=4, options={"weight": 2.0})
    positions = torch.arange(12)[None, None]
    view = View(0, 1, Phase.PREFILL_END, positions, torch.tensor([12]), block_size=4)
    num_keep = policy.plan(view.phase, 12)
    mask = select(policy, view.phase, policy.score(view)[None], positions[None], view.num_seen, num_keep)
    assert positions[mask[0]].tolist() == [0, 2, 4, 6, 8, 9, 10, 11]


def test_a_third_partys_options_are_checked_like_our_own(other_package):
    with pytest.raises(
        ValueError, match=r"policy\.options\.wait is not an option of policy=keep_even\. Did you mean weight"
    ):
        build_policy("keep_even", budget=8, block_size=4, options={"wait": 2.0})


def test_another_package_cannot_replace_a_built_in_policy(other_package):
    with pytest.raises(ValueError, match=r"policy\.name=full is built in, and acme_eviction:KeepEven .* Rename that"):
        policy_class("full")


def test_a_whole_number_will_do_for_a_number():
    assert build_policy("h2o", budget=64, block_size=16, options={"heavy_ratio": 1}).heavy_ratio == 1


def test_a_third_partys_policy_is_gone_with_its_package():
    assert "keep_even" not in available_policies()
