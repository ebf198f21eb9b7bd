"""Curvatures as an algebra of symmetric positive semi-definite operators."""
