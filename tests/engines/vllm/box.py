"""A GPU in a box: the plugin's CUDA classes on vLLM's own GPU worker, runner and FlashAttention backend, on CPU.

vLLM's CPU runner lets host and device buffers be the same memory, so that tests on it cannot see a forgotten copy. Here
they are apart. Plain torch stands for what only a device has: the three kernels of FlashAttention (`box_kernels.py`),
streams, and what `torch.accelerator` says of memory. Nothing else of vLLM is replaced. `in_a_box()` is a context in
which engines of this process are built so; `Box` says what else to force. Before every step the device's buffers
are filled with poison, and so are blocks when an eviction cuts them.

    with in_a_box(Box(graphs=True)):
        run = run_live(replace(shape, dtype="bfloat16", block_size=16), settings, requests)
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes

import harness.engines.vllm.arguments as plugin_arguments
import harness.engines.vllm.cuda as plugin
from harness.engines.vllm.observers import QUERY_SIGNALS
from tests.engines.vllm import box_kernels

GIB = 1 << 30
POISON = 1 << 20  # a length, position or block that is nowhere
GRAPH_SIZES = (8, 16, 32, 512)
BACKEND = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
KERNELS = ("flash_attn_varlen_func", "reshape_and_cache_flash", "get_scheduler_metadata")


@dataclass
class Box:
    """What engines in the box are made to do.

    Attributes:
        graphs: pad batches as CUDA graphs do, full ones where vLLM would replay them.
        memory: bytes of the card.
        addresses: of the buffers that attention was given in steps that a full graph would replay.
        steps: how many steps ran in each mode of graphs.
    """

    graphs: bool = False
    memory: int = 2 * GIB
    addresses: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    steps: Counter[str] = field(default_factory=Counter)


_box = Box()


class Event:
    """A CUDA event of a device that is never behind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...


class Stream(Event):
    """A CUDA stream likewise."""

    device = torch.device("cpu")

    def wait_stream(self, *args: Any) -> None: ...


class BoxedRunner:
    """Mixin over the runner that the plugin chose."""

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Poison what a step must fill anew on the device, and everything behind the batch."""
        assert not self._aliases()
        table = self.input_batch.block_table[0]
        for tensor in (self.seq_lens, self.positions, table.block_table.gpu, table.slot_mapping.gpu):
            tensor.fill_(POISON)
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)

    def _aliases(self) -> list[str]:
        """Buffers whose host and device side are one memory."""
        buffers = {**vars(self), **vars(self.input_batch.block_table[0])}
        return [
            name
            for name, value in buffers.items()
            if hasattr(value, "copy_to_gpu") and value.cpu.numel() and value.cpu.data_ptr() == value.gpu.data_ptr()
        ]

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As stock; slots that nobody wrote hold NaN, and get it back when an eviction cuts them."""
        if _box.graphs:
            policy = self.eviction_policy
            eager = policy.signals & QUERY_SIGNALS or policy.by_page
            mode = CUDAGraphMode.PIECEWISE if eager else CUDAGraphMode.FULL_AND_PIECEWISE
            self.compilation_config.cudagraph_mode = mode
            self.compilation_config.cudagraph_capture_sizes = list(GRAPH_SIZES)
            self.compilation_config.max_cudagraph_capture_size = max(GRAPH_SIZES)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        for cache in self.kv_caches:
            cache.fill_(float("nan"))
        if self.compactor is not None:
            self._poison_what_is_cut()

    def _poison_what_is_cut(self) -> None:
        evict, policy = self.compactor.evict, self.eviction_policy

        def evict_and_poison(victims: Any) -> None:
            evict(victims)
            for victim in victims:
                num_keep = getattr(self.compactor, "measured", {}).get(victim.request_id, victim.eviction.num_keep)
                full, rest = divmod(num_keep, policy.block_size)
                for cache in self.kv_caches:
                    cache[list(victim.block_ids[full + bool(rest) :])] = float("nan")
                    if rest and policy.allocation == "equal":  # else the newest pages lie anywhere
                        cache[victim.block_ids[full], :, rest:] = float("nan")

        self.compactor.evict = evict_and_poison

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; count what it chose."""
        mode, *rest = super()._determine_batch_execution_and_padding(*args, **kwargs)
        if self.kv_caches:
            _box.steps[mode.name] += 1
        return mode, *rest

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; a graph replays addresses, so each may be one only."""
        metadata, other = super()._build_attention_metadata(*args, **kwargs)
        if kwargs.get("num_reqs_padded"):
            (one, *_) = metadata.values()
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "scheduler_metadata"):
                _box.addresses[name].add(getattr(one, name).data_ptr())
        return metadata, other

    def _sync_device(self) -> None: ...

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        return sampled_token_ids.tolist()

    _zero_block_ids = CPUModelRunner._zero_block_ids


class BoxedWorker(plugin.EvictionGPUWorker):
    """The plugin's CUDA worker, but for finding its device and capturing graphs."""

    def init_device(self) -> None:
        """What vLLM's GPU worker does after it has found its device."""
        self.device = torch.device("cpu")
        self.parallel_config.disable_custom_all_reduce = True
        os.environ["VLLM_DIST_IDENT"] = self.distributed_init_method.rpartition("/")[2]  # as CPUWorker does
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self._init_workspace_and_model_runner()

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        runner.__class__ = type(f"Boxed{type(runner).__name__}", (BoxedRunner, type(runner)), {})
        return runner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to capture."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)


@contextmanager
def in_a_box(box: Box | None = None) -> Iterator[Box]:
    """Build engines of this process as if it had a CUDA device."""
    box = box or Box()
    with ExitStack() as stack:
        for target, name, value in _replacements(box):
            stack.enter_context(patch.object(target, name, value, create=not hasattr(target, name)))
        selector._cached_get_attn_backend.cache_clear()
        stack.callback(selector._cached_get_attn_backend.cache_clear)
        yield box


def _replacements(box: Box) -> Iterator[tuple[Any, str, Any]]:
    """(where, name, instead) of everything that only a device has."""
    from tests.engines.vllm import box as this

    yield this, "_box", box
    yield plugin_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False)
    yield plugin, "EvictionGPUWorker", BoxedWorker
    for name in KERNELS:
        yield flash_attn, name, getattr(box_kernels, name)
    yield flash_attn, "get_flash_attn_version", lambda **options: 3
    yield CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args, **kwargs: BACKEND)
    yield CpuPlatform, "check_and_update_config", classmethod(_stays_asynchronous(CpuPlatform.check_and_update_config))
    yield torch.cuda, "Event", Event
    yield torch.cuda, "Stream", Stream
    yield torch, "Event", Event
    yield torch.cuda, "current_stream", Stream
    yield torch.cuda, "stream", lambda stream: ExitStack()
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        yield torch.accelerator, name, lambda *args: None
    yield torch.accelerator, "memory_stats", lambda device=None: {}
    yield torch.accelerator, "memory_reserved", lambda device=None: 0
    yield torch.accelerator, "get_memory_info", lambda device=None: (box.memory, box.memory)


def _stays_asynchronous(stock: Callable[[Any], None]) -> Callable[[type, Any], None]:
    """The platform's check of a configuration, but that it leaves asynchronous scheduling as it is."""

    def check(cls: type, config: Any) -> None:
        asynchronous = config.scheduler_config.async_scheduling
        stock(config)
        config.scheduler_config.async_scheduling = asynchronous

    return check
