"""What a benchmark's clients keep in memory goes with their run, however it ends."""

import signal
import subprocess
import sys
from pathlib import Path

import rivals_path  # noqa: F401
from harness.in_memory import folder_in_memory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUN = """
import sys, time
from pathlib import Path
from harness.in_memory import folder_in_memory
with folder_in_memory(Path(sys.argv[1])) as folder:
    (folder / "state").write_text("much")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_the_next_run_deletes_what_a_killed_one_left(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    run = subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    try:
        left = Path(run.stdout.readline().strip())
        with folder_in_memory(tmp_path) as beside:
            assert beside.is_dir()
            assert (left / "state").exists()  # its process lives
        assert not beside.exists()
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    assert left.exists()
    with folder_in_memory(tmp_path):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_without_such_a_memory_it_is_elsewhere(tmp_path):
    with folder_in_memory(tmp_path / "none") as folder:
        assert folder.is_dir()
    assert not folder.exists()
