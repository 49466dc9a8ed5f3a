"""Eviction inside stock vLLM: a plugin of its scheduler, block manager, runner and worker."""
