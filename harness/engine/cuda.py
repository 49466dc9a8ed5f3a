"""Worker and runner for vLLM's CUDA build (model runner V1)."""

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from harness.engine.layout import InterleavedLayout
from harness.engine.runner import EvictionRunning
from harness.engine.worker import EvictionReporting


class EvictionGPUModelRunner(EvictionRunning, GPUModelRunner):
    """CUDA runner that evicts."""

    layout_class = InterleavedLayout


class EvictionGPUWorker(EvictionReporting, Worker):
    """`worker_cls` on CUDA."""

    def _make_model_runner(self) -> EvictionGPUModelRunner:
        return EvictionGPUModelRunner(self.vllm_config, self.device)
