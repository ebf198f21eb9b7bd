"""One-shot rivals on one split, for ``merges.py``."""
