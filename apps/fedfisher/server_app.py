"""Merge the clients' models by their Fisher information, and report what it gave."""

import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_fisher.params import shared_state
from flwr_fisher.report import report_one_shot, resolve_output_dir
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.tasks import task_from_run_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedFisher and write its report."""
    config, began = context.run_config, time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(list(grid.get_node_ids()))
    task = task_from_run_config(config, clients)
    strategy = FedFisherOneShot(
        structure=str(config["structure"]),
        solver=str(config["solver"]),
        codec=str(config["codec"]),
        budget=float(config["budget"]) or None,
        aggregate=str(config["aggregate"]),
        seed=int(config["seed"]),
        fraction_evaluate=0.0,
    )
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=int(config["num-rounds"]),
    )
    report_one_shot(
        path,
        task=task,
        result=result,
        config=config,
        seconds={"total": time.monotonic() - began},
    )
