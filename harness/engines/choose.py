"""Which engine answers. Engines are imported only when built."""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from harness.budget import is_share
from harness.config import BYTES_OF_DTYPE, EngineConfig, HarnessConfig, ModelConfig
from harness.engines.contract import Engine
from harness.engines.vllm.environment import prepare_environment
from harness.errors import UserError
from harness.hardware import GIB, inference_device

if TYPE_CHECKING:
    from harness.engines.vllm.arguments import EngineShape
    from policies import Policy

VLLM = "vllm"
REFERENCE = "hf"
PEER = "kvpress"
OWN_KEYS = ("name", "in_process", "reserve")


def prepare_engine(config: EngineConfig) -> None:
    """Set what the engine reads from the environment; must run before torch is imported, whose threads read it too."""
    if config.name == VLLM:
        prepare_environment(in_process=bool(config.in_process), num_workers=config.tensor_parallel_size)


def check_policy(config: HarnessConfig) -> None:
    """Refuse what the engine cannot do with the policy, before a model is loaded.

    Raises:
        UserError: names the setting and the remedy.
    """
    from harness.engines.prompt_plans import configured_policy

    policy = config.policy
    if config.record_retention and config.engine.name not in (VLLM, REFERENCE):
        raise UserError(
            f"record_retention=true is not for engine={config.engine.name}. Use engine=vllm or hf, or leave it out."
        )
    try:
        if config.engine.name == PEER:
            from harness.engines.kvpress.presses import press_for
            from harness.engines.kvpress.process import check_environment

            press_for(policy.name, policy.budget, config.engine.block_size or 0, policy.options)
            check_environment()
        else:
            built = configured_policy(config)
            built.for_model(config.model.num_layers, config.model.num_kv_heads)
            _warn_of_protection(built)
            if built.warning:
                print(f"warning: {built.warning}", file=sys.stderr)
    except ValueError as error:
        raise UserError(str(error)) from error


def _warn_of_protection(policy: "Policy") -> None:
    """Say so where a score hardly matters."""
    if policy.prompt_share is not None:
        return
    num_chosen = policy.budget - policy.protect_first - policy.protect_last
    if policy.takes_budget and 2 * num_chosen < policy.budget:
        print(
            f"warning: policy={policy.name} chooses at most {num_chosen} of policy.budget={policy.budget} tokens by "
            f"score: the first {policy.protect_first} and the last {policy.protect_last} always stay. "
            "Raise policy.budget.",
            file=sys.stderr,
        )


def build_engine(config: HarnessConfig, model_path: str, folder: Path) -> Engine:
    """Load the model into the engine that `engine.name` names, one of those above or "module:Class" of another one.

    Another one is called with the configuration and the path. `prepare_engine` comes first.

    Args:
        config: the whole configuration.
        model_path: local folder or hub id.
        folder: the run folder, for what the engine itself records.

    Raises:
        UserError: unknown engine, or a setting that engine or policy refuses.
    """
    module, separator, attribute = config.engine.name.partition(":")
    try:
        if config.engine.name == VLLM:
            return _build_vllm(config, model_path, folder)
        if config.engine.name == REFERENCE:
            return _build_reference(config, model_path, folder)
        if config.engine.name == PEER:
            return _build_peer(config, model_path)
        if separator:
            return getattr(importlib.import_module(module), attribute)(config, model_path)
    except ValueError as error:
        raise UserError(str(error)) from error
    raise UserError(f"engine.name={config.engine.name} is unknown. Use {VLLM}, {REFERENCE}, {PEER} or module:Class.")


def engine_shape(config: HarnessConfig, model_path: str) -> "EngineShape":
    """The configuration as the vLLM engine takes it; `prepare_engine` comes first."""
    from harness.engines.vllm.arguments import EngineShape

    model = config.model
    own = {key: value for key, value in asdict(config.engine).items() if key not in OWN_KEYS}
    return EngineShape(
        model=model_path,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        revision=model.revision,
        **own | {"kv_cache_gib": _pool_gib(model, config.engine)},
    )


def _pool_gib(model: ModelConfig, engine: EngineConfig) -> float | None:
    """Size of the pool, also where blocks are counted: vLLM on CPU would then ask for most of the machine's memory."""
    if engine.num_kv_blocks is None or inference_device() != "cpu":
        return engine.kv_cache_gib
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES_OF_DTYPE[model.dtype]
    return engine.num_kv_blocks * engine.block_size * per_token / GIB


def _build_vllm(config: HarnessConfig, model_path: str, folder: Path) -> Engine:
    from harness.engines.vllm.llm import VllmEngine
    from harness.engines.vllm.settings import EvictionSettings

    policy = config.policy
    settings = EvictionSettings(
        policy.name,
        policy.budget,
        policy.options,
        reserve=config.engine.reserve,
        retention=str(folder.resolve()) if config.record_retention else None,
    )
    return VllmEngine(engine_shape(config, model_path), settings)


def _build_reference(config: HarnessConfig, model_path: str, folder: Path) -> Engine:
    from harness.engines.hf.engine import ReferenceEngine
    from harness.engines.prompt_plans import configured_policy

    retention = folder if config.record_retention else None
    model = config.model
    return ReferenceEngine(model_path, configured_policy(config), model.dtype, model.revision, retention)


def _build_peer(config: HarnessConfig, model_path: str) -> Engine:
    from harness.engines.kvpress.engine import KvpressEngine
    from harness.engines.kvpress.presses import press_for
    from harness.engines.prompt_plans import prompt_plans

    model, policy, block_size = config.model, config.policy, config.engine.block_size or 0
    press = press_for(policy.name, policy.budget, block_size, policy.options)
    if press is None or not is_share(policy.budget):
        return KvpressEngine(model_path, press, policy.budget, model.dtype, block_size, model.revision)
    plan_of = prompt_plans(config)
    return KvpressEngine(
        model_path,
        press,
        None,
        model.dtype,
        block_size,
        model.revision,
        budget_of=lambda num_tokens: plan_of(num_tokens).budget_tokens,
    )
