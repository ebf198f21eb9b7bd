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
    DONE,
    FAGH,
    GIANT,
    CurvatureStrategy,
    FedAvg,
    FedExP,
    FedGA,
    FedPM,
    Scaffold,
    wait_for_nodes,
)
from flwr_fisher.tasks import cohort_from_run_config

METHODS = (
    *("fagh", "scaffold", "fedexp", "fedga", "fedpm"),
    *("giant", "done", "fedavg", "fedprox"),
)

app = ServerApp()


def make_strategy(
    config: dict[str, Any], clients: int
) -> tuple[CurvatureStrategy, int]:
    """Return the method's strategy, and its cost for a client in gradients a round.

    A local epoch is one gradient; with a Hessian-vector product it is two. FedPM's two
    passes for its inputs' second moments count as one each.
    """
    epochs, iterations = int(config["local-epochs"]), int(config["iterations"])
    lr, seed = float(config["server-lr"]), int(config["seed"])
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
        case "fedexp":
            epsilon, mean = config["fedexp-epsilon"], config["fedexp-average-last-two"]
            fedexp = FedExP(epsilon=float(epsilon), average_last_two=bool(mean), **ours)
            return fedexp, epochs
        case "fedga":
            return FedGA(beta=float(config["fedga-beta"]), **ours), 2 + epochs
        case "fedpm":
            return FedPM(damping=float(config["fedpm-damping"]), **ours), 2 + epochs
        case "giant":
            return GIANT(lr=lr, iterations=iterations, **ours), 1 + 2 * iterations
        case "done":
            alpha = float(config["done-alpha"])
            done = DONE(lr=lr, alpha=alpha, iterations=iterations, **ours)
            return done, 1 + 2 * (iterations - 1)
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
