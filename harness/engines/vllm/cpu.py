"""Worker and runner for vLLM's CPU build. vLLM's CPU worker must be imported before its runner."""

from collections.abc import Sequence

import torch

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from harness.engines.vllm.allocator import keep_freed_memory
from harness.engines.vllm.layout import CpuLayout
from harness.engines.vllm.ragged.runner import RaggedRunning
from harness.engines.vllm.refusals import refuse_cpu_kernels
from harness.engines.vllm.runner import EvictionRunning
from harness.engines.vllm.worker import EvictionReporting, is_ragged


class EvictionCPUModelRunner(EvictionRunning, CPUModelRunner):
    """CPU runner that evicts."""

    layout_class = CpuLayout

    def _bind(self, layers: Sequence[torch.nn.Module]) -> None:
        refuse_cpu_kernels(layers)
        super()._bind(layers)


class RaggedCPUModelRunner(RaggedRunning, EvictionCPUModelRunner):
    """CPU runner whose layers and heads keep unequally many tokens."""


class EvictionCPUWorker(EvictionReporting, CPUWorker):
    """`worker_cls` on CPU."""

    def init_device(self) -> None:
        """As stock, then put our runner in the place of the stock one, which holds no weights yet."""
        keep_freed_memory()
        super().init_device()
        runner = RaggedCPUModelRunner if is_ragged(self.vllm_config) else EvictionCPUModelRunner
        self.model_runner = runner(self.vllm_config, torch.device("cpu"))
