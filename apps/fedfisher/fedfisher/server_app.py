"""Merge the clients' models by their Fisher information, and write a report."""

import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedfisher.my_data import on_server
from flwr_fisher.params import shared_state
from flwr_fisher.report import report_one_shot, resolve_output_dir
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import Codec, FedFisherOneShot, Waiting, wait_for_nodes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedFisher and write its report."""
    config, began = context.run_config, time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    task = on_server(context, clients)
    strategy = FedFisherOneShot(
        structure=str(config["structure"]),
        solver=str(config["solver"]),
        codec=Codec(str(config["codec"]), float(config["budget"]) or None),
        aggregate=str(config["aggregate"]).removeprefix("secure-"),
        secure=SecureSums() if config["aggregate"] == "secure-sums" else None,
        seed=int(config["seed"]),
        fraction_evaluate=0.0,
        min_available_nodes=clients,
        waiting=Waiting(window=float(config["window"]) or None),
    )
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
    )
    report_one_shot(
        path,
        task=task,
        result=result,
        config=config,
        seconds={"total": time.monotonic() - began},
    )
