"""kvpress as a peer: the same prompts through another implementation, in its own environment."""
