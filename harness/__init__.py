"""A benchmark harness for KV-cache eviction policies inside stock vLLM."""
