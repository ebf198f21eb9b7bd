"""The parts of `tct.py`."""
