"""The parts of `one_shot.py`."""
