"""
One shot, in an app of your own
===============================

Five clients hold handwritten digits, and each of them has mostly digits of a few kinds.
Each trains a model to the end, connects once, and uploads its model together with what
the model is sure of: its Fisher information. The server makes one model of the five.

Everything here is your own code: the model, the data, the loaders. In the end the same
code becomes the two files of an app for ``flwr run``.
"""

import logging
from pathlib import Path

import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Context
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.report import accuracies, plot_accuracies
from flwr_fisher.strategies import FedAvg, FedFisherOneShot, shared_state
from flwr_fisher.testing import LocalGrid

# Flower logs every step of a round, which this page has no need of.
logging.getLogger("flwr").setLevel(logging.ERROR)

# %%
# The model
# ---------
#
# Any ``nn.Module`` whose outputs are one number a class, before the softmax.


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.second = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 2 * 2, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[n, 10]`` of images ``[n, 1, 8, 8]``."""
        x = nn.functional.max_pool2d(self.first(x).relu(), 2)
        x = nn.functional.max_pool2d(self.second(x).relu(), 2)
        logits: Tensor = self.output(self.hidden(x.flatten(1)).relu())
        return logits


# %%
# The data
# --------
#
# scikit-learn's digits: every fifth image is for the test, the others are shared out.
# flwr-datasets' ``DirichletPartitioner`` draws for each class how much of it each
# client has; the smaller ``alpha`` is, the more these shares differ.

CLIENTS = 5

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 5 == 0
train_images, train_labels = images[~is_test], labels[~is_test]

rows = {"label": train_labels.tolist(), "row": list(range(len(train_labels)))}
partitioner = DirichletPartitioner(CLIENTS, "label", alpha=0.1, seed=0)
partitioner.dataset = Dataset.from_dict(rows)
parts = [partitioner.load_partition(i)[:]["row"] for i in range(CLIENTS)]
test_loader = DataLoader(TensorDataset(images[is_test], labels[is_test]), 512)


def load_data(partition: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of a client's own images."""
    mine = torch.tensor(parts[partition])
    data = TensorDataset(train_images[mine], train_labels[mine])
    return DataLoader(data, batch_size=16, shuffle=True)


# %%
# What each client holds of the digits 0 to 9:

for client, part in enumerate(parts):
    counts = train_labels[torch.tensor(part)].bincount(minlength=10)
    print(f"client {client}:", *(f"{count:4}" for count in counts.tolist()))

# %%
# The clients
# -----------
#
# Flower calls ``client_fn`` for each message, and ``partition-id`` says which client it
# is. The :class:`~flwr_fisher.client.FisherClient` trains with the function that you
# give it, and takes the Fisher information afterwards, if the server asks for it.


def client_fn(context: Context) -> FisherClient:
    """Return the client of a node."""
    loader = load_data(int(context.node_config["partition-id"]))
    return FisherClient(Net(), loader, train_fn=LocalSGD(epochs=30))


app = make_client_app(client_fn)

# %%
# The server
# ----------
#
# :class:`~flwr_fisher.testing.LocalGrid` takes the place of Flower's network: it runs
# the app for virtual clients, one after the other, in this process. Both strategies
# begin with the same model. This library's :class:`~flwr_fisher.strategies.FedAvg` has
# FedFisher's seeds. So FedAvg's clients train exactly as FedFisher's do, and the two
# differ in nothing but the merge.

torch.manual_seed(0)
start = ArrayRecord(shared_state(Net()))
grid = LocalGrid(app, num_supernodes=CLIENTS)

fedfisher = FedFisherOneShot().start(grid, start)
fedavg = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=1)

# %%
# What came of it
# ---------------
#
# A result holds the merged model, and what each client uploaded.
# :func:`~flwr_fisher.report.accuracies` scores any number of models on the test
# images.

models = {
    **{upload.client: upload.payload.params for upload in fedfisher.uploads},
    "FedAvg": fedavg.arrays.to_torch_state_dict(),
    "FedFisher": fedfisher.arrays.to_torch_state_dict(),
}
accuracy = accuracies(Net(), models, test_loader)
for name, value in accuracy.items():
    print(f"{name:12}{value:6.1%}")
print(f"an upload: {fedfisher.upload_bytes / 1000:.0f} kB")

# %%
# A client alone knows the digits that it has seen. FedAvg takes the mean of the five
# models, number by number. FedFisher lets each client decide the more, the more its
# predictions depend on a parameter. Its upload is not larger: the Fisher information is
# packed with the model into the bytes that FedAvg needs for the model alone.

plot_accuracies(Path("one_shot_accuracy.png"), accuracy, best="FedFisher")

# %%
# The same code under ``flwr run``
# --------------------------------
#
# An app is a folder, this one with three files. ``client_app.py`` holds ``Net``, the
# data with ``load_data``, ``client_fn`` and ``app``, as they are above.
# ``server_app.py`` holds what the server does. FedAvg needs no second training: it is
# another merge of the same uploads. With ``fraction_evaluate=0.0`` no client evaluates
# the model, since these have no data for it.
#
# .. code-block:: python
#
#     import torch
#     from client_app import Net, test_loader
#     from flwr.app import ArrayRecord, Context
#     from flwr.serverapp import Grid, ServerApp
#
#     from flwr_fisher.report import accuracies
#     from flwr_fisher.merge import fedavg
#     from flwr_fisher.strategies import FedFisherOneShot, shared_state
#
#     app = ServerApp()
#
#
#     @app.main()
#     def main(grid: Grid, context: Context) -> None:
#         strategy = FedFisherOneShot(min_available_nodes=5, fraction_evaluate=0.0)
#         result = strategy.start(grid, ArrayRecord(shared_state(Net())))
#         reports = [u.payload.posterior(u.num_examples) for u in result.uploads]
#         models = {u.client: u.payload.params for u in result.uploads}
#         models["FedAvg"] = fedavg(reports)
#         models["FedFisher"] = result.arrays.to_torch_state_dict()
#         print(accuracies(Net(), models, test_loader))
#         # In full: Flower runs a copy of the folder, in another place.
#         torch.save(models["FedFisher"], "/path/to/model.pt")
#
# ``pyproject.toml`` tells Flower where the two are:
#
# .. code-block:: toml
#
#     [build-system]
#     requires = ["hatchling"]
#     build-backend = "hatchling.build"
#
#     [project]
#     name = "my-app"
#     version = "1.0.0"
#     dependencies = []
#
#     [tool.hatch.build.targets.wheel]
#     packages = ["."]
#
#     [tool.flwr.app]
#     publisher = "me"
#
#     [tool.flwr.app.components]
#     serverapp = "server_app:app"
#     clientapp = "client_app:app"
#
# Then this runs it with five virtual clients. A model as small as this is fastest with
# one thread a client, and so more clients run at a time:
#
# .. code-block:: bash
#
#     flwr run . --stream \
#         --federation-config "num-supernodes=5 client-resources-num-cpus=1"
#
# The :doc:`tutorial on a real federation </tutorials/real_federation>` runs such a
# folder on machines with data of their own. The :doc:`how-to guides </how-to>` say how
# to bring your own training loop, your own loss, and frozen layers.
