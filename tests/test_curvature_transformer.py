"""The Fisher of a small decoder-only transformer, against loops over its tokens.

nngeometry is no oracle here: it has no label at every position, and gets neither
embeddings nor layer norms; the engine refuses them by name.
"""

from functools import partial

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from oracles import cut, flat, randn, relative, rng, seeded
from tasks import Transformer
from torch import nn

from flwr_fisher import curvature
from flwr_fisher.params import trainable_names

# Every piece, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

TOLERANCE = 1e-10  # float64
V, T, WIDTH = 7, 5, 8


class Packed(nn.Module):
    """The same with torch's own layers, which hold attention in one packed matrix."""

    def __init__(self, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, WIDTH), nn.Embedding(T, WIDTH)
        layer = partial(
            nn.TransformerEncoderLayer, WIDTH, 2, 16, 0.1, F.gelu, batch_first=True
        )
        self.blocks = nn.ModuleList(layer(norm_first=i > 0) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, V)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def ours(layers):
    return Transformer(V, T, width=WIDTH, layers=layers, heads=2)


MODELS = {
    "one-layer": partial(ours, 1),
    "two-layers": partial(ours, 2),
    "packed": partial(Packed, 2),
}
all_models = pytest.mark.parametrize("name", MODELS)


def make(name):
    """Return a model in float64 whose norms and biases are not ones and zeros."""
    model = seeded(MODELS[name]).double().eval()
    for i, p in enumerate(model.parameters()):
        p.data.add_(randn(i, *p.shape, dtype=torch.float64), alpha=0.3)
    return model


def sequences(n=3, length=T):
    pieces = torch.randint(V, (n, length + 1), generator=rng(8))
    return pieces[:, :-1], pieces[:, 1:]


def gradients(model, value):
    names = trainable_names(model)
    params = [model.get_parameter(n) for n in names]
    found = torch.autograd.grad(value, params, retain_graph=True)
    return dict(zip(names, found, strict=True))


def token_gradients(model, x):
    """Yield p and the gradient of log p, for every example, position and token."""
    for example in x:
        log_p = model(example.unsqueeze(0))[0].log_softmax(-1)
        for value in log_p.flatten():
            yield float(value.detach().exp()), gradients(model, value)


def dense_oracle(model, x):
    rows = [p**0.5 * flat(g) for p, g in token_gradients(model, x)]
    return torch.stack(rows).T @ torch.stack(rows) / len(x)


def check_diagonal(got, want):
    """Parameter by parameter, so that none hides behind another."""
    assert list(got) == list(want)
    for name, entries in want.items():
        assert entries.any(), name
        assert relative(got[name], entries) <= TOLERANCE, name


@all_models
def test_exact(name):
    model, (x, _) = make(name), sequences()
    want = dense_oracle(model, x)
    dense, diagonal = fisher(model, x.split(2), structure=["dense", "diagonal"])
    assert list(dense.shapes) == list(diagonal.shapes) == trainable_names(model)
    assert relative(dense.to_dense(), want) <= TOLERANCE
    check_diagonal(diagonal.diagonal(), cut(want.diagonal(), diagonal.diagonal()))


@all_models
def test_empirical(name):
    model, (x, y) = make(name), sequences()
    rows = []
    for example, labels in zip(x, y, strict=True):
        logits = model(example.unsqueeze(0))[0]
        rows.append(flat(gradients(model, F.cross_entropy(logits, labels) * T)))
    want = torch.stack(rows).T @ torch.stack(rows) / len(x)
    batches = list(zip(x.split(2), y.split(2), strict=True))
    how = {"expectation": "empirical", "structure": ["dense", "diagonal"]}
    dense, diagonal = fisher(model, batches, **how)
    assert relative(dense.to_dense(), want) <= TOLERANCE
    check_diagonal(diagonal.diagonal(), cut(want.diagonal(), diagonal.diagonal()))


@all_models
def test_empirical_batch(name):
    """FedFish's: the square of the gradient of each batch's mean loss."""
    model, (x, y) = make(name), sequences()
    batches = list(zip(x.split(2), y.split(2), strict=True))
    want = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for inputs, labels in batches:
        loss = F.cross_entropy(model(inputs).mT, labels)  # over all tokens
        for key, gradient in gradients(model, loss).items():
            want[key] += gradient.square() / len(batches)
    how = {"expectation": "empirical-batch", "structure": "diagonal"}
    check_diagonal(fisher(model, batches, **how).diagonal(), want)


# --- what is not used, not known ------------------------------------------------------


@pytest.mark.parametrize(
    "expectation", ["exact", "sampled", "empirical", "empirical-batch"]
)
def test_tokens_and_positions_that_do_not_occur_have_none(expectation):
    model, (x, y) = make("one-layer"), sequences(4, length=3)
    x = x % 4
    how = {"structure": "diagonal", "expectation": expectation}
    found = fisher(model, [(x, y)], **how).diagonal()
    for key, used in (("tokens.weight", x.unique()), ("positions.weight", range(3))):
        rows = found[key].any(1).nonzero().flatten()
        assert rows.tolist() == list(used), key
