"""The configuration of a load test: its schema, and the checks that need no model and no engine.

Hydra composes `conf/bench/` on top of these dataclasses. Models and engines are those of `conf/`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import product
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from harness.bench.lengths import Lengths, parse_lengths
from harness.budget import FULL_CACHE_POLICY
from harness.config import (
    BenchmarkConfig,
    EngineConfig,
    HarnessConfig,
    ModelConfig,
    PolicyConfig,
    TrackerConfig,
    read_composed,
)
from harness.config_checks import to_dataclass
from harness.config_help import register_help
from harness.engines.choose import VLLM
from harness.errors import UserError
from harness.hardware import cuda_gpus, inference_device
from harness.pool import pool_tokens

STOCK = "stock"
LOAD_FORMATS = ("auto", "dummy")


@dataclass
class LoadConfig:
    """What the engine is asked to do.

    Attributes:
        num_requests: requests a repeat; None is replaced by twice as many as a GPU's pool holds with the full cache.
        input_tokens, output_tokens: length of prompts and answers, see `harness.bench.lengths.parse_lengths`.
        request_rate: requests a second, arriving as a Poisson process; None for all at once.
        ignore_eos: generate exactly `output_tokens`.
        seed: draws lengths, prompts and arrivals.
    """

    num_requests: int | None = MISSING
    input_tokens: Any = MISSING
    output_tokens: Any = MISSING
    request_rate: float | None = None
    ignore_eos: bool = True
    seed: int = 0


@dataclass
class WarmupConfig:
    """Requests that every engine answers before it is timed; `output_tokens` shortens their answers."""

    num_requests: int = MISSING
    output_tokens: int = MISSING


@dataclass
class VariantsConfig:
    """What is compared: the full cache, every policy with every budget, each with every block size.

    Attributes:
        budgets: each as `policy.budget`.
        block_sizes: tokens a KV block; None for `engine.block_size` alone.
        options: options of single policies, by policy, on top of those in `conf/policy/`; None for no others.
        stock: also measure vLLM without the plugin.
    """

    policies: list[str] = MISSING
    budgets: list[Any] = MISSING
    block_sizes: list[int] | None = None
    options: Any = None
    stock: bool = False


@dataclass
class BenchConfig:
    """One load test.

    Attributes:
        name: with the model's name the name of its folder.
        load_format: "dummy" gives the model's shape random weights, so that none are needed.
        repeats: how often every variant carries the load, in turn with the others.
        side_by_side: keep the engines of all variants loaded from beginning to end, each in its own process, and let
            one work at a time; otherwise an engine is loaded for each repeat. None is replaced by True on CPU, and on
            GPU by False, where each engine takes the whole memory.
    """

    name: str = MISSING
    model: ModelConfig = MISSING
    engine: EngineConfig = MISSING
    load: LoadConfig = MISSING
    warmup: WarmupConfig = MISSING
    variants: VariantsConfig = MISSING
    load_format: str = "auto"
    repeats: int = MISSING
    side_by_side: bool | None = None
    results_dir: str = MISSING
    overwrite: bool = False


@dataclass(frozen=True)
class Variant:
    """One engine of a load test.

    Attributes:
        config: model, policy and engine as a LongBench run would have them; `max_model_len` fits the load.
        is_stock: vLLM without the plugin; its policy then counts for nothing.
        note: policy options that differ from `conf/policy/`, as text.
    """

    config: HarnessConfig
    is_stock: bool = False
    note: str = ""

    @property
    def policy(self) -> str:
        """Name of the policy, "stock" without the plugin."""
        return STOCK if self.is_stock else self.config.policy.name

    @property
    def label(self) -> str:
        """Unique in the load test and fit for a file name."""
        budget = "" if self.config.policy.budget is None else f"-{self.config.policy.budget}"
        return f"{self.policy}{budget}-b{self.config.engine.block_size}"


@dataclass(frozen=True)
class Plan:
    """A checked load test; devices' defaults are filled in, and `input_tokens`, `output_tokens` read."""

    config: BenchConfig
    input_tokens: Lengths
    output_tokens: Lengths
    variants: list[Variant]

    @property
    def num_runs(self) -> int:
        """Of all variants and repeats."""
        return len(self.variants) * self.config.repeats


def register_schema() -> None:
    """Make the schema known to Hydra as `bench_schema`."""
    register_help()
    ConfigStore.instance().store(name="bench_schema", node=BenchConfig)


def make_plan(config: DictConfig) -> Plan:
    """Turn a composed configuration into a checked plan.

    Raises:
        UserError: a key without a value, or values that do not fit together.
    """
    bench = read_composed(config, BenchConfig)
    _check_counts(bench)
    _check_policies(bench.variants)
    bench = _fill_side_by_side(bench)
    input_tokens = parse_lengths("load.input_tokens", bench.load.input_tokens)
    output_tokens = parse_lengths("load.output_tokens", bench.load.output_tokens)
    longest = input_tokens.longest + output_tokens.longest
    if longest > bench.model.max_model_len:
        raise UserError(
            f"load.input_tokens and load.output_tokens reach {longest} tokens together, and "
            f"model={bench.model.name} takes {bench.model.max_model_len}. Shorten one of them."
        )
    bench = _fill_requests(bench, longest)
    model = replace(bench.model, max_model_len=longest)
    variants = list(_variants(replace(bench, model=model)))
    for variant in variants:
        _check_pool(variant.config.engine, longest)
    return Plan(bench, input_tokens, output_tokens, variants)


def _fill_requests(bench: BenchConfig, longest: int) -> BenchConfig:
    if bench.load.num_requests is not None:
        return bench
    cards = [memory for _, memory in cuda_gpus()][: bench.engine.tensor_parallel_size]
    num_fitting = pool_tokens(bench.model, cards) // longest if inference_device() == "cuda" else 0
    if not num_fitting:
        raise UserError(
            "load.num_requests=null means twice what a GPU's KV pool holds, and here none would fit. Give a number."
        )
    return replace(bench, load=replace(bench.load, num_requests=2 * num_fitting))


def _check_counts(bench: BenchConfig) -> None:
    counts = {
        "repeats": bench.repeats,
        "load.num_requests": bench.load.num_requests,
        "warmup.num_requests": bench.warmup.num_requests,
        "warmup.output_tokens": bench.warmup.output_tokens,
        "load.request_rate": bench.load.request_rate,
    }
    for key, value in counts.items():
        if value is not None and value <= 0:
            raise UserError(f"{key}={value} is not positive. Use 1 or more.")
    if bench.engine.name != VLLM:
        raise UserError(f"engine={bench.engine.name} serves no load. Use engine={VLLM}.")
    if bench.load_format not in LOAD_FORMATS:
        raise UserError(f"load_format={bench.load_format} is unknown. Use {' or '.join(LOAD_FORMATS)}.")
    if bench.load_format == "dummy" and not bench.load.ignore_eos:
        raise UserError("load.ignore_eos=false has no meaning with load_format=dummy: random weights never stop.")


def _check_policies(variants: VariantsConfig) -> None:
    if FULL_CACHE_POLICY in variants.policies or STOCK in variants.policies:
        raise UserError(
            f"variants.policies={variants.policies}: full is always measured, stock with variants.stock=true. "
            "Name evicting policies only."
        )
    options = variants.options or {}
    if not isinstance(options, dict) or not all(isinstance(own, dict) for own in options.values()):
        raise UserError(f"variants.options={options} is not {{policy: {{option: value}}}}.")
    if strangers := ", ".join(sorted(set(options) - set(variants.policies))):
        raise UserError(f"variants.options has options of {strangers}, and variants.policies={variants.policies}.")


def _fill_side_by_side(bench: BenchConfig) -> BenchConfig:
    on_cpu = inference_device() == "cpu"
    side_by_side = on_cpu if bench.side_by_side is None else bench.side_by_side
    if side_by_side and not on_cpu:
        raise UserError("side_by_side=true on a GPU: each engine takes the whole memory. Use side_by_side=false.")
    if side_by_side and bench.engine.in_process:
        raise UserError(
            "engine.in_process=true holds one engine only. Use side_by_side=false with it, or leave it out."
        )
    engine = replace(bench.engine, in_process=bool(bench.engine.in_process))
    return replace(bench, side_by_side=side_by_side, engine=engine)


def _variants(bench: BenchConfig) -> Iterator[Variant]:
    wanted = bench.variants
    for block_size in wanted.block_sizes or [bench.engine.block_size]:
        engine = replace(bench.engine, block_size=block_size)
        full = _harness_config(bench, engine, PolicyConfig(FULL_CACHE_POLICY))
        yield Variant(full)
        if wanted.stock:
            yield Variant(full, is_stock=True)
        for name, budget in product(wanted.policies, wanted.budgets):
            own = (wanted.options or {}).get(name, {})
            policy = PolicyConfig(name, budget, _configured_options(name) | own)
            note = ", ".join(f"{key}={value}" for key, value in own.items())
            yield Variant(_harness_config(bench, engine, policy), note=note)


def _configured_options(policy: str) -> dict[str, Any]:
    """The options in `conf/policy/`; a policy of another package has none there and keeps its own defaults."""
    file = resources.files("conf").joinpath("policy", f"{policy}.yaml")
    return OmegaConf.to_container(OmegaConf.load(str(file)).options) if file.is_file() else {}


def _harness_config(bench: BenchConfig, engine: EngineConfig, policy: PolicyConfig) -> HarnessConfig:
    whole = HarnessConfig(
        model=bench.model,
        policy=policy,
        benchmark=BenchmarkConfig(name="load test", source="random tokens"),
        engine=engine,
        tracker=TrackerConfig(name="none"),
        results_dir=bench.results_dir,
    )
    return to_dataclass(OmegaConf.structured(whole))


def _check_pool(engine: EngineConfig, longest: int) -> None:
    """One block is vLLM's own."""
    needed = -(-longest // engine.block_size) + 1
    if engine.num_kv_blocks is not None and engine.num_kv_blocks < needed:
        raise UserError(
            f"engine.num_kv_blocks={engine.num_kv_blocks} blocks of {engine.block_size} cannot hold one request of "
            f"{longest} tokens in the full cache. Use {needed} or more."
        )


def as_plain(plan: Plan) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values."""
    return asdict(plan.config)
