"""Likelihoods of the user's own: against dense oracles, and through a client."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from oracles import flat, randn, relative, rng, seeded
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset
from virtual import ask, metrics_of

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.curvature import LIKELIHOODS, Likelihood, fisher
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    StructureError,
    UnknownNameError,
)
from flwr_fisher.merge import fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.wire import FisherUpload


class Poisson(Likelihood):
    """Counts, of whose rate the model returns the logarithm."""

    def columns(self, outputs):
        return outputs.detach().exp().sqrt().reshape(1, len(outputs), -1, 1)

    def sample_score(self, outputs, generator):
        return torch.poisson(outputs.exp(), generator=generator) - outputs.exp()

    def score(self, outputs, labels):
        return labels - outputs.exp()

    def information(self, outputs):
        return torch.diag_embed(outputs.exp())


@dataclass(frozen=True)
class Correlated(Likelihood):
    """Regression with a covariance of its own."""

    root: Tensor  # of the precision

    def columns(self, outputs):
        rows = self.root.to(outputs).reshape(len(self.root), 1, 1, -1)
        return rows.expand(-1, len(outputs), -1, -1)

    def sample_score(self, outputs, generator):
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return noise @ self.root.to(outputs)

    def score(self, outputs, labels):
        root = self.root.to(outputs)
        return (labels - outputs) @ root.T @ root

    def information(self, outputs):
        root = self.root.to(outputs)
        return (root.T @ root).expand(len(outputs), -1, -1)


class Sigmoid:
    """What "bernoulli" is to be."""

    def information(self, z):
        return torch.diag_embed(z.sigmoid() * (1 - z.sigmoid()))

    def score(self, z, labels):
        return labels - z.sigmoid()


class Normal:
    """What "gaussian" is to be."""

    def information(self, z):
        return torch.eye(z.shape[1]).to(z).expand(len(z), -1, -1)

    def score(self, z, labels):
        return labels - z


class Softmax:
    """What "categorical" is to be."""

    def information(self, z):
        p = z.softmax(1)
        return torch.diag_embed(p) - p.unsqueeze(1) * p.unsqueeze(2)

    def score(self, z, labels):
        return F.one_hot(labels, z.shape[1]) - z.softmax(1)


POISSON, CORRELATED = Poisson(), Correlated(randn(5, 3, 3))


def net(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def jacobians(model, x):
    """Return ``[n, outputs, d]``, in float64, example by example."""
    params = {k: p.detach().double() for k, p in model.named_parameters()}
    rows = []
    for example in x.double():
        J = jacrev(lambda p, e=example: functional_call(model, p, (e,)))(params)
        rows.append(torch.cat([j.flatten(1) for j in J.values()], 1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("likelihood", "twin", "outputs"),
    [
        (POISSON, POISSON, 1),
        (POISSON, POISSON, 3),
        (CORRELATED, CORRELATED, 3),
        ("bernoulli", Sigmoid(), 1),
        ("bernoulli", Sigmoid(), 3),
        ("gaussian", Normal(), 1),
        ("gaussian", Normal(), 3),
        ("categorical", Softmax(), 3),
    ],
)
def test_the_fisher_is_that_of_a_dense_oracle(likelihood, twin, outputs):
    model, x = seeded(lambda: net(outputs)), randn(1, 8, 4)
    J, z = jacobians(model, x), model(x).detach().double()
    want = torch.einsum("ncd,nck,nke->de", J, twin.information(z), J) / len(x)
    how = {"structure": ["dense", "diagonal"], "likelihood": likelihood}

    def check(loader, want, within, **more):
        dense, diagonal = fisher(model, loader, **how, **more)
        assert relative(dense.to_dense(), want) <= within
        assert relative(flat(diagonal.diagonal()), want.diagonal()) <= within
        return dense.trace()

    check(x.split(3), want, 1e-5, tolerance=0)
    kept = check(x.split(3), want, 0.1, tolerance=0.05)
    assert 0.95 <= kept / float(want.trace()) <= 1 + 1e-5
    many = x.repeat(50, 1)  # as many draws of each
    check([many], want, 0.2, expectation="sampled", num_samples=40)
    most = {"categorical": outputs, "bernoulli": 2}.get(likelihood, 4)
    y = torch.randint(most, (8, outputs), generator=rng(3))
    y = y[:, 0] if likelihood == "categorical" else y.float()
    g = torch.einsum("nc,ncd->nd", twin.score(z, y), J)
    batches = list(zip(x.split(3), y.split(3), strict=True))
    check(batches, g.T @ g / len(x), 1e-5, expectation="empirical")


def test_the_names_are_instances_too():
    model, x = seeded(net), randn(1, 8, 4)
    for name, instance in LIKELIHOODS.items():
        by_name = fisher(model, [x], likelihood=name).to_dense()
        assert torch.equal(fisher(model, [x], likelihood=instance).to_dense(), by_name)
    assert [k for k, v in LIKELIHOODS.items() if v.labels_are_classes] == [
        "categorical"
    ]


def test_what_is_no_likelihood_is_told():
    class Flat(Poisson):
        def columns(self, outputs):
            return outputs

    for structure in ("kfac", "dense"):
        with pytest.raises(
            StructureError, match=r"Flat.columns returned shape \(8, 3\) for"
        ):
            fisher(net(), [randn(1, 8, 4)], structure=structure, likelihood=Flat())
    for wrong in ("poisson", Poisson):
        with pytest.raises(UnknownNameError, match=r"known: categorical, bernoulli"):
            fisher(net(), [randn(1, 8, 4)], likelihood=wrong)
        with pytest.raises(UnknownNameError, match=r"known: categorical, bernoulli"):
            FisherClient(net(), [], likelihood=wrong)
    with pytest.raises(ConfigurationError, match="'exact' over classes"):
        fisher(net(), [randn(1, 8, 4)], likelihood=Poisson(), engine="nngeometry")


# --- through a client -----------------------------------------------------------------


def loss(outputs, labels):
    return (outputs.exp() - labels * outputs).mean()


def client(**options):
    counts = torch.randint(4, (12, 3), generator=rng(2)).float()
    loader = DataLoader(TensorDataset(randn(1, 12, 4), counts), batch_size=5)
    given = {"train_fn": LocalSGD(lr=0.01, loss_fn=loss), "likelihood": Poisson()}
    return FisherClient(seeded(net), loader, loader, device="cpu", **(given | options))


def arrays():
    return ArrayRecord(shared_state(seeded(net)))


def test_a_client_uploads_the_fisher_of_its_own_likelihood():
    asking = client()
    reply = ask(asking, arrays(), {"structure": "diagonal", "tolerance": 0.0})
    (record,) = reply.content.array_records.values()
    upload = FisherUpload.from_arrays(record, shared_state(seeded(net)))
    model = seeded(net)
    model.load_state_dict(upload.params)
    J, z = jacobians(model, randn(1, 12, 4)), model(randn(1, 12, 4)).detach().double()
    want = torch.einsum("ncd,nc,ncd->d", J, z.exp(), J) / 12
    assert relative(flat(upload.curvature.diagonal()), want) <= 1e-5
    merged = fedfisher([upload.posterior(12)]).params
    assert all(torch.equal(merged[k], v) for k, v in upload.params.items())


def test_a_client_without_classes_has_no_accuracy():
    scores = metrics_of(ask(client(), arrays(), kind="evaluate"))
    assert "loss" in scores
    assert "accuracy" not in scores
    classes = client(likelihood=LIKELIHOODS["categorical"], train_fn=LocalSGD())
    classes.problem.valloader = [(randn(1, 6, 4), torch.zeros(6, dtype=torch.int64))]
    assert "accuracy" in metrics_of(ask(classes, arrays(), kind="evaluate"))


def test_what_needs_classes_or_a_loss_is_told():
    asking = client(train_fn=LocalSGD())
    with pytest.raises(ClientError, match=r"likelihood=<.*Poisson.*no loss_fn"):
        ask(asking, arrays(), {"job": "gradient"})
    ask(client(), arrays(), {"job": "gradient"})
    with pytest.raises(ClientError, match=r"TCT needs classes.*Poisson"):
        ask(client(), arrays(), {"check": "tct-check"})


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_a_client_without_classes_scores_by_its_likelihood(likelihood):
    """And does not train by the cross-entropy of classes."""
    x, y = randn(1, 8, 4), (randn(2, 8, 1) > 0).float()
    data = [(x, y)]

    def train_fn(*args):
        return {"train_loss": 0.0}

    model = nn.Linear(4, 1)
    given = {"likelihood": likelihood, "device": "cpu"}
    client = FisherClient(model, data, data, train_fn=train_fn, **given)
    arrays = ArrayRecord(model.state_dict())
    reply = ask(client, arrays, kind="evaluate")
    loss = {"gaussian": F.mse_loss, "bernoulli": F.binary_cross_entropy_with_logits}
    expected = loss[likelihood](model(x), y).item()
    assert metrics_of(reply)["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ClientError, match=r"trains with the cross-entropy of classes"):
        ask(FisherClient(model, data, **given), arrays)


LAST = {"expectation": "empirical-batch", "structure": "diagonal"}
MISSING = torch.zeros(4, 2).index_fill(0, torch.tensor([1]), torch.nan)


@pytest.mark.parametrize(
    ("outputs", "labels", "options", "text"),
    [
        (2, randn(1, 4), {}, "a label is .*: pass likelihood='gaussian' for numbers"),
        (3, randn(1, 4, 1), {}, "taken for logits of classes"),
        (2, MISSING, LAST | {"likelihood": "gaussian"}, "a label is NaN or infinite"),
        (1, torch.ones(4), LAST | {"likelihood": POISSON}, "Poisson.score returned"),
    ],
)
def test_numbers_that_do_not_fit_are_told(outputs, labels, options, text):
    with pytest.raises((DataError, StructureError), match=text):
        fisher(nn.Linear(3, outputs), [(randn(0, 4, 3), labels)], **options)


def test_classes_that_are_stored_as_floats_are_no_numbers():
    x = randn(0, 4, 3)
    fisher(nn.Linear(3, 2), [(x, torch.tensor([0.0, 1, 1, 0]))])
