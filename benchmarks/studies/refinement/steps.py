"""Other steps after the head, at the same number of requests.

    python benchmarks/refinement.py --data-dir DIR --only steps

MNIST, the clients of merges.py, from FedFisher's merge with its head. Three test splits
(seed 0 of each α; means ± standard deviations). What a method has to choose was chosen
by validation accuracy on a split of another seed (α = 0.1). A request brings a gradient
of all data, or what the method asks for instead. With k + 1 requests a method that
tests its steps has made k, any other k + 1; K-FAC's factors, once, come with the first
one. *Levenberg and Marquardt*: after a step with which the loss fell, the next is
half as long again; otherwise it is taken back, with three times the damping and a third
of the length. *FOOF* (Benzing, ICML 2022) is K-FAC without the outputs' factors. GIANT
needs two requests for a step.

**Reading.** From four requests on nothing is ahead of L-BFGS from K-FAC, and a new
K-FAC every second step gains nothing. The inputs' factors alone are level after four
requests and behind after nine. A method that takes every step, with a length that was
chosen on another split, can lose the model: FAGH and FedAvg's rounds of one epoch do on
one of the three, where a descent that compares losses cannot. RegMean++ with a head
afterwards has six requests, and is behind four of ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from flwr.app import ArrayRecord
from harness.jobs import kept
from harness.page import CACHE, blocks
from harness.size import sized
from harness.stats import spread
from harness.tables import head, row
from harness.uploads import Setting
from merges import ALPHAS
from rivals import GIANT, regmean_plus_plus
from torch import Tensor

from flwr_fisher.client import LocalSGD
from flwr_fisher.curvature import Curvature, FisherOptions, Kronecker, fisher, gradient
from flwr_fisher.params import Params, add, double, rounded, scale, weighted_mean
from flwr_fisher.rounds.quasi_newton import DAMPING, Descent, Inverse, damped_inverse
from flwr_fisher.strategies import FAGH, FedAvg, Refinement
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import (
    arrays_to_tensors,
    checked_to_curvature,
    curvature_to_tensors,
)
from studies.refinement.runs import FEDAVG, FEDFISHER, Clients, refined

FAGH_RHO = 0.1
LAYERS, OFF_DIAGONALS, EXAMPLES = "RegMean++, then a head", (0.95, 0.1), 1024
COUNTS = sized((2, 4, 9), (2,))  # of requests, after which a model is scored
# By method and value: what it scores after each of these.
Found = dict[str, dict[str, list[dict[str, float]]]]
Models = Iterator[Params]  # after each request
OURS = "L-BFGS from K-FAC (ours)"
GRIDS: Mapping[str, tuple[float, ...]] = {  # what is tried on validation examples
    OURS: (0.0,),
    "… a new K-FAC every second step": (0.0,),
    "L-BFGS from the inputs' factors (FOOF)": (0.1, 0.3, 1.0),
    "L-BFGS from the identity": (0.03, 0.1, 0.3),
    "K-FAC, lengths by Levenberg and Marquardt": (0.03, 0.1, 0.3),
    "inputs' factors (FOOF), the same": (0.3, 1.0, 3.0),
    "Adam on the server": (0.001, 0.003, 0.01),
    "FAGH": (0.05, 0.2, 0.5),
    "GIANT, 5 iterations": (0.3, 1.0),
    "FedAvg, rounds of one epoch": (0.003, 0.01, 0.03),
}
COSTS = {  # a request's passes and numbers, as multiples of the model's
    OURS: ("1", "1"),
    "… a new K-FAC every second step": ("1", "1, and half a K-FAC"),
    "FAGH": ("2", "2"),
    "GIANT, 5 iterations": ("5.5", "1"),
}
GRIDS = sized(GRIDS, {name: grid[:1] for name, grid in GRIDS.items()})


class Pooled:
    """The mean loss over all clients' data, which is what their sums are of."""

    def __init__(self, clients: Clients, params: Params) -> None:
        self.clients, self.params = clients, params
        self.batches = [*chain.from_iterable(clients.loaders)]

    def gradient(self, params: Params) -> tuple[dict[str, Tensor], float]:
        """Return the gradient and the loss of a model."""
        self.clients.model.load_state_dict(dict(params), strict=False)
        slope, loss = gradient(self.clients.model, self.batches)
        return double(slope), loss

    def kfac(self, params: Params) -> Curvature:
        """Return the K-FAC that a step is asked for, of all clients."""
        model = self.clients.model
        model.load_state_dict(dict(params), strict=False)
        options = FisherOptions(expectation="empirical", examples=1000)
        pairs = zip(self.clients.loaders, self.clients.sizes, strict=True)
        every = [
            fisher(model, loader, options=options, num_examples=size, seed=seed)
            for seed, (loader, size) in enumerate(pairs)
        ]
        factors = [double(curvature_to_tensors(own)) for own in every]
        mean = weighted_mean(factors, self.clients.sizes)
        return checked_to_curvature(mean, double(params))

    def moved(self, params: Params, step: Params) -> dict[str, Tensor]:
        """Return a model some way from another."""
        there = add(double(params, step), step)
        return {
            k: rounded(there[k], v.dtype) if k in there else v
            for k, v in params.items()
        }


def descent(
    pooled: Pooled, inverse: Inverse, first: float | None = None, renewed: bool = False
) -> Models:
    """Yield the models of the shipped descent, from another metric."""
    x = pooled.params
    slope, loss = pooled.gradient(x)
    begun = Descent.begin(slope, loss, inverse)
    if first is not None:
        factor = first / begun.gamma
        begun = Descent(slope, loss, scale(begun.step, factor), first)
    yield x  # the first gradient is at the head's model
    for request in count(1):
        tried = pooled.moved(x, begun.step)
        slope, loss = pooled.gradient(tried)
        x = tried if begun.is_better(loss) else x
        if renewed and request % 2 == 0:
            inverse = damped_inverse(pooled.kfac(x))
        begun = begun.after(slope, loss, inverse)
        yield x


def marquardt(pooled: Pooled, kfac: Curvature, length: float, inputs: bool) -> Models:
    """Yield the models of steps by one metric; damping and length by the losses."""
    x, damping = pooled.params, DAMPING
    slope, loss = pooled.gradient(x)
    yield x  # the first gradient is at the head's model
    while True:
        inverse = (inputs_inverse if inputs else damped_inverse)(kfac, damping)
        tried = pooled.moved(x, scale(inverse(slope), -length))
        there, new = pooled.gradient(tried)
        if new <= loss:
            x, slope, loss, length = tried, there, new, 1.5 * length
        else:
            length, damping = length / 3, 3 * damping
        yield x


def inputs_inverse(kfac: Curvature, damping: float = DAMPING) -> Inverse:
    """Return the product with the inverse of the inputs' factors alone (FOOF).

    (Benzing, ICML 2022.) The damping is a share of a factor's mean eigenvalue.
    """
    blocks = []
    for block in kfac.blocks():
        if isinstance(block, Kronecker):
            eye = torch.eye(block.A.shape[-1], dtype=block.A.dtype)
            unit = block.A.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
            G = torch.eye(block.G.shape[-1], dtype=block.G.dtype).expand_as(block.G)
            block = block.with_factors(block.A + damping * unit * eye, G)
        blocks.append((list(block.shapes), block.solver(0.0)))

    def inverse(vector: Params) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for names, solve in blocks:
            found |= solve({name: vector[name] for name in names})
        return found

    return inverse


def adam(pooled: Pooled, rate: float) -> Models:
    """Yield the models of Adam on the gradients of all data."""
    params = {k: v.clone().requires_grad_() for k, v in pooled.params.items()}
    optimizer = torch.optim.Adam(params.values(), lr=rate)
    while True:
        slope, _ = pooled.gradient({k: v.detach() for k, v in params.items()})
        for name, value in params.items():
            value.grad = slope[name].to(value.dtype) if name in slope else None
        optimizer.step()
        yield {k: v.detach().clone() for k, v in params.items()}


def federated(pooled: Pooled, strategy: Any, epoch: LocalSGD | None = None) -> Models:
    """Yield the models of a strategy's rounds."""
    found: list[Params] = []
    app = pooled.clients.app(lambda _: epoch, [])
    strategy.start(
        LocalGrid(app, len(pooled.clients.loaders)),
        ArrayRecord(dict(pooled.params)),
        num_rounds=COUNTS[-1],
        evaluate_fn=lambda _, arrays: found.append(arrays_to_tensors(arrays)),
    )
    yield from found[1:]


def models(pooled: Pooled, name: str, value: float) -> Models:
    """Yield a method's models, one for each request."""
    quiet: dict[str, Any] = {"fraction_evaluate": 0.0}
    match name:
        case "Adam on the server":
            return adam(pooled, value)
        case "FAGH":
            lr = FAGH_RHO * value
            return federated(pooled, FAGH(lr=lr, rho=FAGH_RHO, probe="random", **quiet))
        case "GIANT, 5 iterations":  # two requests a step
            strategy = GIANT(lr=value, iterations=5, **quiet)
            steps = [pooled.params, *federated(pooled, strategy)]
            return (steps[request // 2] for request in count(1))
        case "FedAvg, rounds of one epoch":
            return federated(pooled, FedAvg(**quiet), LocalSGD(lr=value))
        case "L-BFGS from the identity":
            return descent(pooled, dict, value)
    kfac = pooled.kfac(pooled.params)
    match name:
        case "K-FAC, lengths by Levenberg and Marquardt":
            return marquardt(pooled, kfac, value, inputs=False)
        case "inputs' factors (FOOF), the same":
            return marquardt(pooled, kfac, value, inputs=True)
        case "L-BFGS from the inputs' factors (FOOF)":
            return descent(pooled, inputs_inverse(kfac), value)
    return descent(pooled, damped_inverse(kfac), renewed=name != OURS)


def layer_by_layer(clients: Clients, off_diagonal: float) -> list[dict[str, float]]:
    """Return what RegMean++ scores, and with a head after it.

    Each layer is a request, then two for the head.
    """
    some = [[*islice(loader, EXAMPLES // 256)] for loader in clients.loaders]
    merged = regmean_plus_plus(
        clients.model, clients.trained, some, clients.sizes, off_diagonal=off_diagonal
    )
    same = replace(clients, trained=[merged] * len(clients.trained))
    _, (headed,), _ = refined(same, FEDAVG, Refinement())
    return [clients.score(merged), clients.score(headed)]


def of_setting(
    setting: Setting, data_dir: Path, chosen: Mapping[str, float] | None = None
) -> Found:
    """Return what each method scores after each of `COUNTS`, for each of its values.

    With `chosen` for these alone.
    """
    torch.set_num_threads(1)
    clients = Clients.of_setting(setting, data_dir)
    _, (begun,), _ = refined(clients, FEDFISHER, Refinement())
    pooled = Pooled(clients, begun)
    grid = OFF_DIAGONALS if chosen is None else [chosen[LAYERS]]
    found: Found = {LAYERS: {str(a): layer_by_layer(clients, a) for a in grid}}
    for name, grid in GRIDS.items():
        for value in grid if chosen is None else [chosen[name]]:
            every = [*islice(models(pooled, name, value), COUNTS[-1])]
            scores = [clients.score(every[count - 1]) for count in COUNTS]
            found.setdefault(name, {})[str(value)] = scores
    return found


def compared(data_dir: Path) -> tuple[Found, list[Found]]:
    """Return what is found on validation examples, and on test splits with the best."""
    folder, made = CACHE / "refinement" / "steps", partial(Setting, "mnist", "lenet")
    held = made(0.1, 101, budget=True, hold_out=True, validation=5000)
    tried = kept(folder / "validation.json", lambda: of_setting(held, data_dir))
    best = {
        name: float(max(own, key=partial(_mean, own))) for name, own in tried.items()
    }
    found = []
    for alpha in ALPHAS:
        split = made(alpha, 0, budget=True)
        find = partial(of_setting, split, data_dir, best)
        found.append(kept(folder / f"{split.folder.name}.json", find))
    return tried, found


def _mean(values: Mapping[str, list[dict[str, float]]], value: str) -> float:
    return fmean(scores["accuracy"] for scores in values[value])


def table(tried: Found, found: Sequence[Found]) -> list[str]:
    """Return a row for each method."""
    titles = [f"{count} requests" for count in COUNTS]
    chosen = "chosen, of"
    lines = head("test accuracy, %", *titles, chosen, "passes a request", "numbers")
    for name, grid in tried.items():
        if name == LAYERS:
            continue
        own = [next(iter(split[name].values())) for split in found]
        (value,) = found[0][name]
        cells = [
            spread([split[index]["accuracy"] for split in own])
            for index in range(len(COUNTS))
        ]
        of = f"{value}, of {', '.join(grid)}" if len(grid) > 1 else ""
        lines.append(row(name, *cells, of, *COSTS.get(name, ("1", "1"))))
    layers = [next(iter(split[LAYERS].values())) for split in found]
    before, after = (spread([own[i]["accuracy"] for own in layers]) for i in (0, 1))
    said = (
        f"RegMean++, a request for each of five layers: {before}; a head then: {after}."
    )
    return blocks(lines, said)
