"""The tutorials' methods, without the runs that follow them."""

import importlib.util
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name, run):
    """Return a tutorial as a module, as far as the block that is called `run`."""
    path = EXAMPLES / f"{name}.py"
    method, mark, _ = path.read_text().partition(f"# %%\n# {run}\n")
    assert mark, f"{path} has no block called {run!r}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    exec(compile(method, str(path), "exec"), module.__dict__)
    return module
