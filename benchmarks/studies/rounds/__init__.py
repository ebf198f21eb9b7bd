"""The parts of `rounds.py`."""
