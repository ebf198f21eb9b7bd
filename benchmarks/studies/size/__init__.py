"""The parts of `merge_size.py`."""
