"""Federated averaging weighted by Fisher information."""
