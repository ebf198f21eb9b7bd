"""Likelihoods, the library's and a user's own: their pieces, scores and Fishers."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import SERIES, OverTime
from oracles import EXACT, flat, randn, relative, rng, seeded
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from virtual import ask, metrics_of

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.curvature import LIKELIHOODS, FisherOptions, Likelihood, fisher
from flwr_fisher.curvature.estimate.options import EXPECTATIONS
from flwr_fisher.curvature.estimate.pieces import Pieces, SoftmaxVectors, backward_plan
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    DataError,
    StructureError,
    UnknownNameError,
)
from flwr_fisher.params import shared_state
from flwr_fisher.wire import FisherUpload

# --- the pieces of a softmax ----------------------------------------------------------


def softmax_fisher(logits):
    p = logits.double().softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def every_piece(pieces):
    return backward_plan(pieces, 0)[0].of_passes(0, pieces.count)


def factors_of(logits):
    pieces = Pieces(SoftmaxVectors(logits.unsqueeze(1)), logits.unsqueeze(1).shape)
    return every_piece(pieces).squeeze(2)


values = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4]),
    st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=70, deadline=None, derandomize=True)
@given(st.lists(values, min_size=2, max_size=12))
def test_factors_of_extreme_and_tied_logits(row):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        logits = torch.tensor([row], dtype=dtype)
        factors = factors_of(logits)
        assert factors.shape == (len(row) - 1, 1, len(row))
        assert factors.dtype == dtype
        got = torch.einsum("knc,knd->ncd", factors.double(), factors.double())
        torch.testing.assert_close(got, softmax_fisher(logits), rtol=0, atol=tolerance)


def test_factors_keep_the_digits_of_unlikely_classes():
    """In float32 the variance of a class with p = 1e-28 is still right."""
    logits = torch.tensor([[0.0, -23.0, -46.0, -64.0], [0.0, -40.0, -41.0, -64.0]])
    p = logits.double().softmax(1)
    others = [p[:, [j for j in range(4) if j != k]].sum(1) for k in range(4)]
    got = factors_of(logits).double().square().sum(0)
    torch.testing.assert_close(got, p * torch.stack(others, 1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_the_likeliest_labels_and_a_draw_are_right_on_average(most):
    row = torch.tensor([3.0, -1.0, 2.0, 0.0, -40.0, 1.0, -2.0, 0.5, -0.5])
    logits = row.expand(20_000, 1, -1)
    vectors = SoftmaxVectors(logits, most, rng(most))
    assert vectors.count == most
    every = torch.arange(most).unsqueeze(1).expand(-1, len(logits))
    pieces = vectors.at(every)[:, :, 0].double()
    # All but the last are columns: the same in every row, and exact.
    exact, drawn = pieces[:-1, 0], pieces[-1]
    left = softmax_fisher(row) - exact.mT @ exact
    drawn_fisher = drawn.unsqueeze(2) * drawn.unsqueeze(1)
    if most < 8:
        assert (pieces[:-1] == pieces[:-1, :1]).all()
        error = drawn_fisher.std(0) / len(drawn) ** 0.5
        assert ((drawn_fisher.mean(0) - left).abs() <= 4.5 * error + 1e-7).all()
        assert drawn_fisher.std(0).max() > 0.001
        # The likeliest have no part in the draw.
        assert not drawn[:, row.topk(most - 1).indices].any()
    else:
        torch.testing.assert_close(drawn_fisher[0], left, rtol=0, atol=1e-7)
    squares = vectors.squares()[:, 0, 0].double()
    torch.testing.assert_close(
        squares, pieces.square().sum(2).mean(1), rtol=0.05, atol=1e-7
    )


def test_a_draw_is_never_of_a_class_without_a_chance():
    row = torch.tensor([0.0, -200.0, -200.0, 0.0, -200.0])
    sure = SoftmaxVectors(row.expand(100, 1, -1), 3, rng(0))
    assert not sure.at(torch.full((1, 100), 2)).any()
    assert not sure.squares()[2].any()
    half = SoftmaxVectors(row.expand(100, 1, -1), 1, rng(0))
    piece = half.at(torch.zeros(1, 100, dtype=torch.long))[0]
    torch.testing.assert_close(
        piece.abs(), torch.tensor([0.5, 0, 0, 0.5, 0]).expand_as(piece)
    )


def test_positions_share_a_pass_with_random_signs():
    logits = randn(5, 1, 4, 3).expand(20_000, -1, -1)
    pieces = Pieces(SoftmaxVectors(logits), logits.shape, rng(0))
    assert pieces.count == 2
    total = torch.zeros(len(logits), 12, 12)
    for piece in every_piece(pieces):
        flattened = piece.flatten(1)
        total += flattened.unsqueeze(2) * flattened.unsqueeze(1)
    want = torch.block_diag(*softmax_fisher(logits[0])).float()
    error = total.std(0) / len(total) ** 0.5
    assert ((total.mean(0) - want).abs() <= 4.5 * error + 1e-6).all()
    # A position's own is exact in every draw; without signs the rest would stay.
    torch.testing.assert_close(
        total[7].diagonal(), want.diagonal(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(pieces.weights()[:, 0].sum(), want.trace())


CERTAIN = {
    "categorical": (torch.tensor([[25.0, 0.0, 1.0]]), torch.tensor([0])),
    "bernoulli": (torch.tensor([[25.0, -25.0]]), torch.tensor([[1.0, 0.0]])),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_a_certain_score_keeps_its_digits(name):
    likelihood, (outputs, labels) = LIKELIHOODS[name], CERTAIN[name]
    want = outputs.double().requires_grad_()
    loss = F.softplus(-want * (2 * labels - 1)).sum()
    if name == "categorical":
        loss = (want[:, 1:] - want[:, :1]).exp().sum(1).log1p().sum()
    loss.backward()
    got = likelihood.score(outputs, labels)
    torch.testing.assert_close(got.double(), -want.grad, rtol=1e-6, atol=0)
    drawn = likelihood.sample_score(outputs, rng(0))
    assert torch.equal(drawn, got)  # with a chance of 1e-11 of another


# --- the Fisher -----------------------------------------------------------------------


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
        return softmax_fisher(z)

    def score(self, z, labels):
        return F.one_hot(labels, z.shape[1]) - z.softmax(1)


POISSON, CORRELATED = Poisson(), Correlated(randn(5, 3, 3))
full = FisherOptions.full


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
        (POISSON, POISSON, 3),
        (CORRELATED, CORRELATED, 3),
        ("bernoulli", Sigmoid(), 1),
        ("bernoulli", Sigmoid(), 3),
        ("gaussian", Normal(), 3),
        ("categorical", Softmax(), 3),
        (LIKELIHOODS["categorical"], Softmax(), 3),
    ],
)
def test_the_fisher_is_that_of_a_dense_oracle(likelihood, twin, outputs):
    model, x = seeded(lambda: net(outputs)), randn(1, 8, 4)
    J, z = jacobians(model, x), model(x).detach().double()

    def check(loader, want, within, options):
        found = fisher(
            model, loader, "diagonal", options=options, likelihood=likelihood
        )
        assert relative(flat(found.diagonal()), want) <= within
        return found.trace() / float(want.sum())

    want = torch.einsum("ncd,nck,nkd->d", J, twin.information(z), J) / len(x)
    check(x.split(3), want, 1e-5, EXACT)
    assert 0.95 <= check(x.split(3), want, 0.1, full(tolerance=0.05)) <= 1 + 1e-5
    # As many draws of each example.
    check([x.repeat(1000, 1)], want, 0.05, full(expectation="sampled"))
    y = torch.randint(
        2 if isinstance(twin, Sigmoid) else 3, (8, outputs), generator=rng(3)
    )
    y = y[:, 0] if isinstance(twin, Softmax) else y.float()
    want = torch.einsum("nc,ncd->nd", twin.score(z, y), J).square().mean(0)
    batches = list(zip(x.split(3), y.split(3), strict=True))
    check(batches, want, 1e-5, full(expectation="empirical"))


class OfTokens(OverTime):
    """It labels every step, and each depends on all."""

    def forward(self, x):
        hidden = self.step(x).tanh()
        return self.head(hidden + hidden.mean(1, keepdim=True))


STEPS = torch.randint(3, SERIES.shape[:2], generator=rng(5))
STEPS[0, 1:] = STEPS[2] = -100


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
def test_given_labels_of_positions_add_up_before_they_are_squared(expectation, dtype):
    """Over an example's labels, or a batch's mean of these; -100 is none."""
    model = seeded(OfTokens)
    by_batch = expectation == "empirical-batch"
    sizes = [2, 1, 1]  # the third has no label
    count = 2 if by_batch else 3  # batches, or examples, with labels
    squares = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(SERIES.split(sizes), STEPS.split(sizes), strict=True):
        for rows in [slice(None)] if by_batch else range(len(x)):
            if (y[rows] == -100).all():
                continue
            loss = F.cross_entropy(
                model(x)[rows].flatten(0, -2),
                y[rows].flatten(),
                reduction="mean" if by_batch else "sum",
            )
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for total, gradient in zip(squares, gradients, strict=True):
                total += gradient.square() / count
    batches = [
        (x, y.to(dtype))
        for x, y in zip(SERIES.split(sizes), STEPS.split(sizes), strict=True)
    ]
    found = fisher(model, batches, "diagonal", options=full(expectation=expectation))
    for got, want in zip(found.diagonal().values(), squares, strict=True):
        assert relative(got, want) <= 1e-5


TOKENS = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [5, 1, 4]])
OF_TOKENS = torch.where(TOKENS == 0, -100, TOKENS % 3)


def token_net():
    """Return one that is sure of some tokens, which take fewer passes."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))).double()
    model[0].weight.data[3:] *= 60
    return model


@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_a_token_without_a_label_has_no_gradient(expectation):
    options = full(expectation=expectation)
    found = fisher(token_net(), [(TOKENS, OF_TOKENS)], "diagonal", options=options)
    used = found.diagonal()["0.weight"].any(1)
    assert not used[0]
    assert used[1:].any()


@pytest.mark.parametrize(
    ("structure", "expectation"), [*product(("diagonal", "kfac"), EXPECTATIONS)][:-1]
)
def test_a_label_of_minus_100_is_none_for_a_likelihood_of_ones_own(
    structure, expectation
):
    """It counted in the Fisher, and not in the mean."""
    options = FisherOptions(expectation=expectation)
    model, x = nn.Sequential(net(1), nn.Flatten(0)), randn(3, 8, 4).float()
    y, few = torch.tensor([2, -100, 0, -100, -100, 3, 1, -100]), [0, 2, 5, 6]
    found, expected = (
        fisher(model, [batch], structure, options=options, likelihood=Poisson())
        for batch in ((x, y), (x[few], y[few]))
    )
    torch.testing.assert_close(flat(found.diagonal()), flat(expected.diagonal()))
    assert Poisson().num_labels(torch.tensor([[1, -100], [-100, -100]])) == 1


def test_a_method_that_nothing_calls_is_refused():
    class Censored(Poisson):
        def ignored(self, labels):
            return labels < 0

    with pytest.raises(ConfigurationError, match=r"Censored\.ignored is not called"):
        fisher(net(1), [torch.ones(2, 4)], likelihood=Censored())


def test_factors_of_labelled_positions_are_those_of_each_example():
    """Also where examples wait for others that need as many passes."""
    model, options = token_net(), full(tolerance=1e-9)
    x, y = TOKENS.repeat(5, 1), OF_TOKENS.repeat(5, 1)
    found = fisher(model, [(x, y)], options=options).blocks()[0]
    alone = [
        fisher(model, [(x[k : k + 1], y[k : k + 1])], options=EXACT).blocks()[0]
        for k in range(len(TOKENS))
    ]
    for factor in ("A", "G"):
        want = torch.stack([getattr(each, factor) for each in alone]).mean(0)
        assert relative(getattr(found, factor), want) <= 1e-6


# --- what does not fit ----------------------------------------------------------------


class Flat(Poisson):
    def columns(self, outputs):
        return outputs


def test_what_is_no_likelihood_is_told():
    with pytest.raises(
        StructureError, match=r"Flat.columns returned shape \(8, 3\) for"
    ):
        fisher(net(), [randn(1, 8, 4)], likelihood=Flat())
    for wrong in ("poisson", Poisson):
        with pytest.raises(UnknownNameError, match=r"known: categorical, bernoulli"):
            fisher(net(), [randn(1, 8, 4)], likelihood=wrong)
        with pytest.raises(UnknownNameError, match=r"known: categorical, bernoulli"):
            FisherClient(net(), [], likelihood=wrong)


@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
def test_data_without_any_label_have_no_fisher(expectation):
    batches = [(randn(1, 8, 4), torch.full((8,), -100))]
    with pytest.raises(DataError, match=r"with a label.*no Fisher"):
        fisher(net(), batches, "diagonal", options=full(expectation=expectation))


@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
@pytest.mark.parametrize(
    "batch", [randn(1, 8, 4), (randn(1, 8, 4), ["a"] * 8)], ids=["none", "texts"]
)
def test_labels_that_are_needed_must_be_there(expectation, batch):
    options = full(expectation=expectation)
    with pytest.raises(DataError, match=r"\(inputs, labels\)"):
        fisher(net(), [batch], "diagonal", options=options)


@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
@pytest.mark.parametrize(
    ("likelihood", "labels", "text"),
    [
        ("categorical", torch.tensor([0, 7] * 4), r"label 7 is outside \[0, 3\).*-100"),
        (POISSON, torch.ones(8, 1, 3), "Poisson.score returned"),
    ],
)
def test_labels_that_do_not_fit_are_named(expectation, likelihood, labels, text):
    how = {"options": full(expectation=expectation), "likelihood": likelihood}
    with pytest.raises((DataError, StructureError), match=text):
        fisher(net(), [(randn(1, 8, 4), labels)], "diagonal", **how)


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize(
    ("likelihood", "labels", "wrong", "text"),
    [
        ("categorical", torch.zeros(4).long(), 3, "label 3 is outside"),
        ("bernoulli", torch.zeros(4, 3), 2.0, r"label 2 is outside \[0, 1\]"),
        ("bernoulli", torch.zeros(4, 3).long(), -100, "label -100 is outside"),
        ("gaussian", torch.zeros(4, 3), torch.inf, "NaN or infinite"),
    ],
)
def test_each_label_of_each_batch_is_checked(
    expectation, likelihood, labels, wrong, text
):
    x, how = randn(1, 4, 4), {"options": full(expectation=expectation)}
    last = labels.clone()
    last[-1] = wrong
    fisher(net(), [(x, labels)] * 2, "diagonal", likelihood=likelihood, **how)
    with pytest.raises(DataError, match=text):
        fisher(
            net(), [(x, labels), (x, last)], "diagonal", likelihood=likelihood, **how
        )


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool])
@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_one_hot_labels_are_floats(expectation, dtype):
    options, hot = full(expectation=expectation), F.one_hot(torch.arange(8) % 3)
    fisher(net(), [(randn(1, 8, 4), hot.float())], "diagonal", options=options)
    with pytest.raises(StructureError, match="make one-hot labels floats"):
        fisher(net(), [(randn(1, 8, 4), hot.to(dtype))], "diagonal", options=options)


LABELS = {
    "several": torch.ones(8, 3),
    "several, as integers": torch.ones(8, 3).long(),
    "numbers": torch.full((8, 3), -0.3),
    "one in a row": torch.ones(8, 1).long(),
    "one number": torch.ones(8),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_show_that_outputs_are_no_logits_of_classes(labels):
    """Also where their values are not used."""
    with pytest.raises(StructureError, match="likelihood='gaussian'"):
        fisher(net(), [(randn(1, 8, 4), labels)])


def test_probabilities_are_labels_of_classes():
    model, hard, soft = seeded(net), torch.arange(8) % 3, full(expectation="empirical")
    one_hot = F.one_hot(hard, 3).float()
    want, got = (
        fisher(model, [(randn(1, 8, 4), labels)], options=soft)
        for labels in (hard, one_hot)
    )
    assert relative(got.to_dense(), want.to_dense()) <= 1e-6


# --- through a client -----------------------------------------------------------------


def loss(outputs, labels):
    return (outputs.exp() - labels * outputs).mean()


COUNTS = torch.randint(4, (12, 3), generator=rng(2)).float()
X = randn(1, 12, 4)


def client(**options):
    data = list(zip(X.split(5), COUNTS.split(5), strict=True))
    chosen = {"train_fn": LocalSGD(lr=0.01, loss_fn=loss), "likelihood": Poisson()}
    return FisherClient(seeded(net), data, data, device="cpu", **(chosen | options))


def arrays():
    return ArrayRecord(shared_state(seeded(net)))


def test_a_client_uploads_the_fisher_of_its_own_likelihood():
    reply = ask(client(), arrays(), {"structure": "diagonal", "tolerance": 0.0})
    (record,) = reply.content.array_records.values()
    upload = FisherUpload.from_arrays(record, shared_state(seeded(net)))
    model = seeded(net)
    model.load_state_dict(upload.params)
    J, z = jacobians(model, X), model(X).detach().double()
    want = torch.einsum("ncd,nc,ncd->d", J, z.exp(), J) / 12
    assert relative(flat(upload.curvature.diagonal()), want) <= 1e-5
    scores = metrics_of(ask(client(), arrays(), kind="evaluate"))
    assert "loss" in scores
    assert "accuracy" not in scores  # of no classes


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
    data = [(randn(1, 8, 4), (randn(2, 8, 1) > 0).float())]
    model, ((x, y),) = nn.Linear(4, 1), data
    how = {"likelihood": likelihood, "device": "cpu"}
    scoring = FisherClient(model, data, data, train_fn=lambda *_: {}, **how)
    reply = ask(scoring, ArrayRecord(model.state_dict()), kind="evaluate")
    loss = {"gaussian": F.mse_loss, "bernoulli": F.binary_cross_entropy_with_logits}
    expected = loss[likelihood](model(x), y).item()
    assert metrics_of(reply)["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ClientError, match=r"trains with the cross-entropy of classes"):
        ask(FisherClient(model, data, **how), ArrayRecord(model.state_dict()))
