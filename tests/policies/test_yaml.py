"""The YAML files of policies and of their presets."""

from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from policies import Policy, available_policies, build_policy
from policies.registry import BUILT_IN

BUDGET, BLOCK = 160, 16
CONF = Path(__file__).parents[2] / "conf" / "policy"


@pytest.mark.parametrize("path", [CONF / f"{name}.yaml" for name in BUILT_IN], ids=lambda path: path.stem)
@pytest.mark.parametrize("block_size", [16, 32])
def test_each_yaml_builds_the_defaults_and_names_every_option(path, block_size):
    conf = OmegaConf.to_container(OmegaConf.load(path))
    if path.stem not in available_policies():
        pytest.skip(f"needs {path.stem} (make setup)")
    assert conf["name"] == path.stem
    policy = build_policy(conf["name"], budget=conf["budget"], block_size=block_size, options=conf["options"])
    assert policy == build_policy(conf["name"], budget=conf["budget"], block_size=block_size)
    assert conf["budget"] == (512 if policy.takes_budget else None)
    own = {field.name for field in fields(policy)} - {field.name for field in fields(Policy)}
    modes = {"prefill", "prefill_chunk"} if policy.evicts and len(policy.modes) > 1 else set()
    assert own | modes <= conf["options"].keys()
    lines = path.read_text().splitlines()
    assert lines[0].startswith(f"# python -m harness policy={path.stem}")
    assert len(lines) <= 15


def test_every_other_yaml_is_a_preset_of_a_policy():
    for path in CONF.glob("*.yaml"):
        if path.stem not in BUILT_IN:
            base, own = OmegaConf.load(path).defaults
            assert (base in BUILT_IN, own) == (True, "_self_")
            options = OmegaConf.merge(OmegaConf.load(CONF / f"{base}.yaml").options, OmegaConf.load(path).options)
            preset = build_policy(base, budget=BUDGET, block_size=BLOCK, options=OmegaConf.to_container(options))
            assert preset != build_policy(base, budget=BUDGET, block_size=BLOCK)
