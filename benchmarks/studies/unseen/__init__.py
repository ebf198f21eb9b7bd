"""What `unseen.py` is made of."""
