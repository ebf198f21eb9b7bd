"""Estimates of a model's curvature from its data."""
