"""One thread: on tensors this small, threads that wait for a busy core cost a hundred times the work."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
