"""Train by federated averaging, then fit a convex model on the network's features."""

import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import TCT, Regression, wait_for_nodes
from flwr_fisher.tasks import cohort_from_run_config
from tct.my_data import on_server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run both stages and write their report."""
    config, began = context.run_config, time.monotonic()
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
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
        fraction_evaluate=0.0,
        **cohort_from_run_config(config, clients),
    )
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    task = on_server(context, clients)
    every = int(config["evaluate-every"])
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        evaluate_fn=evaluate_on_test(task, every=every, also=[stage1]),
    )
    report_rounds(
        path,
        method="TCT",
        task=task,
        result=result,
        config=config,
        seconds={"total": time.monotonic() - began},
        also={"stage1": stage1},
        marks={stage1 + 1: "stage 2"},
    )
