"""The plugin's subclasses against the vLLM that is installed, on both platforms.

Every hook is named here, so that a vLLM which renames it, changes its arguments or stops calling it fails by name.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from harness.engines.vllm.cpu import (
    CPUModelRunner,
    CPUWorker,
    EvictionCPUModelRunner,
    EvictionCPUWorker,
    RaggedCPUModelRunner,
)
from harness.engines.vllm.cuda import (
    EvictionGPUModelRunner,
    EvictionGPUWorker,
    GPUModelRunner,
    RaggedGPUModelRunner,
    Worker,
)
from harness.engines.vllm.kv_cache import EvictingAttentionManager, EvictingAttentionSpec
from harness.engines.vllm.layout import CpuLayout, InterleavedLayout
from harness.engines.vllm.private_names import NAMES, RUNNER, SCHEDULER, WORKER, missing_names
from harness.engines.vllm.ragged.runner import RaggedRunning
from harness.engines.vllm.refusals import refuse_version
from harness.engines.vllm.runner import EvictionRunning
from harness.engines.vllm.scheduler import AsyncEvictionScheduler, EvictionScheduler, EvictionScheduling
from harness.engines.vllm.worker import EvictionReporting

RUNNERS = [(EvictionCPUModelRunner, CPUModelRunner), (EvictionGPUModelRunner, GPUModelRunner)]
RAGGED = [(RaggedCPUModelRunner, CPUModelRunner), (RaggedGPUModelRunner, GPUModelRunner)]
SCHEDULERS = [(EvictionScheduler, Scheduler), (AsyncEvictionScheduler, AsyncScheduler)]
RUNNER_HOOKS = ("__init__", "get_kv_cache_spec", "initialize_kv_cache", "_update_states", "_prepare_inputs")
SCHEDULER_HOOKS = (
    "__init__",
    "add_request",
    "schedule",
    "update_from_output",
    "_reserve_prefill_lookahead",
    "_free_request",
)
MANAGER_HOOKS = (
    "__init__",
    "find_longest_cache_hit",
    "get_num_blocks_to_allocate",
    "allocate_new_blocks",
    "pop_blocks_for_free",
    "cache_blocks",
)
HOOKS = [
    *((ours, stock, name) for ours, stock in RUNNERS for name in RUNNER_HOOKS),
    *((ours, stock, name) for ours, stock in SCHEDULERS for name in SCHEDULER_HOOKS),
    *((EvictingAttentionManager, FullAttentionManager, name) for name in MANAGER_HOOKS),
    *((EvictingAttentionSpec, FullAttentionSpec, name) for name in ("merge", "max_memory_usage_bytes")),
    (EvictionCPUWorker, CPUWorker, "init_device"),
    (EvictionCPUWorker, CPUWorker, "execute_model"),
    (EvictionGPUWorker, Worker, "execute_model"),
    (EvictionGPUWorker, Worker, "_make_model_runner"),
    (EvictionGPUWorker, Worker, "determine_available_memory"),
    (EvictionGPUWorker, Worker, "get_supported_kv_cache_layouts"),
]
OWN = {
    EvictionRunning: {"record_resident", "bytes_of_pages"},
    EvictionScheduling: set(),
    EvictingAttentionManager: {"evict", "evict_measured", "expect", "forget", "free_cut"},
    EvictingAttentionSpec: {"from_full"},
    EvictionGPUWorker: set(),
}


def shape_of(function):
    """Names, kinds and defaults of the arguments."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("ours", "stock", "name"), HOOKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_hook_exists_in_vllm_and_takes_the_same_arguments(ours, stock, name):
    assert inspect.getattr_static(ours, name) is not inspect.getattr_static(stock, name), "overridden"
    hook, original = getattr(ours, name), getattr(stock, name)
    if name == "__init__" and inspect.signature(hook).parameters.keys() & {"args", "kwargs"}:
        return
    assert shape_of(hook) == shape_of(original)


@pytest.mark.parametrize("ours", OWN, ids=lambda cls: cls.__name__)
def test_every_public_method_is_a_hook_named_above_or_our_own(ours):
    hooks = {name for cls, _, name in HOOKS if ours in cls.__mro__}
    public = {name for name, value in vars(ours).items() if inspect.isroutine(value) and not name.startswith("_")}
    public |= {name for name, value in vars(ours).items() if isinstance(value, classmethod)}
    assert public <= hooks | OWN[ours]
    assert OWN[ours] <= public


@pytest.mark.parametrize(("ours", "stock"), RUNNERS, ids=["cpu", "cuda"])
def test_a_runner_evicts_before_it_does_what_its_stock_class_does(ours, stock):
    assert ours.__mro__[1:3] == (EvictionRunning, stock)
    assert ours.__mro__.index(EvictionRunning) < ours.__mro__.index(GPUModelRunner)
    assert ours.layout_class is (CpuLayout if stock is CPUModelRunner else InterleavedLayout)


@pytest.mark.parametrize(("ours", "stock"), RAGGED, ids=["cpu", "cuda"])
def test_a_ragged_runner_is_the_equal_one_with_other_attention(ours, stock):
    assert ours.__mro__.index(RaggedRunning) < ours.__mro__.index(EvictionRunning) < ours.__mro__.index(stock)
    used = {
        "_build_attention_metadata": {"max_query_len", "slot_mappings"},
        "_get_slot_mappings": {"num_tokens_padded"},
        "_dummy_run": {"num_tokens"},
        "sample_tokens": {"grammar_output"},
    }
    for name, arguments in used.items():
        assert name in vars(RaggedRunning)
        assert arguments <= inspect.signature(getattr(stock, name)).parameters.keys()


@pytest.mark.parametrize(("ours", "stock"), SCHEDULERS, ids=["synchronous", "asynchronous"])
def test_a_scheduler_evicts_before_it_does_what_its_stock_class_does(ours, stock):
    assert ours.__mro__[1:3] == (EvictionScheduling, stock)


@pytest.mark.parametrize(
    ("ours", "stock"), [(EvictionCPUWorker, CPUWorker), (EvictionGPUWorker, Worker)], ids=["cpu", "cuda"]
)
def test_a_worker_is_the_stock_one_that_reports(ours, stock):
    assert ours.__mro__[1:3] == (EvictionReporting, stock)
    own = {"record_resident", "eviction_seconds", "kept_tokens", "_bad_scores"}
    assert not any(hasattr(stock, name) for name in own)


def attributes_of_self(cls, context):
    """Names after `self.` in the class's own code, read (ast.Load) or set (ast.Store)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


@pytest.mark.parametrize(
    ("mixin", "stock"),
    [(EvictionRunning, GPUModelRunner), (EvictionScheduling, Scheduler)],
    ids=["runner", "scheduler"],
)
def test_every_attribute_that_a_mixin_reads_is_set_by_vllm(mixin, stock):
    ours = vars(mixin).keys() | inspect.get_annotations(mixin).keys() | attributes_of_self(mixin, ast.Store)
    inherited = attributes_of_self(mixin, ast.Load) - ours
    theirs = set(dir(stock)).union(*(attributes_of_self(cls, ast.Store) for cls in stock.__mro__[:-1]))
    assert inherited - theirs == set()
    assert len(inherited) >= 5, "the check sees something"


def test_what_vllm_does_after_lengths_are_lowered_reads_only_lowered_lengths():
    """Attention metadata is built from these buffers after `_prepare_inputs`, in place, so CUDA graphs replay them."""
    source = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "seq_lens=self.seq_lens[:num_reqs_padded]" in source
    assert "seq_lens_cpu_upper_bound = self.optimistic_seq_lens_cpu[:num_reqs_padded]" in source
    assert "max_seq_len = self.optimistic_seq_lens_cpu.numpy()[:num_reqs].max().item()" in source
    step = inspect.getsource(GPUModelRunner.execute_model)
    order = [step.index(f"self.{name}(") for name in ("_update_states", "_prepare_inputs", "_build_attention_metadata")]
    assert order == sorted(order)
    assert step.index("self.synchronize_input_prep()") < order[0], "host buffers are ours until the next step"


def test_everything_that_the_plugin_leans_on_is_there():
    assert missing_names() == []


@pytest.mark.parametrize(
    ("mixin", "place"), [(EvictionRunning, RUNNER), (EvictionScheduling, SCHEDULER)], ids=["runner", "scheduler"]
)
def test_the_table_of_private_names_is_complete(mixin, place):
    """Whatever the plugin overrides, or reads from `self` without having set it."""
    ours = vars(mixin).keys() | inspect.get_annotations(mixin).keys() | attributes_of_self(mixin, ast.Store)
    inherited = attributes_of_self(mixin, ast.Load) - ours
    stock = {RUNNER: GPUModelRunner, SCHEDULER: Scheduler}[place]
    overridden = {name for name, value in vars(mixin).items() if inspect.isroutine(value) and name in vars(stock)}
    assert inherited | overridden <= set(NAMES[place])


def test_hooks_are_in_the_table():
    places = {GPUModelRunner: RUNNER, Scheduler: SCHEDULER, Worker: WORKER}
    for _, stock, name in HOOKS:
        if stock in places:
            assert name in NAMES[places[stock]]


def test_another_version_is_one_message(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0+cpu")
    monkeypatch.setitem(NAMES, SCHEDULER, ("schedule", "no_such_hook"))
    monkeypatch.setitem(NAMES, "vllm.no_such_module:Class", ("anything",))
    with pytest.raises(ValueError, match=r"vLLM 0.99.0 is installed.*of 0.32.0. Install vllm==0.32.0") as refused:
        refuse_version()
    assert str(refused.value).endswith(f"{SCHEDULER}.no_such_hook, vllm.no_such_module:Class.)")


@pytest.mark.parametrize(
    ("version", "on_cpu", "accepted"),
    [("0.32.0", True, True), ("0.33.0", True, False), ("0.32.0", False, True), ("0.33.0", False, True),
     ("0.34.0", False, False)],
)  # fmt: skip
def test_versions_that_are_accepted(monkeypatch, version, on_cpu, accepted):
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    if accepted:
        refuse_version()
    else:
        with pytest.raises(ValueError, match=f"vLLM {version} is installed"):
            refuse_version()
