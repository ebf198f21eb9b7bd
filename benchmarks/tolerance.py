"""What the default tolerance costs in accuracy: MNIST, the clients of `merges.py`.

    python benchmarks/tolerance.py --data-dir DIR   # DIR/MNIST/raw has the files

Each client's K-FAC is computed twice at its trained parameters, over all classes and
with the default tolerance; both are merged by the default solver and scored on the test
set.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import torch
from harness.page import blocks, command_line, mnist_folder, opening, write_page
from harness.tables import head, row
from harness.uploads import Setting, posteriors

from flwr_fisher.curvature import TOLERANCE, fisher
from flwr_fisher.measures import accuracies
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.tasks import Task

SPLITS = tuple(itertools.product((0.2, 0.1, 0.05), (0, 1, 2)))


def accuracy(task: Task, clients: Sequence[LocalPosterior], tolerance: float) -> float:
    """Return the test accuracy in per cent with K-FAC of this tolerance."""
    model, again = task.make_model(), []
    for index, client in enumerate(clients):
        model.load_state_dict(client.params)
        loader = task.eval_loader(task.train_images(index))
        curvature = fisher(model, loader, tolerance=tolerance)
        again.append(dataclasses.replace(client, curvature=curvature))
    merged = fedfisher(again).params
    return 100 * accuracies(model, {"x": merged}, task.test_loader())["x"]


def main() -> None:
    """Write the table."""
    data_dir = mnist_folder(command_line(__doc__).parse_args())
    torch.set_num_threads(1)
    lines = head("α, seed", "all classes", f"tolerance {TOLERANCE:g}", "difference")
    differences = []
    for alpha, seed in SPLITS:
        setting = Setting("mnist", "lenet", alpha, seed)
        task = setting.task(data_dir)
        clients = posteriors(setting, task)
        exact, close = (accuracy(task, clients, t) for t in (0.0, TOLERANCE))
        differences.append(close - exact)
        cells = f"{exact:.2f}", f"{close:.2f}", f"{close - exact:+.2f}"
        lines.append(row(f"{alpha}, {seed}", *cells))
        print(lines[-1], flush=True)
    largest = max(abs(value) for value in differences)
    summary = f"Mean {statistics.mean(differences):+.3f}, largest {largest:.2f} points."
    start = opening("What the default tolerance costs in accuracy", __doc__)
    write_page("tolerance", blocks(start, lines, summary))


if __name__ == "__main__":
    main()
