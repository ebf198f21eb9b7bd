"""What the default tolerance costs in accuracy: MNIST, the clients of `fedfisher.py`.

    python benchmarks/tolerance.py --data-dir DIR   # DIR/MNIST/raw has the files

Each client's K-FAC is computed twice at its trained parameters, over all classes and
with the default tolerance; both are merged by the default solver and scored on the test
set.
"""

import dataclasses
import statistics
from pathlib import Path

import torch
from uploads import Setting, mnist_folder, posteriors

from flwr_fisher.curvature import TOLERANCE, fisher
from flwr_fisher.measures import accuracies
from flwr_fisher.merge import merge_fisher

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Write the table."""
    data_dir = mnist_folder(__doc__)
    torch.set_num_threads(1)
    lines = [
        "# What the default tolerance costs in accuracy",
        "",
        (__doc__ or "").split("\n", 2)[2].strip("\n"),
        "",
        f"| α, seed | all classes | tolerance {TOLERANCE:g} | difference |",
        "|---|---|---|---|",
    ]
    differences = []
    for alpha in (0.2, 0.1, 0.05):
        for seed in (0, 1, 2):
            setting = Setting("mnist", "lenet", alpha, seed)
            task, model = setting.task(data_dir), None
            clients = posteriors(setting, task)
            model = task.make_model()
            found = {}
            for tolerance in (0.0, TOLERANCE):
                again = []
                for index, client in enumerate(clients):
                    model.load_state_dict(client.params)
                    loader = task.eval_loader(task.train_images(index))
                    curvature = fisher(model, loader, tolerance=tolerance)
                    again.append(dataclasses.replace(client, curvature=curvature))
                merged = merge_fisher(again).params
                score = accuracies(model, {"x": merged}, task.test_loader())["x"]
                found[tolerance] = 100 * score
            exact, close = found[0.0], found[TOLERANCE]
            differences.append(close - exact)
            cells = f"{exact:.2f} | {close:.2f} | {close - exact:+.2f}"
            row = f"| {alpha}, {seed} | {cells} |"
            lines.append(row)
            print(row, flush=True)
    largest = max(abs(value) for value in differences)
    lines += [
        "",
        f"Mean {statistics.mean(differences):+.3f}, largest {largest:.2f} points.",
    ]
    (RESULTS / "tolerance.md").write_text("\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    main()
