"""Ray's shares of a GPU: who gets one, and what is held of it between requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
SCRIPT = Path(__file__).with_name("sharing.py")


@pytest.fixture(scope="module")
def told():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        cwd=SCRIPT.parents[2], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (
        each for each in done.stdout.splitlines() if each.startswith('{"workers"')
    )
    return json.loads(line)  # Ray may have more to say


def test_half_a_gpu_each_lets_two_train_at_a_time_on_it(told):
    assert told["workers"] == 2
    for reply in told["replies"]:
        assert (reply["gpus"], reply["visible"], reply["on-accelerator"]) == (1, 1, 1)


def test_memory_is_given_back_after_each_request(told):
    replies = told["replies"]
    assert len(replies) > len({reply["process"] for reply in replies})
    assert {reply["held-before"] for reply in replies} == {0}, replies
