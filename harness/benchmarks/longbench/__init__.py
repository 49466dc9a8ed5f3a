"""LongBench: its 21 tasks, their prompts, metrics and averages."""
