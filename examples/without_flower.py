"""
Merging models without Flower
=============================

A merge is a function of trained models and of their curvatures. It needs no federation:
two checkpoints of a model that were fine-tuned apart, and the data of each, are enough.
This page takes the two parts one by one, the curvature and the merge, and shows what
they do on a network that is small enough to look at.
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.params import add, dot, scale, shared_state, subtract
from flwr_fisher.report import accuracies, plot_accuracies

# %%
# Models that were trained apart
# ------------------------------
#
# Four owners of handwritten digits. Each has three kinds of digits, or two, and trains
# from the same start. Here that is a plain loop of PyTorch's.

KINDS = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
Loader = DataLoader[tuple[Tensor, ...]]

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 5 == 0
test = images[is_test], labels[is_test]


def network() -> nn.Module:
    """Return the common start: one hidden layer of 64 units."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def own_data(kinds: tuple[int, ...]) -> Loader:
    """Return batches of an owner's training images."""
    mine = ~is_test & torch.isin(labels, torch.tensor(kinds))
    data = TensorDataset(images[mine], labels[mine])
    return DataLoader(data, batch_size=16, shuffle=True)


def trained(loader: Loader, epochs: int = 20) -> nn.Module:
    """Return the network after training on an owner's images alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


loaders = [own_data(kinds) for kinds in KINDS]
models = [trained(loader) for loader in loaders]

# %%
# What a curvature is
# -------------------
#
# :func:`~flwr_fisher.curvature.fisher` reads the model and the data once, and returns
# the Fisher information: how much the model's predictions change when its parameters
# do. On paper it is a matrix with a row and a column for each parameter. Nobody stores
# that. ``diagonal`` keeps one number a parameter. ``kfac`` keeps two small matrices a
# layer, of its inputs and of its outputs, so it knows which parameters act together.

diagonal = fisher(models[0], loaders[0], structure="diagonal")
kfac = fisher(models[0], loaders[0], structure="kfac")
print(diagonal)
print(kfac)
for block in kfac.blocks():
    print("   ", block)

# %%
# It is an operator on named tensors: it has a trace, it multiplies a vector that looks
# like the model's parameters, and it can be added and scaled.

print(f"traces: {diagonal.trace():.3f}, {kfac.trace():.3f}")
direction = subtract(shared_state(models[1]), shared_state(models[0]))
product = kfac @ direction
print({name: tuple(value.shape) for name, value in product.items()})
print(0.5 * kfac + kfac)

# %%
# What the product means can be checked. When the parameters move by a small :math:`v`,
# the predictions change by a Kullback-Leibler divergence of about
# :math:`\frac12 v^\top F v`. Here :math:`v` is one hundredth of the way to the second
# owner's model:


def divergence(model: nn.Module, loader: Loader, step: Mapping[str, Tensor]) -> float:
    """Return how far a step of the parameters changes the model's predictions."""
    moved = network()
    moved.load_state_dict(add(shared_state(model), step))
    x = loader.dataset[:][0]
    with torch.no_grad():
        before, after = model(x).log_softmax(-1), moved(x).log_softmax(-1)
        return float((before.exp() * (before - after)).sum(-1).mean())


v = scale(direction, 0.01)
print(f"measured   {divergence(models[0], loaders[0], v):.2e}")
print(f"kfac       {dot(v, kfac @ v) / 2:.2e}")
print(f"diagonal   {dot(v, diagonal @ v) / 2:.2e}")

# %%
# Two models, merged
# ------------------
#
# An owner reports its model's parameters, their curvature, and the number of its
# examples: a :class:`~flwr_fisher.merge.LocalPosterior`. The merge is one call. The
# mean of the two models is there to compare with.

posteriors = [
    LocalPosterior(shared_state(model), fisher(model, loader), len(loader.dataset))
    for model, loader in zip(models, loaders, strict=True)
]
pair = posteriors[:2]
points = {
    "A": pair[0].params,
    "B": pair[1].params,
    "mean": fedavg(pair),
    "FedFisher": fedfisher(pair).params,
}

# %%
# Three points lie in a plane, and the mean of two of them lies in it, too. So the plane
# through A, B and the merge has all four. The picture shows the loss of the model at
# each point of that plane, on test images of both owners' digits.

of_both = torch.isin(test[1], torch.tensor(KINDS[0] + KINDS[1]))
Params = Mapping[str, Tensor]


@torch.no_grad()
def loss_at(params: Params) -> float:
    """Return the loss of parameters on both owners' digits."""
    model = network()
    model.load_state_dict(dict(params))
    return float(cross_entropy(model(test[0][of_both]), test[1][of_both]))


def axes_of(points: Mapping[str, Params]) -> tuple[Params, Params]:
    """Return two directions of length 1: from A to B, and from there to the merge."""
    across = subtract(points["B"], points["A"])
    across = scale(across, 1 / float(dot(across, across).sqrt()))
    up = subtract(points["FedFisher"], points["A"])
    up = add(up, across, -float(dot(up, across)))
    return across, scale(up, 1 / float(dot(up, up).sqrt()))


def draw_plane(points: Mapping[str, Params]) -> None:
    """Draw the loss around the points, in the plane through them."""
    across, up = axes_of(points)
    steps = {name: subtract(value, points["A"]) for name, value in points.items()}
    at = {n: (float(dot(s, across)), float(dot(s, up))) for n, s in steps.items()}
    width, height = at["B"][0], at["FedFisher"][1]
    xs = torch.linspace(-0.3 * width, 1.3 * width, 33).tolist()
    ys = torch.linspace(-0.7 * height, 1.9 * height, 33).tolist()
    rows = [add(points["A"], up, y) for y in ys]
    losses = [[loss_at(add(row, across, x)) for x in xs] for row in rows]
    axes = plt.figure(figsize=(7, 4.2), layout="constrained").add_subplot()
    levels = [0.1 * 2 ** (step / 2) for step in range(15)]
    filled = axes.contourf(
        xs, ys, losses, levels, norm="log", cmap="Blues", extend="max"
    )
    ticks = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8]
    plt.colorbar(filled, label="loss on both owners' digits", ticks=ticks, format="%g")
    for name, (x, y) in at.items():
        axes.plot(x, y, "o", color="#d1495b", markeredgecolor="white", markersize=9)
        axes.annotate(name, (x, y), (9, 6), textcoords="offset points", weight="bold")
    axes.set(xlabel="from A to B", ylabel="away from that line")


draw_plane(points)
for name, params in points.items():
    print(f"{name:10}loss {loss_at(params):.3f}")

# %%
# The mean is half way on the straight line. The merge leaves the line: along a
# direction in which one owner's predictions do not change, it goes to where the other
# owner's loss is least.
#
# All four, and the structures
# ----------------------------
#
# Structures are merged in the same way.

test_loader = DataLoader(TensorDataset(*test), batch_size=512)
of_diagonals = [
    LocalPosterior(
        p.params, fisher(model, loader, structure="diagonal"), p.num_examples
    )
    for p, model, loader in zip(posteriors, models, loaders, strict=True)
]
merged = fedfisher(posteriors)
candidates = {
    **{f"owner of {KINDS[i]}": p.params for i, p in enumerate(posteriors)},
    "mean (FedAvg)": fedavg(posteriors),
    "FedFisher, diagonal": fedfisher(of_diagonals).params,
    "FedFisher, kfac": merged.params,
}
accuracy = accuracies(network(), candidates, test_loader)

for kinds, share in zip(KINDS, merged.shares, strict=True):
    print(f"owner of {kinds!s:11}{share:6.1%} of the curvature")

for name, value in accuracy.items():
    print(f"{name:20}{value:.1%}")

plot_accuracies(Path("without_flower.png"), accuracy, best="FedFisher, kfac")

# %%
# A diagonal says how much each number matters. It does not say that two numbers can
# make up for each other, and in a layer most of them can. K-FAC says both.
#
# The other merges take the same posteriors, or less: :doc:`/api/merge` lists them, and
# :doc:`/without-flower` goes from checkpoint files to one file, in a few lines.
