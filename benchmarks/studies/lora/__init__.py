"""Adapters of a small vision transformer, and the ways to merge them."""
