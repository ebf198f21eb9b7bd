"""TCT (train, convexify, train): FedAvg, and then a convex problem for all clients."""
