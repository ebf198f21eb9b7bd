"""The parts of `codec.py`."""
