"""The reference: every policy on a Hugging Face model, slow and obvious, for the others to be compared with."""
