"""DENSE and Co-Boosting trained as long as they were published, on a GPU.

    python benchmarks/students.py --data-dir DIR [--workers 6] [--device cpu]

The first split of each α of `merges.py`, with the same clients. A student is taught for
200 epochs, on batches of 256 images (Co-Boosting: 128) of a generator with 64 channels,
as published; `merges.py` takes 50 epochs (MNIST) and 30 (CIFAR-10), batches of 64 and
16 channels. The best epoch is chosen on the server's 500 examples, and the split's test
images are looked at once, at the end. *Best epoch* is the first with that score.
*Minutes* are those of a run while five others ran beside it, and other programmes.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from harness.jobs import all_kept
from harness.page import (
    CACHE,
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.tables import head, row
from merges import ALPHAS, PROBLEMS
from studies.rivals.methods import OURS
from studies.rivals.students import CO_BOOSTING, DENSE, published

NAME = "students"
METHODS = {DENSE: "DENSE", CO_BOOSTING: "Co-Boosting"}
SPLITS = [*product(sized([*PROBLEMS], ["mnist"]), ALPHAS)]


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the table: what merges.py found, and what was found here."""
    title = ("test accuracy, %", "α", "FedFisher", "student", "in `merges.py`")
    lines = head(*title, "as published", "best epoch", "minutes")
    for (name, alpha), (method, shown) in product(SPLITS, METHODS.items()):
        problem = PROBLEMS[name]
        split = problem.setting(alpha, 0).folder.name
        if not (own := found.get(split, {}).get(method)):
            continue
        parts = numbers_of(f"rivals_{name}")
        before = (parts.get("merges", {}), OURS), (parts.get("students", {}), method)
        ours, short = (
            f"{part[split][key]['accuracy']:.1f}" if split in part else "–"
            for part, key in before
        )
        scores, took = own["scores"], own["seconds"] / 60
        epoch = 1 + scores.index(max(scores))
        figures = short, f"{own['accuracy']:.1f}", str(epoch), f"{took:.1f}"
        lines.append(row(problem.title, str(alpha), ours, shown, *figures))
    return lines


def main() -> None:
    """Write the table and the numbers; finished runs are kept."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--device", default=sized("cuda", "cpu"))
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    found = numbers_of(NAME)
    todo = [
        (PROBLEMS[name].setting(alpha, 0), method)
        for (name, alpha), method in product(SPLITS, METHODS)
    ]
    todo = [each for each in todo if each[1] not in found.get(each[0].folder.name, {})]
    jobs = [
        (
            CACHE / NAME / f"{setting.folder.name}-{METHODS[method]}.json",
            partial(published, setting, method, device, options.data_dir),
        )
        for setting, method in todo
    ]
    numbers = all_kept(jobs, options.workers)
    for (setting, method), own in zip(todo, numbers, strict=True):
        found.setdefault(setting.folder.name, {})[method] = own
    every = [own for split in found.values() for own in split.values()]
    there = sorted({f"{own['device']}, torch {own['torch']}" for own in every})
    where = f"Measured on {'; '.join(there)}."
    start = opening("DENSE and Co-Boosting, at full length", __doc__)
    write_page(NAME, blocks(start, where, table(found)), found)


if __name__ == "__main__":
    main()
