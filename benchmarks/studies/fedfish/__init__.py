"""The parts of `fedfish.py`."""
