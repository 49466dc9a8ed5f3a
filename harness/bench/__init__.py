"""Load tests: throughput, latency and KV memory of policies beside the full cache, on one engine, in one run."""
