"""Signals that only the forward pass sees, gathered beside the stock attention kernel, never in its place."""
