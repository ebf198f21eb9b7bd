"""Average the clients' updates by their Fisher information, round by round."""

import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedfish.my_data import on_server
from flwr_fisher.measures import (
    ClientServerBarrier,
    MeasuredGrid,
    Personalisation,
    combine,
)
from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import Codec, FedFish, wait_for_nodes
from flwr_fisher.tasks import cohort_from_run_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedFish and write its report."""
    config, began = context.run_config, time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    task = on_server(context, clients)
    held_out, seed = float(config["held-out"]), int(config["seed"])
    measured = MeasuredGrid(
        grid, held_out=held_out if held_out < 1 else int(held_out), seed=seed
    )
    every, barrier_every = int(config["evaluate-every"]), int(config["barrier-every"])
    fraction = float(config["personalisation-fraction"])
    epochs = int(config["personalisation-epochs"])
    measures = combine(
        evaluate_on_test(task, every=every),
        ClientServerBarrier(measured, every=barrier_every) if barrier_every else None,
        Personalisation(measured, fraction=fraction, epochs=epochs, every=every)
        if fraction
        else None,
    )
    strategy = FedFish(
        server_optimizer=str(config["server-optimizer"]),
        server_lr=float(config["server-lr"]),
        fisher_source=str(config["fisher-source"]),
        upload=str(config["upload"]),
        power=float(config["power"]),
        balance=float(config["balance"]),
        reduction=str(config["reduction"]),
        codec=Codec(str(config["codec"]), float(config["budget"]) or None),
        seed=seed,
        fraction_evaluate=0.0,
        **cohort_from_run_config(config, len(list(measured.get_node_ids()))),
    )
    result = strategy.start(
        measured,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        evaluate_fn=measures,
    )
    report_rounds(
        path,
        method="FedFish",
        task=task,
        result=result,
        config=config,
        seconds={"total": time.monotonic() - began},
    )
