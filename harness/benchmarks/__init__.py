"""What `benchmark=` names: rows, prompts and scores."""
