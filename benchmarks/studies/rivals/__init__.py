"""One-shot rivals on one split, for ``rivals.py``."""
