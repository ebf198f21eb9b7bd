"""Merge the clients' models by their Fisher information, and write a report."""

import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedfisher.task import Net, load_test, title
from flwr_fisher.params import shared_state
from flwr_fisher.report import report_one_shot, resolve_output_dir
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import (
    Codec,
    FedFisherOneShot,
    Refinement,
    Waiting,
    wait_for_nodes,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedFisher and write its report."""
    config, began = context.run_config, time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    torch.manual_seed(int(config["seed"]))
    model = Net()
    strategy = FedFisherOneShot(
        structure=str(config["structure"]),
        solver=str(config["solver"]),
        codec=Codec(str(config["codec"]), float(config["budget"]) or None),
        aggregate=str(config["aggregate"]).removeprefix("secure-"),
        refine=Refinement(
            head="auto" if config["head"] else False, steps=int(config["steps"])
        ),
        pretrained=bool(config["pretrained"]),
        secure=SecureSums() if config["aggregate"] == "secure-sums" else None,
        seed=int(config["seed"]),
        fraction_evaluate=0.0,
        min_available_nodes=clients,
        waiting=Waiting(window=float(config["window"]) or None),
    )
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(model)),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        reopen=bool(config["reopen"]),
        may_change=("num-rounds", "output-dir", "reopen", "test-path"),
    )
    seconds = time.monotonic() - began
    loader = load_test(context)
    report_one_shot(
        path,
        model,
        loader,
        result,
        config=config,
        seconds=seconds,
        title=title(context, loader, clients),
    )
