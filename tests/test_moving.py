"""The pages on moving do what they say: their lines are applied, both apps run."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.testing import LocalGrid

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / "docs" / f"moving-from-{name}.md").read_text(encoding="utf-8")
    for name in ("fedavg", "numpyclient")
}


def blocks(page, kind):
    found = re.findall(rf"```{kind}\n(.*?)```", PAGES[page], re.DOTALL)
    return [block.splitlines() for block in found]


def sides(lines):
    """A diff's two texts."""
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


# The pages' own apps


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def load_data(partition):
    generator = torch.Generator().manual_seed(partition)
    x, y = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    data = TensorDataset(x + 2 * nn.functional.one_hot(y, 4), y)
    return DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)


def train(net, loader, epochs, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for x, y in [batch for _ in range(4) for batch in loader]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
    return float(loss.detach())


def test(net, loader):
    net.eval()
    x, y = loader.dataset.tensors
    with torch.no_grad():
        outputs = net(x)
    accuracy = (outputs.argmax(1) == y).float().mean()
    return float(nn.functional.cross_entropy(outputs, y)), float(accuracy)


test.__test__ = False


def get_weights(net):
    return [value.numpy() for value in net.state_dict().values()]


def set_weights(net, weights):
    pairs = zip(net.state_dict(), weights, strict=True)
    net.load_state_dict({name: torch.tensor(value) for name, value in pairs})


@pytest.fixture
def my_app(monkeypatch):
    """What the pages' apps import; it notes what comes of a run."""
    module = ModuleType("my_app")
    module.scores, module.states = [], []

    def evaluate(server_round, weights, config):
        net = Net()
        set_weights(net, weights)
        loss, accuracy = test(net, load_data(9)[1])
        module.scores.append(accuracy)
        return loss, {"accuracy": accuracy}

    module.save, module.evaluate = module.states.append, evaluate
    for part in (Net, load_data, train, test, get_weights, set_weights):
        setattr(module, part.__name__, part)
    monkeypatch.setitem(sys.modules, "my_app", module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield module


def app_of(text):
    namespace = {}
    exec(compile(text, "app.py", "exec"), namespace)
    return namespace["app"]


def run(client, server, clients=4, **config):
    grid = LocalGrid(client, clients, run_config=config)
    server(grid, Context(1, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_a_numpy_client_app_before_and_after(my_app, side, caplog):
    caplog.set_level("INFO", logger="flwr")
    client, server = (sides(block)[side] for block in blocks("numpyclient", "diff")[:2])
    run(app_of(client), app_of(server))
    assert len(my_app.scores) == 4
    assert my_app.scores[-1] > max(0.5, my_app.scores[0])
    assert ("Starting FedFish strategy" in caplog.text) == bool(side)


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_a_message_app_before_and_after(my_app, side, caplog):
    caplog.set_level("INFO", logger="flwr")
    client, server = (sides(block)[side] for block in blocks("fedavg", "diff")[:2])
    run(app_of(client), app_of(server))
    net = Net()
    net.load_state_dict(my_app.states[0])
    assert test(net, load_data(9)[1])[1] > 0.5
    assert ("Starting FedFish strategy" in caplog.text) == bool(side)


class Tied(nn.Module):
    """With a frozen layer, and a head that is a layer before."""

    def __init__(self):
        super().__init__()
        frozen = nn.Linear(4, 8).requires_grad_(False)
        with torch.no_grad():
            nn.init.eye_(frozen.weight)
            frozen.bias.zero_()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.first.weight
        self.frozen = frozen

    def forward(self, x):
        return self.head(self.first(self.frozen(x)).relu())[:, :3]


def test_what_is_frozen_or_tied_takes_seven_lines(my_app, monkeypatch, caplog):
    monkeypatch.setattr(my_app, "Net", Tied)
    client, server, changed, *_ = blocks("fedavg", "diff")
    texts = {"client_app.py": sides(client)[0], "server_app.py": sides(server)[0]}
    for name, old, new in hunks(changed):
        assert texts[name].count(old) == 1, old
        texts[name] = texts[name].replace(old, new)
    assert sum(line.startswith("+") for line in changed) == 7
    run(*map(app_of, texts.values()))
    net = Tied()
    net.load_state_dict(my_app.states[0], strict=False)
    assert set(my_app.states[0]) == {"first.weight", "first.bias", "head.bias"}
    assert test(net, load_data(9)[1])[1] > 0.5
    assert "train: left out" not in caplog.text  # a head is another matter


@pytest.mark.parametrize("strategy", ["FedFish(", "FAGH(", "FedFisherOneShot("])
def test_a_fisher_client_takes_the_place_of_a_client_app(my_app, strategy):
    server = sides(blocks("fedavg", "diff")[1])[1]
    server = server.replace("import FedFish", f"import {strategy[:-1]}")
    server = server.replace("= FedFish(", f"= {strategy}")
    run(app_of("\n".join(blocks("fedavg", "python")[0])), app_of(server))
    assert my_app.states


def test_the_quickstarts_client_trains_as_its_run_config_says(my_app, monkeypatch):
    asked, (_, server, *_) = [], blocks("fedavg", "diff")

    class Images(list):
        """The quickstart's batches are dicts."""

        @property
        def dataset(self):
            return range(24)

    def load_quickstarts(partition, num_partitions, batch_size):
        loader, _ = load_data(partition)
        asked.append((partition, num_partitions, batch_size))
        return [Images({"img": x, "label": y} for x, y in loader) for _ in range(2)]

    def train_quickstarts(net, trainloader, epochs, lr, device):
        asked.append((epochs, lr, device.type))
        return train(net, [(b["img"], b["label"]) for b in trainloader], epochs, lr)

    task = ModuleType("pytorchexample.task")
    task.Net, task.load_data, task.train = Net, load_quickstarts, train_quickstarts
    monkeypatch.setitem(sys.modules, "pytorchexample", ModuleType("pytorchexample"))
    monkeypatch.setitem(sys.modules, "pytorchexample.task", task)
    text = sides(server)[1].replace("FedFish", "FedFisherOneShot")
    client = app_of("\n".join(blocks("fedavg", "python")[1]))
    config = {"batch-size": 8, "local-epochs": 2}
    run(client, app_of(text.replace("num_rounds=3", "num_rounds=1")), **config)
    assert {(0, 4, 8), (3, 4, 8), (2, 0.1, "cpu")} <= {*asked}
    net = Net()
    net.load_state_dict(my_app.states[0])
    assert test(net, load_data(9)[1])[1] > 0.5


def hunks(block):
    """Yield (file, old lines, new lines) for each hunk of a page's diff."""
    path, lines = "", list[str]()
    for line in [*block, "@@"]:
        if line.startswith(("---", "@@")):
            if lines:
                yield path, *sides(lines)
            lines = []
            path = line[4:] if line.startswith("---") else path
        else:
            lines.append(line)
