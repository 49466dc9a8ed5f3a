"""Which engine answers. Engines are imported only when built."""

import importlib
from dataclasses import asdict

from harness.config import EngineConfig, HarnessConfig
from harness.engine.environment import prepare_environment
from harness.errors import UserError
from harness.generation import Engine

VLLM = "vllm"
OWN_KEYS = ("name", "in_process", "reserve")


def prepare_engine(config: EngineConfig) -> None:
    """Set what the engine reads from the environment; must run before torch is imported, whose threads read it too."""
    if config.name == VLLM:
        prepare_environment(in_process=bool(config.in_process))


def build_engine(config: HarnessConfig, model_path: str) -> Engine:
    """Load the model into the engine that `engine.name` names: "vllm", or "module:Class" of another one.

    Another one is called with the configuration and the path. `prepare_engine` comes first.

    Args:
        config: the whole configuration.
        model_path: local folder or hub id.

    Raises:
        UserError: unknown engine, or a setting that engine or policy refuses.
    """
    module, separator, attribute = config.engine.name.partition(":")
    try:
        if config.engine.name == VLLM:
            return _build_vllm(config, model_path)
        if separator:
            return getattr(importlib.import_module(module), attribute)(config, model_path)
    except ValueError as error:
        raise UserError(str(error)) from error
    raise UserError(f"engine.name={config.engine.name} is unknown. Use {VLLM} or module:Class.")


def _build_vllm(config: HarnessConfig, model_path: str) -> Engine:
    from harness.engine.arguments import EngineShape
    from harness.engine.llm import VllmEngine
    from harness.engine.settings import EvictionSettings

    model, policy = config.model, config.policy
    shape = EngineShape(
        model=model_path,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        revision=model.revision,
        **{key: value for key, value in asdict(config.engine).items() if key not in OWN_KEYS},
    )
    settings = EvictionSettings(policy.name, policy.budget, policy.options, reserve=config.engine.reserve)
    return VllmEngine(shape, settings)
