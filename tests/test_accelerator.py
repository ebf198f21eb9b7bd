"""All that touches a device, on a pretended accelerator, in a process of its own.

There it is loaded before anything else: see tests/accelerator/pretended.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accelerator"))

from pretended_build import built, missing  # noqa: E402

TESTS = [
    "accelerator",
    "test_devices.py",
    "test_curvature_algebra.py::test_another_device",
    "test_merge_pcg.py::test_it_merges_where_it_is_told_to",
    "test_client.py::test_a_gpu_client_answers_as_a_cpu_client_does",
    "test_client.py::test_the_device_is_the_one_asked_for",
]
NOT_HERE = missing()


@pytest.mark.skipif(NOT_HERE is not None, reason=f"no accelerator: {NOT_HERE}")
def test_all_is_right_on_an_accelerator():
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"FLWR_FISHER_ACCELERATOR": str(built()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(str(HERE / each) for each in TESTS)],
        env=env, cwd=HERE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
