"""Model inversion by a generative prior (Zhang et al. 2020), for ``inversion.py``."""
