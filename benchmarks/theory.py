"""FedFisher's theory on small networks: its error against width and local steps.

    python benchmarks/theory.py

FedFisher (AISTATS 2024), figure 1 and appendix D.1. Two clients have 100 points each on
the unit circle, whose labels are a linear function of a client's own. A ReLU network
of one hidden layer without biases, whose second layer, ±1/√m, is fixed, is trained by
full-batch gradient descent (rate 0.1, on half the mean squared error, in float64). Its
Fisher is the whole matrix, a sum over its points. The server takes gradient descent at
rate 0.001 from the clients' mean, as in the paper, which names no number of steps: here
they are 10³ to 10⁶, in closed form (from the eigenvectors of the summed Fisher).

*Error*: the mean squared error over both clients' points. The median over seeds, and
the quartiles: a few seeds' errors are above all others' sum, since where both clients
have points their labels contradict each other. So a *change* from one width or number
of steps to another is the geometric mean of the seeds' ratios; of ± s.e. its logarithm.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import exp, log
from multiprocessing import get_context
from statistics import mean, median, quantiles

import torch
from harness.jobs import quiet
from harness.page import (
    RESULTS,
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.plots import BEST, RUNS, dress, legend, powers_of_two, save
from harness.size import sized
from harness.stats import with_error
from harness.tables import head, row
from matplotlib.figure import Figure
from torch import Tensor, nn

CLIENTS, POINTS, RATE = 2, 100, 0.1
WIDTHS, STEPS = sized(((32, 64, 128, 256, 512, 1024), 2048), ((32, 64), 32))
WIDTH, LOCAL = sized((512, (32, 128, 512, 2048, 8192, 32768)), (32, (4, 8, 16, 32)))
SEEDS_OF_WIDTHS, SEEDS_OF_STEPS = sized((20, 10), (2, 2))
SERVER_RATE = 0.001
OURS = {f"FedFisher, 1e{power} steps": 10**power for power in (3, 4, 5, 6)}
LINES = dict(zip(("FedAvg", *OURS, "clients"), (*RUNS[1:], BEST), strict=False))
Errors = dict[str, float]
Data = tuple[Tensor, Tensor]


def client(generator: torch.Generator) -> Data:
    """Return a client's points and labels (appendix D.1)."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    slope, centre = normal(1) + normal(2), normal(1) + normal(2)
    scale = torch.tensor([1.0, 2**-0.6], dtype=torch.float64)  # deviations
    x = nn.functional.normalize(centre + scale * normal(POINTS, 2))
    return x, (x @ slope)[:, None]


class TwoLayers(nn.Module):
    """The network: only its first layer is trained."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.randn(width, 2, generator=generator, dtype=torch.float64)
        self.hidden = nn.Linear(2, width, bias=False)
        self.hidden.weight = nn.Parameter(weight * 0.5**0.5)
        signs = torch.randint(0, 2, (width, 1), generator=generator) * 2 - 1
        self.register_buffer("second", signs.double() / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, ``[n, 1]``."""
        return self.hidden(x).relu() @ self.second


def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean squared error."""
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def evaluate(width: int, steps: int, seed: int) -> Errors:
    """Train the clients; return the errors of the mean and of the merged model."""
    generator = torch.Generator().manual_seed(seed)
    data = [client(generator) for _ in range(CLIENTS)]
    model = TwoLayers(width, generator)
    start = model.hidden.weight.detach().clone()
    weights, fishers, own = [], [], []
    for x, y in data:
        model.hidden.weight.data.copy_(start)
        optimizer = torch.optim.SGD(model.hidden.parameters(), RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            ((model(x) - y).square().mean() / 2).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        weights.append(model.hidden.weight.detach().clone())
        fishers.append(summed_fisher(model, x))
        own.append(error(model, x, y))
    both = [torch.cat(each) for each in zip(*data, strict=True)]
    found, average = {"clients": mean(own)}, torch.stack(weights).mean(0)
    descended = descent(weights, fishers, average)
    for name, weight in {"FedAvg": average, **descended}.items():
        model.hidden.weight.data.copy_(weight)
        found[name] = error(model, *both)
    return found


def summed_fisher(model: TwoLayers, x: Tensor) -> Tensor:
    """Return the whole Fisher, a sum over points: J transposed times J.

    A row of J is the gradient of the only output, whose variance is 1, of one point.
    """
    active = (model.hidden(x) > 0) * model.second.T
    rows = (active.unsqueeze(2) * x.unsqueeze(1)).flatten(1).detach()
    return rows.T @ rows


def descent(
    weights: Sequence[Tensor], fishers: Sequence[Tensor], start: Tensor
) -> dict[str, Tensor]:
    """Return where gradient descent on the paper's objective is after its steps."""
    away = [(weight - start).flatten() for weight in weights]
    pull = sum(F @ d for F, d in zip(fishers, away, strict=True)) / CLIENTS
    values, vectors = torch.linalg.eigh(sum(fishers) / CLIENTS)
    shrunk = torch.log1p(-SERVER_RATE * values.clamp_min(0))
    found = {}
    for name, steps in OURS.items():
        # (1 - (1 - rate λ)^steps) / λ, whose limit at 0 is rate · steps
        gone = -torch.expm1(steps * shrunk) / values.clamp_min(1e-14)
        gone = torch.where(values > 1e-14, gone, SERVER_RATE * steps)
        found[name] = start + (vectors @ (gone * (vectors.T @ pull))).reshape(
            start.shape
        )
    return found


def measured(jobs: Sequence[tuple[int, int, int]], workers: int) -> list[Errors]:
    """Return each job's errors: width, local steps, seed."""
    with get_context("fork").Pool(workers, quiet) as pool:
        return pool.starmap(evaluate, jobs, chunksize=1)


Sweep = dict[str, list[Errors]]  # by width, or by local steps: every seed


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(title: str, sweep: Sweep) -> list[str]:
    """Return the lines of a sweep's table."""
    lines = head(title, *LINES)
    for key, seeds in sweep.items():
        found = (quartiles([each[name] for each in seeds]) for name in LINES)
        lines.append(row(key, *(f"{m:.2g} ({a:.2g}–{b:.2g})" for a, m, b in found)))
    return lines


def logarithms(sweep: Sweep, name: str, start: str, end: str) -> list[float]:
    """Return the logarithm of each seed's error at the end over that at the start."""
    pairs = zip(sweep[start], sweep[end], strict=True)
    return [log(last[name] / first[name]) for first, last in pairs]


def changes(sweep: Sweep, *keys: str) -> list[str]:
    """Return the lines that say how errors change from key to key."""
    steps = [*pairwise(keys)]
    lines = head("change", *(f"{a} → {b}" for a, b in steps))
    for name in OURS:
        found = [logarithms(sweep, name, *step) for step in steps]
        cells = (f"× {exp(mean(f)):.2f} (log {with_error(f, 2)})" for f in found)
        lines.append(row(name, *cells))
    return lines


def plot(sweeps: dict[str, Sweep]) -> None:
    """Draw medians over seeds against width and against local steps."""
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    for index, (title, sweep) in enumerate(sweeps.items()):
        axes = figure.add_subplot(1, 2, index + 1)
        x = [int(key) for key in sweep]
        for (name, color), marker in zip(LINES.items(), "osD^vP", strict=True):
            y = [median(each[name] for each in seeds) for seeds in sweep.values()]
            axes.plot(x, y, f"{marker}-", color=color, ms=5, label=name)
        axes.set_yscale("log")
        powers_of_two(axes, x)
        dress(axes, title, "mean squared error" if index == 0 else "")
    legend(figure, loc="outside lower center", ncols=3, frameon=False)
    counts = [len(next(iter(sweep.values()))) for sweep in sweeps.values()]
    title = f"Two clients with {POINTS} generated points each; medians of "
    title += " and ".join(map(str, counts)) + " seeds"
    save(figure, RESULTS / "theory.png", title)


def main() -> None:
    """Write the page, the plot and the numbers behind them."""
    options = with_workers(command_line(__doc__)).parse_args()
    run = partial(measured, workers=options.workers)
    numbers = numbers_of("theory")
    if not numbers:
        widths = run([(m, STEPS, s) for m in WIDTHS for s in range(SEEDS_OF_WIDTHS)])
        local = run([(WIDTH, k, s) for k in LOCAL for s in range(SEEDS_OF_STEPS)])
        numbers = {"width": by_key(WIDTHS, widths), "local steps": by_key(LOCAL, local)}
    page = blocks(
        opening("FedFisher's error against width and local steps", __doc__),
        "![errors](theory.png)",
        f"## Width, after {STEPS} local steps ({SEEDS_OF_WIDTHS} seeds)",
        table("width m", numbers["width"]),
        changes(numbers["width"], str(WIDTHS[0]), str(WIDTHS[-1])),
        f"## Local steps, at a width of {WIDTH} ({SEEDS_OF_STEPS} seeds)",
        table("local steps", numbers["local steps"]),
        changes(numbers["local steps"], *(str(LOCAL[i]) for i in (0, 3, -1))),
    )
    write_page("theory", page, numbers)
    plot(numbers)


def by_key(keys: Sequence[int], found: Sequence[Errors]) -> Sweep:
    """Return the errors by key, which all have as many seeds."""
    seeds = len(found) // len(keys)
    return {
        str(key): list(found[index * seeds : (index + 1) * seeds])
        for index, key in enumerate(keys)
    }


if __name__ == "__main__":
    main()
