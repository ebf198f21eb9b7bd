"""What hanging, dying and late clients, and ``kill -9``, do to a run.

    python benchmarks/crashes.py [--page]

First six SuperNodes on this machine, each a process with processes of its own, and a
SuperLink between them and the server, for twenty rounds. Client 1 hangs in its first
training; client 2's node is killed in the second round; client 3 takes 100 seconds; the
node of client 5 starts when the third round has ended. Once rounds end at three usable
replies, once at a deadline. The model is tiny: what is measured is who is waited for,
and how it is named.

Then three clients and two rounds of three epochs in processes that are killed, by
``tools/killing.py``: the server's and the clients', at each named point (at its first,
second and third call, where there are so many), and at random moments, up to three
times in a run; half of these are the client's that trains, if one does. The run,
started again, must end with the model and the metrics of the one that nothing
interrupted, bit for bit, and no epoch may be finished twice. With ``--page`` the page
is written anew from the numbers that are there.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.page import RESULTS, blocks, command_line, opening, write_page
from harness.size import sized
from harness.supernodes import Federation, wait_for
from harness.tables import head, row

READING = """\
A round of clients that are there takes 14 s: for each request a SuperNode starts a
process, which imports PyTorch; the first round also has two queries. Where three
replies are enough, the longest rounds are those before client 5 takes part: then
client 3 is the third. With a deadline, clients 1 and 3 are waited for in rounds 1, 3,
6, 11 and 20 (the end of the last one is no longer in the log) and sit out the others;
in round 2 the node that was killed is named before the SuperLink has noticed."""

KILLING = Path(__file__).parents[1] / "tools" / "killing.py"
ROUNDS, PORT = sized(20, 4), 19400
DEADLINE, SLOW = sized((40.0, 100.0), (20.0, 20.0))
STRATEGIES = sized(("fedfisher", "fedfish", "scaffold", "fedga"), ("fedfisher",))
RANDOM = {"fedfisher": sized(100, 1), "fedfish": 30, "scaffold": 30, "fedga": 30}
NAMED = sized(("1", "2", "3"), ("1",))

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "waiting"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "flwr-fisher"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
rounds = 20
timeout = 25.0
enough = 6
"""

APP = """
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.strategies import FedFisherOneShot, Waiting

FOLDER = Path("FOLDER")
SECONDS = {1: 1e6, 3: SLOW}


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def client_fn(context):
    partition = int(context.node_config["partition-id"])

    def train_fn(model, loader, device, config):
        time.sleep(SECONDS.get(partition, 0.0))
        return LocalSGD()(model, loader, device, config)

    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    loader = DataLoader(data, batch_size=4)
    return FisherClient(model(), loader, train_fn=train_fn)


client = make_client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid, context):
    config = context.run_config
    while len(list(grid.get_node_ids())) < 5:
        time.sleep(1)

    def evaluate(server_round, arrays):
        (FOLDER / f"round-{server_round}").write_text(str(time.time()))

    strategy = FedFisherOneShot(
        fraction_evaluate=0.0,
        min_train_nodes=2,
        waiting=Waiting(enough_replies=config["enough"]),
    )
    strategy.start(
        grid,
        ArrayRecord(model().state_dict()),
        num_rounds=config["rounds"],
        timeout=config["timeout"],
        evaluate_fn=evaluate,
    )
    (FOLDER / "done").write_text("")
"""


def federation(enough: int, timeout: float, port: int) -> dict[str, Any]:
    """Run the twenty rounds; return when each ended, and what the log says."""
    folder = Path(tempfile.mkdtemp())
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(PYPROJECT)
    text = APP.replace('FOLDER")', f'{folder}")').replace("SLOW", str(SLOW))
    (app / "app.py").write_text(text)
    nodes = Federation(folder, port)
    try:
        nodes.link()
        time.sleep(10)
        for number in (0, 1, 2, 3, 4):
            nodes.node(number)
        config = f"enough={enough} timeout={timeout} rounds={ROUNDS}"
        nodes.start(
            "run", "flwr", "run", "app", "here", "--stream", "--run-config", config
        )
        wait_for(folder / "round-1", 600)
        time.sleep(1)
        nodes.kill(2)
        wait_for(folder / "round-3", 600)
        nodes.node(5)
        wait_for(folder / "done", 3600)
        ends = [float((folder / f"round-{n}").read_text()) for n in range(ROUNDS + 1)]
        log = re.sub(r"\x1b\[\d+m", "", (folder / "run.log").read_text())
        return {
            "seconds": [round(b - a, 1) for a, b in pairwise(ends)],
            "log": [
                line.partition(":")[2].strip()
                for line in log.splitlines()
                if "no reply" in line or "late:" in line or "Not asked" in line
            ],
            "replies": re.findall(r"\((partition-\d), 12 examples\)", log),
        }
    finally:
        nodes.close()


def killed(strategy: str) -> list[dict[str, Any]]:
    """Return the verdicts of killed runs, the uninterrupted one's first."""
    with tempfile.TemporaryDirectory() as folder:
        where = ("--strategy", strategy, "--named", *NAMED)
        command = [sys.executable, str(KILLING), folder, *where]
        command += ["--random", str(RANDOM[strategy])]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def table_of_rounds(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return how long rounds took."""
    lines = head("", "rounds", "median, s", "longest, s", "all, s")
    for name, run in runs.items():
        seconds = run["seconds"]
        middle, longest = statistics.median(seconds), max(seconds)
        numbers = (f"{middle:.0f}", f"{longest:.0f}", f"{sum(seconds):.0f}")
        lines.append(row(name, str(len(seconds)), *numbers))
    return lines


def table_of_kills(verdicts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return what became of killed runs."""
    lines = head(
        "", "runs", "kills", "another model", "other metrics", "an epoch twice"
    )
    for name, (_, *trials) in verdicts.items():
        for what in ("at named points", "at random moments"):
            random = what == "at random moments"
            own = [t for t in trials if (t["point"] == "random") == random]
            counts = (
                len(own),
                sum(t["kills"] if random else t["died"] for t in own),
                sum(not t["same-model"] for t in own),
                sum(not t["same-history"] for t in own),
                sum(bool(t["twice"]) for t in own),
            )
            lines.append(row(f"{name}, {what}", *map(str, counts)))
    return lines


def log_of(run: dict[str, Any]) -> list[str]:
    """Return each line about missing clients once, with how often it came."""
    lines = list(dict.fromkeys(run["log"]))
    return ["```", *(f"{run['log'].count(line)} x {line}" for line in lines), "```"]


def main() -> None:
    """Measure, and write the page."""
    parser = command_line(__doc__)
    parser.add_argument("--page", action="store_true")
    if parser.parse_args().page:
        numbers = json.loads((RESULTS / "crashes.json").read_text())
        runs, verdicts = numbers["runs"], numbers["kills"]
    else:
        waits = {
            "three replies are enough": (3, 600.0, PORT),
            f"deadline of {DEADLINE:.0f} s": (6, DEADLINE, PORT + 20),
        }
        waits = dict(list(waits.items())[: sized(2, 1)])
        runs = {name: federation(*how) for name, how in waits.items()}
        verdicts = {strategy: killed(strategy) for strategy in STRATEGIES}
    parts: list[str | list[str]] = ["## Over SuperNodes", table_of_rounds(runs)]
    parts.append(READING)
    for name, run in runs.items():
        came = sorted(set(run["replies"]))
        parts += [f"{name}: usable replies came from {', '.join(came)}.", log_of(run)]
    parts += ["## Killed", table_of_kills(verdicts)]
    page = [*opening("Clients that hang, servers that crash", __doc__), ""]
    write_page("crashes", page + blocks(*parts), {"runs": runs, "kills": verdicts})


if __name__ == "__main__":
    main()
