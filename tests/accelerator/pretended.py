"""A pretended accelerator: tensors on ``pretended`` are not the CPU's.

They are computed by the CPU's kernels, and refuse to mix with the CPU's tensors, but
for what CUDA takes as well: numbers in pointwise operations, and indices. Generators
are the device's own, and backward passes run on the engine's thread for it. What is
held, every wait of the host, and what a GPU's kernel would have ended the process for
are noted.

It tells nothing of speed, TF32, races, several devices, memory that is short or in
pieces, and which kernels a device lacks for a dtype.

Importing this registers the device, from the library that ``FLWR_FISHER_ACCELERATOR``
names, and must come before the process's first backward pass: the engine starts its
threads then. So device tests run in a process of their own (tests/test_accelerator.py).
"""

import gc
import importlib.machinery
import importlib.util
import os
import sys
import time
import traceback
import types
from collections import Counter
from contextlib import contextmanager

import torch

NAME = "pretended"
_WAITS = ("item", "wait", "down", "up, awaited")
_OURS = ("/flwr_fisher/", "/strategies/", "/rivals/")


def _loaded(path):
    name = "pretended_device"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Here:
    """``torch.pretended.device(0)``: there is no other to go to."""

    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _device_module():
    generator = _C.default_generator()
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = _Here
    module._is_in_bad_fork = lambda: False
    module.manual_seed = lambda seed: generator.manual_seed(int(seed))
    module.manual_seed_all = module.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state()]
    module.set_rng_state_all = lambda states: generator.set_state(states[0])
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: None
    module.empty_cache = lambda: None
    module.max_memory_allocated = lambda device=None: _C.peak()
    module.memory_allocated = lambda device=None: _C.held()
    module.reset_peak_memory_stats = lambda device=None: _C.reset_peak()
    module.get_device_name = lambda device=None: "a pretended accelerator"
    return module


_C = _loaded(os.environ["FLWR_FISHER_ACCELERATOR"])
torch.utils.rename_privateuse1_backend(NAME)
_module = _device_module()
torch._register_device_module(NAME, _module)
sys.modules[_module.__name__] = _module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

held, peak, reset_peak = _C.held, _C.peak, _C.reset_peak


def settled(most):
    """Return the bytes that are held, as soon as they are no more than so many.

    The engine's thread lets go of a graph a little after what waits for it goes on:
    on a busy machine, later than the next line. After some seconds nothing comes.
    """
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        now = held()
        if now <= most or time.monotonic() > deadline:
            return now
        time.sleep(0.01)


asserts = []  # of operations whose indices are out of range: a GPU's context is lost


def _asserted(op, text):
    stack = traceback.extract_stack()
    ours = [f"{f.filename}:{f.lineno} {f.name}" for f in stack if _is_ours(f.filename)]
    asserts.append((op, text, ours[-1:]))


def _is_ours(filename):
    return any(part in filename for part in _OURS)


_C.on_assert(_asserted)


class Seen(list):
    """What happened between host and device: (kind, operation, bytes, stack)."""

    def waits(self):
        """Return that for which the host waits."""
        return [event for event in self if event[0] in _WAITS]

    def where(self, kinds=_WAITS):
        """Return how often each line of the library, or else of a caller, waited."""
        lines = Counter()
        for kind, operation, _, stack in self:
            if kind in kinds:
                ours = [frame for frame in stack if _is_ours(frame[0])] or stack
                path, line, function = ours[-1]
                lines[kind, operation, f"{path}:{line} {function}"] += 1
        return lines

    def bytes_down(self):
        """Return how many bytes were copied to the host."""
        return sum(size for kind, _, size, _ in self if kind == "down")


@contextmanager
def watch():
    """Note what happens between host and device, in all threads."""
    seen = Seen()

    def note(kind, operation, size):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        seen.append((kind, operation, size, stack[::-1]))

    _C.watch(note)
    try:
        yield seen
    finally:
        _C.watch(None)


@contextmanager
def without_float64():
    """Refuse tensors of float64, as MPS does."""
    _C.refuse_float64(True)
    try:
        yield
    finally:
        _C.refuse_float64(False)


# torch takes the tensors of two devices for unlike where it does not know one of them,
# and makes new parameters when a module moves: what is tied comes apart. CUDA's do not.
_apply = torch.nn.Module._apply
_depth = [0]


def _tied_apply(self, fn, recurse=True):
    owners = []
    if not _depth[0]:
        owners = [
            (module, name, parameter)
            for module in self.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
    _depth[0] += 1
    try:
        _apply(self, fn, recurse)
    finally:
        _depth[0] -= 1
    new = {}
    for module, name, parameter in owners:
        own = new.setdefault(id(parameter), module._parameters[name])
        module._parameters[name] = own
    return self


torch.nn.Module._apply = _tied_apply
