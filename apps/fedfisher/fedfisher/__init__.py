"""One-shot federated learning with Fisher information."""
