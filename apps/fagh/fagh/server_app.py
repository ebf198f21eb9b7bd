"""FAGH, Newton's direction from one Hessian row, and the methods to compare it with."""

import time
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fagh.task import Net, load_test, title
from flwr_fisher.errors import UnknownNameError
from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import (
    FAGH,
    CurvatureStrategy,
    FedAvg,
    Scaffold,
    wait_for_nodes,
)

METHODS = ("fagh", "scaffold", "fedavg", "fedprox")

app = ServerApp()


def make_strategy(config: dict[str, Any]) -> CurvatureStrategy:
    """Return the method's strategy."""
    lr, sampled = float(config["server-lr"]), float(config["fraction-train"])
    options: dict[str, Any] = {"fraction_train": sampled, "fraction_evaluate": 0.0}
    options["seed"] = int(config["seed"])
    match config["method"]:
        case "fagh":
            betas = float(config["beta1"]), float(config["beta2"])
            probe, rho = str(config["probe"]), float(config["rho"])
            return FAGH(lr=lr, rho=rho, betas=betas, probe=probe, **options)
        case "scaffold":
            return Scaffold(server_lr=lr, **options)
        case "fedavg" | "fedprox":
            return FedAvg(**options)
    raise UnknownNameError("method", config["method"], METHODS)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method and write its report."""
    config, began = dict(context.run_config), time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    train = ConfigRecord()
    if config["method"] == "fedprox":
        train["proximal-mu"] = float(config["proximal-mu"])
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    torch.manual_seed(int(config["seed"]))
    model, loader = Net(), load_test(context)
    result = make_strategy(config).start(
        grid,
        ArrayRecord(shared_state(model)),
        num_rounds=int(config["num-rounds"]),
        train_config=train,
        evaluate_fn=evaluate_on_test(
            model, loader, every=int(config["evaluate-every"])
        ),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        reopen=bool(config["reopen"]),
        may_change=("num-rounds", "output-dir", "reopen", "test-path"),
    )
    report_rounds(
        path,
        model,
        loader,
        result,
        method=str(config["method"]),
        config=config,
        seconds=time.monotonic() - began,
        title=title(context, loader, clients),
    )
