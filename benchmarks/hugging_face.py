"""FedFisher, FedAvg and single clients on models of ``transformers``, as they are.

    python benchmarks/hugging_face.py

Tasks, models and adapters are those of the tutorial, `examples/hugging_face.py`: pieces
of Python's own files (BERT, DistilBERT, GPT-2) and scikit-learn's digits (ViT); a
start that has seen little public data; four clients of unlike classes (Dirichlet, 0.3),
who train once for four epochs of AdamW. The learning rate is the one of three at which
FedAvg has the lowest loss on a split of its own, whose seed is not used again. All are
merges of the same uploads.
"""

import logging
import math
import statistics
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from harness.page import blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import hugging_face as tutorial

RATES, SEEDS = sized(((3e-4, 1e-3, 3e-3), (0, 1, 2)), ((1e-3,), (0, 1)))
EPOCHS, MOST, CHOOSING = sized(4, 1), sized(10_000, 100), 90
TASKS = sized([*tutorial.TASKS], ["BERT"])
ONES = ("start", "best client", "FedAvg", "FedFisher")


def measured(name: str, lora: bool, seed: int, lr: float) -> dict[str, dict[str, Any]]:
    """Return the scores of the start, the best client, FedAvg and FedFisher."""
    scores = tutorial.run(name, lora=lora, seed=seed, lr=lr, epochs=EPOCHS, most=MOST)
    clients = [each for key, each in scores.items() if key.startswith("client")]
    better = min if name == "GPT-2" else max
    by = "loss" if name == "GPT-2" else "accuracy"
    return scores | {"best client": better(clients, key=lambda each: each[by])}


def spread(values: list[float], digits: int) -> str:
    """Return a mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    """Write the table and the numbers."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    seeds = parser.parse_args().seeds
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in TASKS:
        for lora in (False, True):
            tried = {lr: measured(name, lora, CHOOSING, lr) for lr in RATES}
            lr = min(tried, key=lambda each: tried[each]["FedAvg"]["loss"])
            runs = [measured(name, lora, seed, lr) for seed in seeds]
            key = f"{name}, LoRA" if lora else name
            found[key] = {"lr": lr, "runs": runs}
            print(key, found[key], flush=True)
    lines = head("model", "lr", *ONES, "FedFisher - FedAvg")
    for key, each in found.items():
        causal = key.startswith("GPT-2")
        by, scale = ("loss", 1) if causal else ("accuracy", 100)
        values = {one: [scale * run[one][by] for run in each["runs"]] for one in ONES}
        values["gain"] = [
            a - b for a, b in zip(values["FedFisher"], values["FedAvg"], strict=True)
        ]
        cells = (spread(one, 3 if causal else 1) for one in values.values())
        lines.append(row(key, f"{each['lr']:g}", *cells))
    about = (
        f"Test accuracy in %, of GPT-2 the test loss in nats a word (less is better), "
        f"over {len(seeds)} seeds, each with its own start, split and test, ± the "
        "standard error. The best client is the best on the test of all classes, which "
        "nobody could choose. LoRA: rank 8 with A frozen, and the classifier."
    )
    page = blocks(opening("Hugging Face", __doc__), about, lines)
    write_page("hugging_face", page, found)


if __name__ == "__main__":
    main()
