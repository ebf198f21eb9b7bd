"""The devices that there are: the CPU and an accelerator, or the pretended one alone.

    FLWR_FISHER_ACCELERATOR=$(python tests/accelerator/pretended_build.py) pytest …

A process that is started so has the pretended accelerator of tests/accelerator, and
tests nothing else: the CPU is tested in every other.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

PRETENDED = "FLWR_FISHER_ACCELERATOR"
HERE = Path(__file__).with_name("accelerator")


def load_pretended():
    """Return the pretended accelerator's module, or None where it is not wanted."""
    if PRETENDED not in os.environ:
        return None
    if "pretended" not in sys.modules:
        path = HERE / "pretended.py"
        spec = importlib.util.spec_from_file_location("pretended", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["pretended"] = module
        spec.loader.exec_module(module)
    return sys.modules["pretended"]


pretended = load_pretended()


def _accelerator():
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator().type


ACCELERATOR = _accelerator()  # or None
DEVICES = [ACCELERATOR] if pretended else ["cpu", *filter(None, [ACCELERATOR])]
