"""Rows in LongBench's format, generated from a seed out of text of the project's own."""
