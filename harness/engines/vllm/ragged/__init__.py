"""Unequal counts: a page, B slots of one layer and one KV head, may belong to any layer and head of its request."""
