"""Builds the pretended accelerator, once for each torch and source.

    python tests/accelerator/pretended_build.py     # prints where it is

The library stays in the user's cache folder, so that a fresh checkout finds it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("pretended.cpp")
NAME = "pretended_device"
OLDEST = (2, 6)  # torch, with whose C++ interface the source was tried
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
FOLDER = _CACHE / "flwr-fisher" / "accelerator"
_KEPT = 4  # of different torches and sources


def missing():
    """Return what is missing to build it, in words; None where nothing is."""
    if _compiler() is None:
        return "there is no C++ compiler (c++, g++ or clang++, or what CXX names)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there is no Python.h, which a package like python3-dev has"
    if sys.platform != "linux":
        return "it is built on Linux alone"
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return f"torch is {torch.__version__}, older than {OLDEST[0]}.{OLDEST[1]}"
    return None


def built():
    """Return the library's path; the first process that asks builds it."""
    command = _command()
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update("\0".join([torch.__version__, sys.version, *command]).encode())
    library = FOLDER / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not library.exists():
            new = library.with_suffix(f".{os.getpid()}")
            done = subprocess.run(
                [*command, "-o", str(new)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{SOURCE} was not built:\n{done.stderr[-4000:]}")
            new.rename(library)
            every = sorted(FOLDER.glob("*.so"), key=lambda path: path.stat().st_mtime)
            for old in every[:-_KEPT]:
                old.unlink()
    return library


def _compiler():
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _command():
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include"]
    headers.append(Path(sysconfig.get_path("include")))
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    return [
        str(_compiler()),
        *("-O1", "-w", "-g0", "-fPIC", "-shared", "-std=c++20"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{each}" for each in headers),
        str(SOURCE),
        f"-L{root / 'lib'}",
        *(f"-l{each}" for each in libraries),
    ]


if __name__ == "__main__":
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    print(built())
