"""One federation of a network with batch norm: train, merge in every way, score."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.size import sized
from rivals.regmean import regmean
from tasks import load_dataset, partition_indices
from torch import Tensor, nn

from flwr_fisher.client import LocalSGD
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.merge import LocalPosterior, fedfisher, fisher_merge, refresh_norms
from flwr_fisher.params import Params, shared_state, weighted_mean
from flwr_fisher.report import accuracies, ensemble_accuracy
from flwr_fisher.tangent.frozen_head import HeadSums, closed_form_head, head_sums
from flwr_fisher.wire import Codec, FisherUpload, resolve
from studies.pretrained.networks import NETWORKS, make

BATCH, HELD, RIDGE = 64, sized(1000, 100), 1e-3
FEW = 1536  # images of all clients, by which a choice's norms are refreshed
CONSTANTS: tuple[dict[str, float], ...] = (
    {},
    {"shrink": 0.3},
    {"shrink": 0.6},
    {"shrink": 0.8},
    {"shrink": 1.0},
    {"anchor": 0.3},
    {"anchor": 1.0},
    {"iterations": 1},
    {"iterations": 10},
    {"robust": 0.0},
    {"balance": 0.0},
    {"damping": 0.1},
    {"trust": 0.5},
)


@dataclass(frozen=True)
class Federation:
    """Everything that determines a cell of the tables.

    Seeds from 100 on are for choices: they are scored on images that no client has,
    and no test image is looked at.
    """

    network: str
    alpha: float
    seed: int
    clients: int = 5
    epochs: int = 3
    lr: float = 0.01
    rounds: int = 1
    images: int = 20_000  # of all clients
    scored: int = 5000  # test images, at most

    @property
    def chooses(self) -> bool:
        """Whether it is there for a choice, and is scored on held-out images."""
        return self.seed >= 100

    @property
    def name(self) -> str:
        """What its numbers are called."""
        return "-".join(f"{value}" for value in asdict(self).values())


class Images:
    """A client's images, in batches, shuffled anew in each epoch; on one device."""

    def __init__(
        self, x: Tensor, y: Tensor, side: int, generator: torch.Generator | None = None
    ) -> None:
        self.x, self.y, self.side, self.generator = x, y, side, generator

    def __len__(self) -> int:
        return -(-len(self.y) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.y))
        if self.generator is not None:
            order = torch.randperm(len(self.y), generator=self.generator)
        for rows in order.split(BATCH):
            if len(rows) > 1:  # batch norm takes no single image in train mode
                x = self.x[rows.to(self.x.device)].float().sub(127).div(128)
                if x.shape[-1] != self.side:
                    x = F.interpolate(x, size=self.side, mode="bilinear")
                yield x, self.y[rows.to(self.y.device)]


@dataclass
class Data:
    """A data set as bytes, where it is computed."""

    network: str
    folder: Path
    device: torch.device
    cache: Path  # of the splits

    @cached_property
    def splits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The training and the test images."""
        loaded = load_dataset(NETWORKS[self.network].dataset, self.folder)
        every = {"train": loaded.train, "test": loaded.test}
        return {
            name: (one.data.to(self.device), one.targets.to(self.device))
            for name, one in every.items()
        }

    def parts(self, federation: Federation) -> tuple[list[list[int]], list[int]]:
        """Return each client's positions, and those that are held out of the rest."""
        names = ("alpha", "seed", "clients", "images")
        key = "-".join(f"{getattr(federation, name)}" for name in names)
        key = f"{NETWORKS[self.network].folder}-{key}"
        path = self.cache / f"split-{key}.json"
        if not path.exists():
            _, y = self.splits["train"]
            generator = torch.Generator().manual_seed(federation.seed)
            order = torch.randperm(len(y), generator=generator).tolist()
            held, rest = order[:HELD], order[HELD : HELD + federation.images]
            labels = y.cpu()[rest]
            own = partition_indices(
                labels,
                "dirichlet-client",
                num_partitions=federation.clients,
                seed=federation.seed,
                alpha=federation.alpha,
            )
            made = [[rest[i] for i in part] for part in own], held
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(made))
        parts, held = json.loads(path.read_text())
        return parts, held


@dataclass
class Cell:
    """A federation under way."""

    federation: Federation
    data: Data
    fishers: bool = True  # or FedAvg alone
    found: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Return accuracies in percent, by method and statistics."""
        torch.manual_seed(self.federation.seed)
        parts, held = self.data.parts(self.federation)
        x, y = self.data.splits["train"]
        name = self.federation.network
        self.side, self.model = NETWORKS[name].side, make(name)
        # Depthwise convolutions are a third faster so, on a CPU as well.
        self.model.to(self.data.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loaders = [
            Images(x[p], y[p], self.side, torch.Generator().manual_seed(client))
            for client, p in enumerate(torch.tensor(part) for part in parts)
        ]
        self.weights = [len(part) for part in parts]
        where = torch.tensor(held)
        scored = (x[where], y[where])
        if not self.federation.chooses:
            scored = self._tested()
        self.test = Images(*scored, self.side)
        self.found["sizes"] = self.weights
        start = self._state()
        if not self.fishers:
            clients = [self._trained(c, start) for c in range(len(parts))]
            self._merged("fedavg", weighted_mean(clients, self.weights))
        elif self.federation.rounds == 1:
            self._one_round(start)
        else:
            self._rounds(start)
        return self.found

    def _state(self) -> dict[str, Tensor]:
        """Return copies of the model's parameters and buffers."""
        return {k: v.clone() for k, v in shared_state(self.model).items()}

    def _tested(self) -> tuple[Tensor, Tensor]:
        """Return the test images, or as many of them as are scored, drawn once."""
        x, y = self.data.splits["test"]
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        chosen = order[: self.federation.scored]
        return x[chosen.to(x.device)], y[chosen.to(y.device)]

    def _trained(self, client: int, start: Params) -> dict[str, Tensor]:
        self.model.load_state_dict(dict(start), strict=False)
        torch.manual_seed(1000 * self.federation.seed + client)
        train = LocalSGD(epochs=self.federation.epochs, lr=self.federation.lr)
        train(self.model, self.loaders[client], self.data.device, {})
        return self._state()

    def _posterior(self, client: int, params: Params, structure: str) -> LocalPosterior:
        """Return an upload as a strategy asks for it by default, not packed."""
        self.model.load_state_dict(dict(params), strict=False)
        count = self.weights[client]
        curvature = fisher(
            self.model,
            list(Images(*self._own(client), self.side)),
            structure,
            options=FisherOptions(),
            num_examples=count,
            seed=client,
        )
        return LocalPosterior(params, curvature, count)

    def _own(self, client: int) -> tuple[Tensor, Tensor]:
        return self.loaders[client].x, self.loaders[client].y

    def _one_round(self, start: Params) -> None:
        every = range(len(self.loaders))
        clients = [self._trained(c, start) for c in every]
        kfac = [self._posterior(c, clients[c], "kfac") for c in every]
        if self.federation.chooses:
            return self._choices(clients, kfac)
        diagonal = [self._posterior(c, clients[c], "diagonal") for c in every]
        self._merged("fedavg", weighted_mean(clients, self.weights))
        self._merged("regmean", regmean(kfac))
        self._merged("fishermerge", fisher_merge(diagonal))
        self._by_fisher("diagonal", diagonal)
        self._by_fisher("kfac", kfac)
        self._by_fisher("kfac, packed", [self._packed(own) for own in kfac])
        named = {f"{client}": params for client, params in enumerate(clients)}
        alone = accuracies(self.model, named, self.test)
        self.found["best client"] = 100 * max(alone.values())
        weights = [float(n) for n in self.weights]
        ensemble = ensemble_accuracy(self.model, clients, weights, self.test)
        self.found["ensemble"] = 100 * ensemble
        self._head(start)

    def _choices(
        self, clients: Sequence[Params], kfac: Sequence[LocalPosterior]
    ) -> None:
        """Score the default's constants, by norms refreshed on a few images."""
        x, y = (torch.cat([getattr(own, k) for own in self.loaders]) for k in "xy")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        some = Images(x[order[:FEW]], y[order[:FEW]], self.side)
        merged = {"fedavg": weighted_mean(clients, self.weights)}
        for options in CONSTANTS:
            name = ", ".join(f"{k} {v:g}" for k, v in options.items())
            merged[name or "kfac"] = fedfisher(kfac, **options).params
        for name, params in merged.items():
            self.model.load_state_dict(dict(params), strict=False)
            refresh_norms(self.model, some)
            self.found[name] = {"refresh": self._score(self._state())}

    def _packed(self, own: LocalPosterior) -> LocalPosterior:
        """Return an upload as it arrives by the default codec."""
        like = {k: v.cpu() for k, v in own.params.items()}
        codec = resolve(Codec("auto"), like)
        sent = FisherUpload(like, own.curvature.to("cpu")).to_arrays(codec)
        came = FisherUpload.from_arrays(sent, like, codec, structure="kfac")
        there = came.posterior(own.num_examples)
        device = self.data.device
        params = {k: v.to(device) for k, v in there.params.items()}
        return LocalPosterior(params, there.curvature.to(device), own.num_examples)

    def _rounds(self, start: Params) -> None:
        """Do rounds of FedAvg and of FedFisher, with refreshed statistics."""
        for method in ("fedavg", "kfac"):
            params, curve = start, []
            for number in range(self.federation.rounds):
                clients = [self._trained(c, params) for c in range(len(self.loaders))]
                if method == "fedavg":
                    merged = weighted_mean(clients, self.weights)
                else:
                    own = [
                        self._posterior(c, each, "kfac")
                        for c, each in enumerate(clients)
                    ]
                    trust = {"trust": 1.0} if number else {}
                    merged = fedfisher(own, device=self.data.device, **trust).params
                params = self._refreshed(merged)
                curve.append(self._score(params))
            self.found[method] = curve

    def _by_fisher(
        self, name: str, own: Sequence[LocalPosterior], **options: Any
    ) -> None:
        merged = fedfisher(own, device=self.data.device, **options)
        self._merged(name, merged.params)

    def _merged(self, name: str, params: Params) -> None:
        """Score a merged model, by averaged and by refreshed statistics."""
        self.found[name] = {
            "average": self._score(params),
            "refresh": self._score(self._refreshed(params)),
        }

    def _refreshed(self, params: Params) -> dict[str, Tensor]:
        self.model.load_state_dict(dict(params), strict=False)
        refresh_norms(self.model, chain(*self.loaders))
        return self._state()

    def _score(self, params: Params) -> float:
        return 100 * accuracies(self.model, {"x": params}, self.test)["x"]

    def _head(self, start: Params) -> None:
        """Score AFL: the closed-form head on the network as it was pre-trained."""
        self.model.load_state_dict(dict(start), strict=False)
        linear = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        sums = [head_sums(self.model, own, linear[-1]) for own in self.loaders]
        weight, bias = closed_form_head(HeadSums.total(sums), bias=True, ridge=RIDGE)
        solved = {f"{linear[-1]}.weight": weight, f"{linear[-1]}.bias": bias}
        own = {k: v.to(start[k]) for k, v in solved.items()}
        self.found["afl"] = self._score({**start, **own})
