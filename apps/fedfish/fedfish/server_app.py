"""Average the clients' updates by their Fisher information, round by round."""

import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedfish.task import Net, load_test, title
from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds, resolve_output_dir
from flwr_fisher.strategies import Codec, FedFish, wait_for_nodes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedFish and write its report."""
    config, began = context.run_config, time.monotonic()
    path = resolve_output_dir(str(config["output-dir"]), context.run_id)
    clients = len(wait_for_nodes(grid, int(config["min-nodes"])))
    torch.manual_seed(int(config["seed"]))
    model, loader = Net(), load_test(context)
    strategy = FedFish(
        server_optimizer=str(config["server-optimizer"]),
        server_lr=float(config["server-lr"]),
        fisher_source=str(config["fisher-source"]),
        power=float(config["power"]),
        balance=float(config["balance"]),
        reduction=str(config["reduction"]),
        codec=Codec(str(config["codec"]), float(config["budget"]) or None),
        seed=int(config["seed"]),
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=0.0,
    )
    result = strategy.start(
        grid,
        ArrayRecord(shared_state(model)),
        num_rounds=int(config["num-rounds"]),
        checkpoint_dir=str(config["checkpoint-dir"]) or None,
        resume=bool(config["checkpoint-dir"]),
        reopen=bool(config["reopen"]),
        may_change=("num-rounds", "output-dir", "reopen", "test-path"),
        evaluate_fn=evaluate_on_test(
            model, loader, every=int(config["evaluate-every"])
        ),
    )
    report_rounds(
        path,
        model,
        loader,
        result,
        method="FedFish",
        config=config,
        seconds=time.monotonic() - began,
        title=title(context, loader, clients),
    )
