"""From a model and its data to a curvature."""
