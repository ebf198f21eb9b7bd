"""Two more pre-trained models: a vision transformer, and one of texts with adapters."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness.clients import CHOICE, CPU, Shuffled, in_batches
from harness.page import CACHE
from harness.size import sized
from tasks import load_dataset, partition_indices
from torch import Tensor, nn

from flwr_fisher.client import LocalSGD
from flwr_fisher.params import Params
from studies.lora import runs
from studies.lora.model import LAYERS, WIDTH, Block, LoRA, Transformer
from studies.pretrained.published import Problem
from studies.unseen.data import TEXTS, numbered, rows_of

PUBLIC, PRIVATE = "20newsgroups", "reuters-r8"
VOCABULARY, LENGTH, RANK, BATCH = 4000, 64, 8, 32
CLIENTS, EPOCHS = 5, sized(5, 1)
SHARED_OUT, SCORED = sized((1500, 3000), (100, 100))  # texts
Examples = tuple[Tensor, Tensor]


def _adam(rate: float) -> Callable[[int], LocalSGD]:
    optimizer = partial(torch.optim.AdamW, lr=rate)
    return lambda epochs: LocalSGD(epochs=epochs, optimizer=optimizer)


def of_digits(alpha: float, seed: int, rate: float, data_dir: Path) -> Problem:
    """Return clients with turned digits, and a model that knows upright ones.

    All of its parameters are trained; its last layer is new.
    """
    data, base = load_dataset("mnist", data_dir), dict(runs.pretrained_in(data_dir))
    head = {k: torch.zeros_like(v) for k, v in base.items() if k.startswith("head.")}

    def model() -> nn.Module:
        made = Transformer()
        made.load_state_dict({**base, **head})
        return made

    shares = runs.shares(data, alpha, seed)
    return Problem(
        model,
        shares.__getitem__,
        len(shares),
        runs.scored(data, seed),
        _adam(rate),
        EPOCHS,
    )


class Reader(nn.Module):
    """Classes of texts: two blocks of attention over words, and their mean."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map words ``[b, 64]``, of which 0 is none, to logits."""
        y, there = self.words(x) + self.positions, (x > 0).unsqueeze(2)
        for block in self.blocks:
            y = block(y)
        mean = (self.norm(y) * there).sum(1) / there.sum(1).clamp_min(1)
        logits: Tensor = self.head(mean)
        return logits


def _texts(folder: Path, name: str, vocabulary: dict[str, int]) -> Examples:
    """Return texts as their first words' numbers, and their classes."""
    labels, texts = zip(*rows_of(folder, name), strict=True)
    if not vocabulary:  # of the public texts
        counts = Counter(word for text in texts for word in text.split())
        common = counts.most_common(VOCABULARY - 2)
        vocabulary.update({word: n for n, (word, _) in enumerate(common, 2)})
    x = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(x, texts, strict=True):
        words = [vocabulary.get(word, 1) for word in text.split()[:LENGTH]]
        row[: len(words)] = torch.tensor(words, dtype=torch.int64)
    return x, numbered(labels)


def _read(data_dir: Path) -> tuple[Params, Examples]:
    """Return a model of the public texts, and the private texts."""
    path, folder = CACHE / "pretrained" / "reader.pt", data_dir / TEXTS
    if not path.exists():
        vocabulary: dict[str, int] = {}
        x, y = _texts(folder, PUBLIC, vocabulary)
        private = _texts(folder, PRIVATE, vocabulary)
        torch.manual_seed(0)
        model, most = Reader(int(y.max()) + 1), sized(len(y), 200)
        train = LocalSGD(
            epochs=sized(8, 1), optimizer=partial(torch.optim.AdamW, lr=1e-3)
        )
        loss = train(model, Shuffled(x[:most], y[:most], BATCH), CPU, {})
        print("the public texts:", loss, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save((model.state_dict(), private), path)
    found: tuple[Params, Examples] = torch.load(path)
    return found


def of_texts(alpha: float, seed: int, rate: float, data_dir: Path) -> Problem:
    """Return clients with news of Reuters, and a model that knows newsgroups.

    It is frozen, and has adapters (LoRA), of which the second factors are trained.
    """
    base, (x, y) = _read(data_dir)
    body = {k: v for k, v in base.items() if not k.startswith("head.")}

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = Reader(int(y.max()) + 1)
            made.load_state_dict(body, strict=False)
            made.requires_grad_(False)
            made.head.requires_grad_(True)
            for block in made.blocks:
                for name in LAYERS:
                    adapter = LoRA(getattr(block, name), RANK)
                    adapter.A.requires_grad_(False)
                    setattr(block, name, adapter)
        return made

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held, rest = order[:SCORED], order[SCORED : SCORED + SHARED_OUT]
    if seed == CHOICE:
        held = order[-SCORED:]
    parts = partition_indices(
        y[rest], "dirichlet-client", num_partitions=CLIENTS, alpha=alpha, seed=seed
    )
    shares = [Shuffled(x[rest[part]], y[rest[part]], BATCH) for part in parts]
    return Problem(
        model,
        shares.__getitem__,
        len(shares),
        in_batches(x[held], y[held], 500),
        _adam(rate),
        EPOCHS,
    )
