"""Train by federated averaging, then fit a convex model on the network's features."""

import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import TCT, Regression, wait_for_nodes
from tct.task import Net, load_test, title

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run both stages and write their report."""
    config, began = context.run_config, time.monotonic()
    stage1 = int(config["stage1-rounds"])
    strategy = TCT(
        stage1_rounds=stage1,
        num_features=int(config["num-features"]),
        local_steps=int(config["local-steps"]),
        lr=float(config["stage2-lr"]) or None,
        regression=Regression(
            head=str(config["head"]) or None,
            solver=str(config["solver"]),
            control_variates=bool(config["control-variates"]),
            standardise=bool(config["standardise"]),
            feature_dtype=str(config["feature-dtype"]),
        ),
        seed=int(config["seed"]),
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=0.0,
    )
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    torch.manual_seed(int(config["seed"]))
    model, loader = Net(), load_test(context)
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(model)),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        reopen=bool(config["reopen"]),
        may_change=("num-rounds", "output-dir", "reopen", "test-path", "stage2-lr"),
        evaluate_fn=evaluate_on_test(
            model, loader, every=int(config["evaluate-every"])
        ),
    )
    report_rounds(
        path,
        model,
        loader,
        result,
        method="TCT",
        config=config,
        seconds=time.monotonic() - began,
        title=title(context, loader, clients),
        marks={stage1: "stage1"},
    )
