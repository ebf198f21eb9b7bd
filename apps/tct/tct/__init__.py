"""Train, convexify, train: stage 2 is a convex problem that all clients agree on."""
