"""Intervals and paired tests, and tables that print them."""
