"""FAGH, Newton's direction from one Hessian row, and the methods to compare it with."""

import time
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fagh.my_data import on_server
from flwr_fisher.errors import UnknownNameError
from flwr_fisher.measures import MeasuredGrid, combine, costs
from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import (
    FAGH,
    CurvatureStrategy,
    FedAvg,
    Scaffold,
    wait_for_nodes,
)
from flwr_fisher.tasks import cohort_from_run_config

METHODS = ("fagh", "scaffold", "fedavg", "fedprox")

app = ServerApp()


def make_strategy(
    config: dict[str, Any], clients: int
) -> tuple[CurvatureStrategy, int]:
    """Return the method's strategy, and its cost for a client in gradients a round.

    A local epoch is one gradient; with a Hessian-vector product it is two.
    """
    epochs, seed = int(config["local-epochs"]), int(config["seed"])
    lr = float(config["server-lr"])
    sampled = {"fraction_evaluate": 0.0, **cohort_from_run_config(config, clients)}
    ours = {"seed": seed, **sampled}
    match config["method"]:
        case "fagh":
            probe, rho = str(config["probe"]), float(config["rho"])
            betas = float(config["beta1"]), float(config["beta2"])
            fagh = FAGH(lr=lr, rho=rho, betas=betas, probe=probe, **ours)
            return fagh, 1 if probe == "none" else 2
        case "scaffold":
            return Scaffold(server_lr=lr, **ours), epochs
        case "fedavg" | "fedprox":
            return FedAvg(**ours), epochs
    raise UnknownNameError("method", config["method"], METHODS)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method and write its report."""
    config, began = dict(context.run_config), time.monotonic()
    where = str(config["checkpoint-dir"]) or None
    train = ConfigRecord()
    if config["method"] == "fedprox":
        train["proximal-mu"] = float(config["proximal-mu"])
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    task = on_server(context, clients)
    strategy, gradients = make_strategy(config, clients)
    measured = MeasuredGrid(grid)
    result = strategy.start(
        measured,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=int(config["num-rounds"]),
        train_config=train,
        evaluate_fn=combine(
            evaluate_on_test(task, every=int(config["evaluate-every"])),
            costs(measured, gradients),
        ),
        checkpoint_dir=where,
        resume=where is not None,
    )
    report_rounds(
        path,
        method=str(config["method"]),
        task=task,
        result=result,
        config=config,
        seconds={"total": time.monotonic() - began},
    )
