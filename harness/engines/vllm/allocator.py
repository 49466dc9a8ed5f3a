"""How glibc hands memory back, for the process of a CPU worker."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
NEVER_TRIM = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let tensors of up to 32 MiB reuse memory that was freed before, instead of fresh pages at every step.

    The kernel clears fresh pages, which costs several times what the tensor's own arithmetic does. Without glibc, as on
    macOS or musl, this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
