"""What a server can invert from uploads: FedFisher's attack (Appendix E, Table 6).

    python benchmarks/inversion.py --data-dir DIR

Client 1 has all of MNIST's images of the digit 3 and 1000 others; nine clients share
the rest, Dirichlet with alpha = 0.1. The server holds 5000 images of clients 2 to 10,
none of them a 3, and trains a generator on them; then it looks for codes whose images
the model that it has seen takes for a 3 (Zhang et al., CVPR 2020), and where it has
seen a curvature, for images that have it: the squared difference over all entries, of
factors over their traces. A judge, a larger CNN with initial weights of its own,
trained on all of MNIST's training images, says of 100 images how many are a 3, and how
many are one for sure: with at least the probability of 95 % of the test images of a 3.
Nothing was tuned on it: the weight of the class's loss is Zhang et al.'s, and the
curvature's the same.

*Parts* are what `FedFisherOneShot` uploads by default: the client's own model and
K-FAC. Of *sums* the server has the mean of the models, and the sum over all clients of
their Fishers: diagonals, or the layers' partial traces (``aggregate="sums"`` under a
secure sum). *Sums for a head* (``refine=``) give the mean of the last layer's inputs
over the images of a 3, at the merged model: images are sought whose mean has its
direction. Only client 1 has a 3, so that a sum over clients gives the same.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from harness.page import (
    CACHE,
    RESULTS,
    blocks,
    command_line,
    mnist_folder,
    opening,
    write_page,
)
from harness.plots import save
from harness.size import sized
from harness.tables import head, row
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from studies.inversion.attack import Known, invert, layers_of
from studies.inversion.gan import LATENT, trained_gan
from tasks import load_dataset, make_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import LocalSGD
from flwr_fisher.curvature import Curvature, FisherOptions, Kronecker, fisher
from flwr_fisher.merge import (
    LocalPosterior,
    balanced,
    fedavg,
    fedfisher,
    partial_traces,
)
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.report import accuracies
from flwr_fisher.tangent import head_sums
from flwr_fisher.wire import curvature_to_tensors

DIGIT, ALPHA = 3, 0.1
OTHERS, AUXILIARY = sized((1000, 5000), (100, 300))
NOTHING = "nothing but its own images"
MERGED = "FedFisher's merged model, which any server has"
CASES = {
    NOTHING: None,
    "client 1's model (OTFusion, PFNM, DENSE)": "78.4 ± 3.0",
    "client 1's model and K-FAC (parts, the default)": None,
    "the mean of the models (FedAvg)": "5.0 ± 1.0",
    "the mean, and client 1's K-FAC": "9.6 ± 2.9",
    "the mean, and the sum of diagonals": None,
    "the mean, and the sum of K-FACs' partial traces": None,
    MERGED: None,
    "the merged model, and the sums for a head": None,
}


def in_one(images: Tensor) -> Tensor:
    """Return images as ``[n, 1, 28, 28]`` in [0, 1], as the generator's are."""
    return images.reshape(-1, 1, 28, 28).float() / 255


def split(targets: Tensor, seed: int) -> list[Tensor]:
    """Return the clients' images: client 1's, and nine shares of the rest."""
    generator = torch.Generator().manual_seed(seed)
    threes = (targets == DIGIT).nonzero().flatten()
    rest = (targets != DIGIT).nonzero().flatten()
    rest = rest[torch.randperm(len(rest), generator=generator)]
    parts = [[torch.cat([threes, rest[:OTHERS]])], *[[] for _ in range(9)]]
    for digit in targets.unique().tolist():
        own = rest[OTHERS:][targets[rest[OTHERS:]] == digit]
        torch.manual_seed(1000 * seed + digit)
        shares = torch.distributions.Dirichlet(torch.full((9,), ALPHA)).sample()
        ends = (shares.cumsum(0) * len(own)).long().tolist()
        for client, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            parts[client].append(own[begin:end])
    return [torch.cat(own) for own in parts]


def trained(
    images: Tensor,
    targets: Tensor,
    epochs: int,
    seed: int,
    name: str = "lenet",
    start: int = 0,
) -> nn.Module:
    """Train a network on some images, from the weights of a seed."""
    torch.manual_seed(seed)
    model = make_model(name, shape=(1, 28, 28), num_classes=10, seed=start)
    data = TensorDataset(images, targets)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    train = LocalSGD(epochs=epochs, lr=0.01, momentum=0.9)
    train(model, loader, torch.device("cpu"), {})
    return model


def curvature_of(model: nn.Module, images: Tensor, structure: str) -> Curvature:
    """Return what `FedFisherOneShot` asks a client for, of 1000 of its examples."""
    return fisher(
        model,
        DataLoader(TensorDataset(images), batch_size=64),
        structure,
        options=FisherOptions(examples=1000),
        num_examples=len(images),
    )


def factors(curvature: Curvature) -> dict[str, dict[str, Tensor]]:
    """Return a K-FAC's factors by kind and layer."""
    found: dict[str, dict[str, Tensor]] = {"A": {}, "G": {}}
    for block in curvature.made().blocks():
        layer = block.made()
        assert isinstance(layer, Kronecker)
        name = layer.weight.removesuffix(".weight")
        found["A"][name], found["G"][name] = layer.A[0], layer.G[0]
    return found


def summed(curvatures: Sequence[Curvature], weights: list[float]) -> Any:
    """Return the sum over clients of what they add, by layer."""
    parts = [
        curvature_to_tensors(
            partial_traces(balanced(F, shrink=0.3, damping=0.0, balance=1.0))
        )
        for F in curvatures
    ]
    total = weighted_mean(parts, weights)
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in total.items():
        if key.startswith("curvature/diagonal/"):
            name = key.removeprefix("curvature/diagonal/").removesuffix(".weight")
            found.setdefault("diagonal", {})[name] = value.flatten(1)
        else:
            name, _, kind = key.removeprefix("curvature/kfac/").rpartition("/")
            found.setdefault(kind, {})[name.removesuffix(".weight")] = value[0]
    return found


def class_mean(
    model: nn.Module, images: Tensor, targets: Tensor
) -> dict[str, dict[str, Tensor]]:
    """Return the mean features of the digit, from the sums for a head."""
    name = list(layers_of(model))[-1]
    batches = zip(images.split(512), targets.split(512), strict=True)
    sums = head_sums(model, list(batches), name)
    mean = sums.cross[:-1, DIGIT] / sums.cross[-1, DIGIT]
    return {"mean": {name: mean.float()}}


def seen(
    images: Tensor, targets: Tensor, clients: list[Tensor], seed: int, epochs: int
):
    """Train the clients; return what a server knows in each case."""
    models = [
        trained(images[own], targets[own], epochs, 100 * seed + i)
        for i, own in enumerate(clients)
    ]
    kfac = [
        curvature_of(m, images[o], "kfac") for m, o in zip(models, clients, strict=True)
    ]
    diagonal = [
        curvature_of(m, images[o], "diagonal")
        for m, o in zip(models, clients, strict=True)
    ]
    weights = [float(len(own)) for own in clients]
    posteriors = [
        LocalPosterior(shared_state(m), F, n)
        for m, F, n in zip(models, kfac, weights, strict=True)
    ]

    def model(params: Any) -> nn.Module:
        made = make_model("lenet", shape=(1, 28, 28), num_classes=10, seed=0)
        made.load_state_dict(dict(params))
        return made

    own, average = models[0], model(fedavg(posteriors))
    assert list(factors(kfac[0])["A"]) == list(layers_of(own))
    names = list(CASES)[1:]
    known = [
        Known(own, {}),
        Known(own, factors(kfac[0])),
        Known(average, {}),
        Known(average, factors(kfac[0])),
        Known(average, summed(diagonal, weights)),
        Known(average, summed(kfac, weights)),
        Known(merged := model(fedfisher(posteriors).params), {}),
        Known(merged, class_mean(merged, images, targets)),
    ]
    return dict(zip(names, known, strict=True))


def draw(pictures: dict[str, Tensor], path: Path) -> None:
    """Draw ten inverted images of each case."""
    figure = Figure(figsize=(7, 0.95 * len(pictures)), dpi=120, layout="constrained")
    rows = figure.subplots(len(pictures), 1)
    for axes, (name, images) in zip(rows, pictures.items(), strict=True):
        axes.imshow(torch.cat(list(images[:10, 0]), 1), cmap="gray")
        axes.set_title(name, fontsize="small", loc="left")
        axes.axis("off")
    save(figure, path)


def inverted(
    scale: Tensor, targets: Tensor, seed: int, epochs: int
) -> dict[str, Tensor]:
    """Return a hundred images in each case, of one seed; those in the cache, if any."""
    path = CACHE / "inversion" / f"seed-{seed}-epochs-{epochs}.safetensors"
    if not path.exists():
        clients = split(targets, seed)
        known = seen(scale, targets, clients, seed, epochs)
        torch.manual_seed(seed)
        rest = torch.cat(clients[1:])
        held = rest[torch.randperm(len(rest))[:AUXILIARY]]
        G, D = trained_gan(scale[held])
        pictures = {NOTHING: G(torch.randn(100, LATENT)).detach()}
        for name, one in known.items():
            torch.manual_seed(1000 + seed)
            pictures[name] = invert(one, G, D, DIGIT)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: made.contiguous() for name, made in pictures.items()}, path)
    found = load_file(path)
    return {name: found[name] for name in CASES}


def shown(rates: Sequence[float]) -> str:
    """Return seeds' rates as their mean and standard deviation."""
    if len(rates) == 1:
        return f"{rates[0]:.1f}"
    return f"{mean(rates):.1f} ± {stdev(rates):.1f}"


def main() -> None:
    """Write the page."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 2))
    parser.add_argument("--epochs", type=int, default=sized(10, 1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("mnist", mnist_folder(options))
    scale, targets = in_one(data.train.data), data.train.targets
    judge = trained(scale, targets, 3, seed=12345, name="cnn", start=1)
    test = [(in_one(data.test.data), data.test.targets)]
    skill = accuracies(judge, {"judge": shared_state(judge)}, test)["judge"]

    @torch.no_grad()
    def certainty(images: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the judge takes each for the digit, and its probability."""
        logits = judge(images)
        return logits.argmax(1) == DIGIT, logits.softmax(1)[:, DIGIT]

    real = certainty(test[0][0][test[0][1] == DIGIT])[1]
    sure = float(real.quantile(0.05))
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    certain: dict[str, list[float]] = {name: [] for name in CASES}
    for seed in range(options.seeds):
        pictures = inverted(scale, targets, seed, options.epochs)
        for name, made in pictures.items():
            hits, probability = certainty(made)
            rates[name].append(100 * float(hits.double().mean()))
            certain[name].append(100 * float((probability >= sure).double().mean()))
            print(seed, name, rates[name][-1], certain[name][-1], flush=True)
        if seed == 0:
            draw(pictures, RESULTS / "inversion.png")
    lines = head("the server has", "success, %", "for sure, %", "the paper's")
    for name, paper in CASES.items():
        lines.append(row(name, shown(rates[name]), shown(certain[name]), paper or ""))
    about = (
        f"The judge is right on {100 * skill:.1f} % of the test images, and sure of a "
        f"3 from a probability of {sure:.4f} on."
    )
    page = blocks(
        opening("What uploads reveal: model inversion", __doc__),
        lines,
        f"{options.seeds} seeds, ± their standard deviation; {options.epochs} local "
        f"epochs. {about}",
        'The judge has ten answers and none for "no digit": of an empty or broken '
        "image it may say 3. Where it is sure, fewer are; the picture shows the rest.",
        "![Inverted images](inversion.png)",
    )
    write_page(
        "inversion",
        page,
        {"rates": rates, "certain": certain, "sure": sure, "judge": skill},
    )


if __name__ == "__main__":
    main()
