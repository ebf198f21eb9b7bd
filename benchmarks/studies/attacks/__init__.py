"""Parts of ``attacks.py``: hostile uploads, the methods, the tables."""
