"""
Fine-tune a pre-trained network in one round
============================================

A network with batch norm is trained on public images: turned digits, for which it
learns to predict the angle. Then five clients fine-tune it to recognise the digits.
Each client has mostly digits of a few kinds, and trains once. The server makes one
network of the five.

A training as from scratch would spoil what the network knows: each client has few
images, of few kinds. So the strategy is told that the network is pre-trained. It solves
for the new last layer first, from sums over all clients' images (this is AFL). Clients
train the other layers below it, gently, and after the merge it is solved for again.
"""

import copy
import logging
from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Context
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.merge import fedavg
from flwr_fisher.report import accuracies
from flwr_fisher.strategies import AFL, FedFisherOneShot, shared_state
from flwr_fisher.testing import LocalGrid

# Flower logs every step of a round, which this page has no need of.
logging.getLogger("flwr").setLevel(logging.ERROR)
CPU = torch.device("cpu")

# %%
# The network, and what it knows before
# -------------------------------------
#
# Yours is a download, such as torchvision's ResNet with its ``weights``. Here, some
# hundred digits are public: not turned, and turned by a quarter, a half and three
# quarters. A network that predicts the angle has learnt to see strokes. Then a new head
# for ten classes replaces the head for four.


def network(classes: int) -> nn.Sequential:
    """Return five convolutions with batch norm, for images of 8 by 8 pixels."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 16), (16, 32), (32, 32), (32, 32)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, classes)
    )


def loader(
    x: Tensor, y: Tensor, batch_size: int = 16
) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of images and labels, shuffled."""
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


def pretrained(images: Tensor) -> nn.Sequential:
    """Return a network that knows turned images, with a new head for ten classes."""
    model = network(classes=4)
    turned = torch.cat([images.rot90(turns, (2, 3)) for turns in range(4)])
    turns = torch.arange(4).repeat_interleave(len(images))
    LocalSGD(epochs=5, lr=0.05)(model, loader(turned, turns, 64), CPU, {})
    model[-1] = nn.Linear(128, 10)
    return model


# %%
# One round
# ---------
#
# ``pretrained=True`` is all that differs from a round from scratch. The learning rate
# is the default of ``LocalSGD``, which then is 0.001. ``result.unrefined`` is the merge
# before its last layer is solved for, and ``result.uploads`` has what clients trained;
# the FedAvg model is the mean of these.

x = torch.from_numpy(load_digits().images).float().unsqueeze(1)
x, y = (x - x.mean()) / x.std(), torch.from_numpy(load_digits().target)


def shares(labels: Tensor, clients: int, seed: int) -> list[list[int]]:
    """Return each client's rows: it has mostly a few of the classes."""
    rows = {"label": labels.tolist(), "row": list(range(len(labels)))}
    partitioner = DirichletPartitioner(
        clients, "label", alpha=0.1, min_partition_size=2, seed=seed
    )
    partitioner.dataset = Dataset.from_dict(rows)
    return [partitioner.load_partition(i)[:]["row"] for i in range(clients)]


def one_round(seed: int) -> dict[str, float]:
    """Return the test accuracy of what may be made of five clients' networks."""
    torch.manual_seed(seed)
    order = torch.randperm(len(y))
    public, test, private = order[:600], order[600:1000], order[1000:]
    start = pretrained(x[public])
    mine = [private[torch.tensor(part)] for part in shares(y[private], 5, seed)]

    def client_fn(context: Context) -> FisherClient:
        own = mine[int(context.node_config["partition-id"])]
        train = LocalSGD(epochs=30)
        return FisherClient(
            copy.deepcopy(start), loader(x[own], y[own]), train_fn=train
        )

    grid = LocalGrid(make_client_app(client_fn), num_supernodes=5)
    arrays = ArrayRecord(shared_state(start))
    afl = AFL(fraction_evaluate=0.0).start(grid, arrays)
    strategy = FedFisherOneShot(pretrained=True, fraction_evaluate=0.0)
    result = strategy.start(grid, arrays)
    assert result.unrefined is not None
    uploads = [u.payload.posterior(u.num_examples) for u in result.uploads]
    made: dict[str, Mapping[str, Tensor]] = {
        f"client {client}": own.params for client, own in enumerate(uploads)
    }
    made["FedAvg"] = fedavg(uploads)
    made["FedFisher's merge"] = result.unrefined.to_torch_state_dict()
    made["AFL"] = afl.arrays.to_torch_state_dict()
    made["FedFisher"] = result.arrays.to_torch_state_dict()
    found = accuracies(start, made, loader(x[test], y[test], 200))
    alone = max(found.pop(f"client {client}") for client in range(5))
    return {"best client": alone, **found}


rounds = [one_round(seed) for seed in range(3)]
for name in rounds[0]:
    shown = ", ".join(f"{100 * found[name]:.1f}" for found in rounds)
    print(f"{name:20} {shown} %")

# %%
# The picture
# -----------
#
# Each dot is one split.

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for found in rounds:
    values = [100 * value for value in found.values()]
    axes.plot(values, list(found), "o", color="#30638e", alpha=0.7)
means = [sum(f[name] for f in rounds) / len(rounds) for name in rounds[0]]
axes.plot([100 * m for m in means], list(rounds[0]), "D", color="#d1495b", label="mean")
axes.set(xlabel="test accuracy, %", xlim=(0, 100))
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="lower left")
plt.show()

# %%
# :doc:`/pretrained` says what the server asks of clients, what it costs, and how much
# it is worth with a network that is published.
