"""What the runner does with the caches that vLLM hands it, and which configurations it refuses or adjusts."""

from types import SimpleNamespace

import pytest
import torch
from vllm import EngineArgs
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import harness.engines.vllm.runner as runner_module
from harness.engines.vllm.arguments import EngineShape, eviction_arguments
from harness.engines.vllm.compaction import Compactor
from harness.engines.vllm.cuda import EvictionGPUModelRunner, RaggedGPUModelRunner, bytes_beside
from harness.engines.vllm.layout import InterleavedLayout
from harness.engines.vllm.observers import Observers
from harness.engines.vllm.plugin import configure
from harness.engines.vllm.prompt_rows import rows_of_state
from harness.engines.vllm.runner import EvictionRunning
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.slices import transient_bytes
from policies import build_policy
from tests.gpu.caches import BLOCK, CPU, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, allocate, spec_of

WATCHING = [
    ("h2o", {}),
    ("snapkv", {"window": 8}),
    ("tova", {}),
    ("chunkkv", {"window": 8}),
    ("expected_attention", {}),
]
UNWATCHED = ["paged_eviction", "streaming_llm", "random", "keydiff", "inverse_key_l2"]
NUM_BLOCKS, NUM_ROWS, NUM_QUERY_HEADS = 8, 4, 4


class Impl:
    """An attention implementation, for what the plugin uses of it."""

    def __init__(self, alibi_slopes=None):
        self.scale, self.alibi_slopes = HEAD_SIZE**-0.5, alibi_slopes

    def forward(self, layer, query):
        return query


class StockRunner:
    """What the mixin finds in vLLM's runner after `initialize_kv_cache`."""

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None):
        self.kv_cache_config = kv_cache_config
        caches = allocate(KVCacheLayout.LBNHC, kv_cache_config.num_blocks, spec_of(torch.float32))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.kv_cache = cache
        self._kernel_block_sizes = [BLOCK]


class Runner(EvictionRunning, StockRunner):
    layout_class = InterleavedLayout


@pytest.fixture
def make_runner(monkeypatch):
    monkeypatch.setattr(runner_module, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))

    def make(policy, options=None, mode=CUDAGraphMode.NONE, block_size=BLOCK, **impl):
        runner = object.__new__(Runner)
        runner.layers = [SimpleNamespace(impl=Impl(**impl)) for _ in range(NUM_LAYERS)]
        names = [f"layer.{index}" for index in range(NUM_LAYERS)]
        runner._settings = EvictionSettings(policy, budget=64, options=options or {})
        runner.eviction_policy = runner._settings.build_policy(block_size)
        runner.compactor = runner._observers = runner._retention = None
        runner.compilation_config = SimpleNamespace(
            cudagraph_mode=mode, static_forward_context=dict(zip(names, runner.layers, strict=True))
        )
        geometry = SimpleNamespace(get_num_layers=lambda parallel: NUM_LAYERS, get_total_num_kv_heads=lambda: NUM_HEADS)
        runner.vllm_config = SimpleNamespace(
            model_config=geometry, parallel_config=SimpleNamespace(tensor_parallel_size=1)
        )
        runner.device, runner.max_num_reqs, runner.model = CPU, NUM_ROWS, torch.nn.ModuleDict({"rotary": Rotary()})
        runner.names = names
        return runner

    return make


class Rotary(torch.nn.Module):
    base = 10000.0

    def __init__(self):
        super().__init__()
        self.cos_sin_cache = torch.ones(64, HEAD_SIZE)

    def _compute_inv_freq(self, base):
        return base ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)


def config_of(runner, num_blocks=NUM_BLOCKS):
    group = SimpleNamespace(layer_names=runner.names, kv_cache_spec=spec_of(torch.float32))
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])


def test_the_caches_of_the_graph_measurement_are_not_bound(make_runner):
    """vLLM measures CUDA graphs on small caches and throws them away; what held them would keep them alive."""
    runner = make_runner("h2o")
    plain = [layer.impl for layer in runner.layers]
    runner.initialize_kv_cache(config_of(runner, num_blocks=2), is_profiling=True)
    assert runner.compactor is None
    assert [layer.impl for layer in runner.layers] == plain
    runner.initialize_kv_cache(config_of(runner))
    layout = runner.compactor._layout
    starts = layout.grid.numbers(torch.tensor([[0]]))[:, 0, 0, 0]
    assert [layout.pages[start].data_ptr() for start in starts] == [
        layer.kv_cache.data_ptr() for layer in runner.layers
    ]
    for layer, impl in zip(runner.layers, plain, strict=True):
        assert type(layer.impl).__mro__[1] is type(impl), "watched once"


@pytest.mark.parametrize(("policy", "options"), WATCHING)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_full_graphs_are_refused_to_policies_that_watch_attention(make_runner, policy, options, mode):
    runner = make_runner(policy, options, mode)
    with pytest.raises(ValueError, match="PIECEWISE"):
        runner.initialize_kv_cache(config_of(runner))


@pytest.mark.parametrize("policy", UNWATCHED)
def test_other_policies_may_use_full_graphs(make_runner, policy):
    runner = make_runner(policy, mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.initialize_kv_cache(config_of(runner))
    assert runner.compactor is not None


def test_a_block_size_that_vllm_changes_for_the_backend_reaches_the_policy(make_runner):
    runner = make_runner("paged_eviction", block_size=2 * BLOCK)
    runner.initialize_kv_cache(config_of(runner))
    assert runner.eviction_policy.block_size == BLOCK == runner.compactor._policy.block_size


def test_alibi_is_refused(make_runner):
    runner = make_runner("random", alibi_slopes=torch.ones(NUM_QUERY_HEADS))
    with pytest.raises(ValueError, match="ALiBi"):
        runner.initialize_kv_cache(config_of(runner))


def mode_of(policy, options, **changes):
    shape = EngineShape(model="m", dtype="bfloat16", max_model_len=512, block_size=BLOCK, **changes)
    arguments = eviction_arguments(shape, EvictionSettings(policy, budget=64, options=options))
    return CompilationConfig(**arguments.get("compilation_config", {})).cudagraph_mode


@pytest.mark.parametrize(("policy", "options"), WATCHING)
def test_the_harness_asks_for_piecewise_graphs_where_attention_is_watched(policy, options):
    mode = mode_of(policy, options, enforce_eager=False)
    assert mode is CUDAGraphMode.PIECEWISE
    assert not mode.has_full_cudagraphs()


@pytest.mark.parametrize("policy", UNWATCHED)
def test_the_harness_leaves_graphs_to_vllm_otherwise(policy):
    assert mode_of(policy, {}, enforce_eager=False) is None
    assert mode_of("h2o", {}, enforce_eager=True) is None


@pytest.mark.parametrize(
    ("policy", "wanted", "mode"),
    [
        ("h2o", None, CUDAGraphMode.PIECEWISE),
        ("h2o", CUDAGraphMode.NONE, CUDAGraphMode.NONE),
        ("h2o", CUDAGraphMode.FULL, CUDAGraphMode.FULL),  # refused when the engine starts, see above
        ("paged_eviction", None, None),
    ],
)
def test_a_stock_server_gets_piecewise_graphs_where_attention_is_watched(tmp_path, policy, wanted, mode):
    settings = {"policy": policy, "budget": 64, "counters": str(tmp_path / "counters")}
    arguments = EngineArgs(
        model="m", compilation_config={"cudagraph_mode": wanted}, additional_config={CONFIG_KEY: settings}
    )
    configure(arguments)
    assert arguments.compilation_config.cudagraph_mode is mode


@pytest.mark.parametrize(
    ("policy", "options"),
    [("random", {}), ("keydiff", {}), ("paged_eviction", {}), ("inverse_key_l2", {}), *WATCHING],
    ids=str,
)
def test_memory_beside_the_cache_is_what_is_allocated(policy, options):
    policy = build_policy(policy, budget=64, block_size=BLOCK, options=options)
    spec = spec_of(torch.float32)
    layout = InterleavedLayout(allocate(KVCacheLayout.LBNHC, NUM_BLOCKS, spec))
    observers = Observers(policy, layout, num_rows=NUM_ROWS, scale=1.0, rotary=Rotary())
    compactor = Compactor(policy, layout, observers=observers, inv_freq=None, average_over_ranks=lambda s: s)
    observers.begin_step(StepBatch(["r"], [0, 20], [20], [20], [True], torch.tensor([[1, 2]]), torch.arange(16, 36)))
    for layer in range(NUM_LAYERS):
        observers.observe(layer, torch.randn(20, NUM_QUERY_HEADS, HEAD_SIZE))
    held = [compactor.positions._pages]
    held += [compactor._kept.values._pages] if compactor._kept else []
    for sums in observers.sums.values():
        held += [sums.values._pages, sums._newest._queries]
    held += [observers._newest._queries] if observers._newest else []
    held += [observers._window._ring] if observers._window else []
    held += [observers._moments._sum, observers._moments._outer] if observers._moments else []
    per_block, fixed = bytes_beside(policy, spec, NUM_QUERY_HEADS, NUM_ROWS)
    assert NUM_LAYERS * (per_block * NUM_BLOCKS + fixed) == sum(tensor.nbytes for tensor in held)


def test_a_server_of_an_8b_model_keeps_little_of_its_requests_and_says_what_helps_where_that_is_too_much():
    """vLLM's default of 1,024 sequences: rows for all of them would take 64.5 GiB of query moments on 32 layers."""
    runner = object.__new__(EvictionGPUModelRunner)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    runner.get_kv_cache_spec = lambda: {f"layer.{index}": spec for index in range(32)}
    runner.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: 32)
    runner.parallel_config, runner.max_num_reqs, runner.device = None, 1024, torch.device("cuda")
    for policy, options, most in (("expected_attention", {}, 1.2), ("snapkv", {"window": 64}, 0.3), ("tova", {}, 0.3)):
        runner.eviction_policy = build_policy(policy, budget=1024, block_size=BLOCK, options=options)
        _, fixed = bytes_beside(runner.eviction_policy, spec, 32, rows_of_state(runner.eviction_policy, 1024))
        assert 32 * fixed < most * 2**30
        assert runner.memory_for_cache(50 * 2**30) > 44 * 2**30
    runner.eviction_policy = build_policy("expected_attention", budget=1024, block_size=BLOCK, options={})
    with pytest.raises(ValueError, match=r"policy=expected_attention keeps 1.1 GiB .* 17 rows .* Lower max_num_seqs"):
        runner.memory_for_cache(2 * 2**30)


def test_cache_and_what_lies_beside_it_fit_into_what_is_available():
    runner = object.__new__(EvictionGPUModelRunner)
    spec, available = spec_of(torch.bfloat16), 10**9
    runner.get_kv_cache_spec = lambda: {f"layer.{index}": spec for index in range(NUM_LAYERS)}
    runner.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: NUM_QUERY_HEADS)
    runner.parallel_config, runner.max_num_reqs, runner.device = None, NUM_ROWS, CPU
    runner.eviction_policy = build_policy("expected_attention", budget=64, block_size=BLOCK)
    for_cache = runner.memory_for_cache(available)
    rows = rows_of_state(runner.eviction_policy, NUM_ROWS)
    per_block, fixed = bytes_beside(runner.eviction_policy, spec, NUM_QUERY_HEADS, rows)
    num_blocks = for_cache // (NUM_LAYERS * spec.page_size_bytes)
    total = NUM_LAYERS * (num_blocks * (spec.page_size_bytes + per_block) + fixed)
    total += transient_bytes(CPU)
    assert total <= available < total + 2 * NUM_LAYERS * (spec.page_size_bytes + per_block)
    runner.eviction_policy = build_policy("full", budget=None, block_size=BLOCK)
    assert runner.memory_for_cache(available) == available


@pytest.mark.parametrize(("policy", "options"), [("quest", {}), ("sentencekv", {"window": 8})])
def test_what_layers_share_is_set_aside_once(policy, options):
    """The table of what is read, 1,024 rows of 131,072 tokens, is one for all 32 layers: 0.25 GiB, not 8."""
    runner = object.__new__(RaggedGPUModelRunner)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    runner.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: 32)
    runner.parallel_config, runner.max_num_reqs, runner.device = None, 1024, torch.device("cuda")
    runner.max_num_tokens, runner.max_model_len = 8192, 131072
    runner.eviction_policy = build_policy(policy, budget=1024, block_size=BLOCK, options=options)
    available, per_block = 100 * 2**30, bytes_beside(runner.eviction_policy, spec, 32, 1025)[0]
    share = spec.page_size_bytes / (spec.page_size_bytes + per_block + 8 * runner.bytes_of_pages(spec)[0])

    def set_aside(num_layers):
        runner.get_kv_cache_spec = lambda: {f"layer.{index}": spec for index in range(num_layers)}
        return available - runner.memory_for_cache(available) / share

    table = 4 * 1024 * 8 * (131072 // BLOCK + 1)
    marks = 1024 * 131072 if policy == "sentencekv" else 0
    assert 2 * set_aside(1) - set_aside(2) - transient_bytes(runner.device) == pytest.approx(table + marks, abs=99)
