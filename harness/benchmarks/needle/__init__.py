"""A needle grid: one number in filler, at every depth and length."""
