"""Tolerance, samples, labels and likelihoods, each against a slow and obvious twin."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_fisher, relative
from torch import nn

from flwr_fisher.client.jobs.fedfish import LastEpochSquares
from flwr_fisher.curvature import fisher
from flwr_fisher.curvature.estimate.pieces import worth_keeping
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import flatten


def net(outputs=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, outputs)
    )


def images(n=9, seed=1):
    return torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


# --- tolerance ------------------------------------------------------------------------


@given(
    st.integers(1, 6), st.integers(1, 9), st.floats(0, 1), st.integers(0, 10**6),
    st.floats(0, 12),
)  # fmt: skip
def test_what_is_dropped_is_within_the_tolerance(k, n, tolerance, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.exp(spread * torch.randn(k, n, generator=generator))
    kept = worth_keeping(weights, tolerance)
    lost = float(weights[~kept].double().sum())
    assert lost <= tolerance * float(weights.double().sum()) * (1 + 1e-9)
    if tolerance == 0:
        assert kept.all()
    if kept.any() and not kept.all():
        assert weights[~kept].max() <= weights[kept].min()


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(1, 40), st.floats(0, 0.3), st.integers(0, 999))
def test_the_share_left_out_of_a_fisher_is_never_exceeded(c, n, tolerance, seed):
    """A layer without hidden units: its trace is that of the logits' Fisher."""
    generator = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(n, c, generator=generator)

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(c))

        def forward(self, rows):
            return rows + self.shift

    exact = fisher(Rows(), [logits], structure="dense", tolerance=0)
    close = fisher(Rows(), [logits], structure="dense", tolerance=tolerance)
    left_out = exact.trace() - close.trace()
    assert -1e-5 * exact.trace() <= left_out <= (tolerance + 1e-5) * exact.trace()
    eigenvalues = torch.linalg.eigvalsh(exact.to_dense() - close.to_dense())
    assert eigenvalues.min() >= -1e-5 * exact.trace()


class Table(nn.Module):
    """Logits by kind of example; of kind k, k + 2 classes have a chance."""

    def __init__(self, kinds):
        super().__init__()
        self.logits = nn.Linear(kinds, kinds + 1, bias=False)
        self.seen = SimpleNamespace(passes=0)  # an attribute would be restored
        with torch.no_grad():
            self.logits.weight.copy_(-50.0 * torch.ones(kinds + 1, kinds).tril(-2))

    def forward(self, x):
        outputs = self.logits(x).clone()
        outputs.register_hook(self.count)
        self.count(outputs)
        return outputs

    def count(self, examples):
        self.seen.passes += len(examples)


@pytest.mark.parametrize(
    ("kinds", "batch", "memory"),  # hardly any wait, or all
    [(3, 12, None), (15, 96, None), (15, 12, 2**30), (3, 96, 2**30)],
)
def test_no_more_passes_than_by_groups_of_alike(kinds, batch, memory):
    """Kind k keeps k + 1 pieces, so there are groups of 1, 2 to 3, 4 to 7 and so on."""
    kind = torch.randperm(96, generator=torch.Generator().manual_seed(2)) % kinds
    model, x = Table(kinds), nn.functional.one_hot(kind, kinds).float()
    how = {"structure": "block", "tolerance": 1e-9, "max_batch_bytes": memory}
    found = fisher(model, x.split(batch), **how)
    count = (kind + 1).double()
    # Beside the largest of their group: as many as the next power of two, less one.
    most = (2 ** (count.log2().floor() + 1) - 1).sum()
    once = len(x)  # forwards, before a group's own
    tried = 2 * 5 + 1 + 3 * batch  # there, and there again; the check of the first
    assert once + count.sum() <= model.seen.passes - tried <= 2 * once + most
    often = (torch.bincount(kind, minlength=kinds) / len(x)).double()
    pairs = zip(often, torch.eye(kinds).split(1), strict=True)
    want = sum(share * dense_fisher(model, one) for share, one in pairs)
    assert relative(found.to_dense(), want) <= 1e-6


def test_a_model_that_is_certain_of_everything_has_no_curvature():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([500.0, 0.0, 0.0]))
    for structure in ("kfac", "diagonal", "ekfac", "block", "dense"):
        F = fisher(model, [torch.randn(5, 2)], structure=structure)
        assert not F.to_dense().any()


# --- expectations ---------------------------------------------------------------------


def test_samples_are_unbiased_and_seeded():
    model, x = net(), images(6)
    exact = flatten(fisher(model, [x], structure="diagonal", tolerance=0).diagonal())
    how = {"structure": "diagonal", "expectation": "sampled"}
    many = x.repeat(10, 1, 1, 1)  # ten draws of each
    draws = torch.stack(
        [flatten(fisher(model, [many], seed=s, **how).diagonal()) for s in range(60)]
    )
    error = draws.mean(0) - exact
    deviations = error / (draws.std(0) / len(draws) ** 0.5).clamp_min(1e-12)
    assert float(deviations.abs().mean()) < 1.2
    assert abs(float(draws.sum(1).mean() / exact.sum()) - 1) < 0.05
    state = torch.get_rng_state()
    again = flatten(fisher(model, [many], seed=3, **how).diagonal())
    assert torch.equal(again, draws[3])
    assert not torch.equal(again, draws[4])
    assert torch.equal(torch.get_rng_state(), state)
    mean = flatten(fisher(model, [x], num_samples=400, **how).diagonal())
    assert relative(mean, exact) < relative(draws[0], exact)


@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
@pytest.mark.parametrize(
    "labels", [None, torch.zeros(9), torch.zeros(5, dtype=torch.long)]
)
def test_labels_that_are_missing_or_do_not_fit(expectation, labels):
    batch = images() if labels is None else (images(), labels)
    with pytest.raises(DataError, match=r"labels|\(inputs, labels\)"):
        fisher(net(), [batch], structure="diagonal", expectation=expectation)


def tokens(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7))
    return model, torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(4))


# --- labels that are none, or not where they seem -------------------------------------


def test_a_label_of_minus_100_is_none():
    model, x = net(), images()
    y = torch.arange(9) % 4
    y[::4] = -100
    batches = list(zip(x.split(4), y.split(4), strict=True))
    how = {"structure": "dense", "expectation": "empirical"}
    got = fisher(model, batches, **how).to_dense()
    labelled = fisher(model, [(x[y >= 0], y[y >= 0])], **how).to_dense()
    assert relative(got, labelled) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_a_batchs_mean_loss_is_over_its_labels(dtype):
    model, x = tokens()
    y = torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(5))
    y[0, 1:], y[3] = -100, -100
    y[4:] = -100  # a batch without any
    batches = list(zip(x.split(2), y.split(2), strict=True))
    want = {k: torch.zeros_like(p) for k, p in model.named_parameters()}
    for inputs, labels in batches[:2]:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs).mT, labels).backward()
        for k, p in model.named_parameters():
            want[k] += p.grad.square() / 3
    how = {"structure": "diagonal", "expectation": "empirical-batch"}
    got = fisher(model, [(a, b.to(dtype)) for a, b in batches], **how).diagonal()
    for k, entry in want.items():
        torch.testing.assert_close(got[k], entry)


@pytest.mark.parametrize("expectation", ["empirical", "empirical-batch"])
@pytest.mark.parametrize("label", [-1, 4, 255])
def test_a_label_that_is_no_class_is_named(expectation, label):
    y = torch.tensor([0, label, -100] * 3)
    with pytest.raises(DataError, match=rf"label {label} is outside \[0, 4\).*-100"):
        fisher(net(), [(images(), y)], structure="diagonal", expectation=expectation)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"tolerance": 0},
        {"expectation": "sampled"},
        {"expectation": "empirical"},
        {"expectation": "empirical-batch"},
    ],
)
def test_classes_that_are_second_are_refused_where_labels_show_it(how):
    model, x = tokens()
    second = nn.Sequential(model, Swapped())
    y = torch.randint(7, (6, 3))
    with pytest.raises(StructureError, match=r"\(6, 7, 3\).*last.*movedim\(1, -1\)"):
        fisher(second, [(x, y)], structure="diagonal", **how)
    fisher(model, [(x, y)], structure="diagonal", **how)
    if "empirical" not in how.get("expectation", ""):
        fisher(model, [(x, torch.zeros(6))], structure="diagonal", **how)
        fisher(model, [(x, ["a label"] * 6)], structure="diagonal", **how)


PER_OUTPUT = {
    "several labels": ((6, 5), torch.ones(6, 5)),
    "as integers": ((6, 5), torch.ones(6, 5).long()),
    "numbers": ((6, 5), torch.full((6, 5), -0.3)),
    "masks": ((6, 1, 4, 4), torch.zeros(6, 1, 4, 4)),
    "soft, second dimension": ((6, 2, 4, 3), torch.full((6, 2, 4, 3), 0.5)),
}


class Reshaped(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.head, self.shape = nn.Linear(3, torch.Size(shape).numel()), shape

    def forward(self, x):
        return self.head(x).reshape(len(x), *self.shape)


@pytest.mark.parametrize("case", PER_OUTPUT)
def test_a_label_for_each_output_is_none_of_a_class(case):
    shape, y = PER_OUTPUT[case]
    model, x = Reshaped(*shape[1:]), torch.randn(6, 3)
    with pytest.raises(
        StructureError, match=r"the outputs' shape.*likelihood='bernoulli'"
    ):
        fisher(model, [(x, y)], structure="diagonal")
    fisher(model, [(x, y)], structure="diagonal", likelihood="gaussian")


def test_masks_of_classes_that_are_second_are_told_so():
    x, y = torch.randn(6, 3), torch.randint(2, (6, 1, 4, 5))
    with pytest.raises(StructureError, match=r"second dimension.*movedim\(1, -1\)"):
        fisher(Reshaped(2, 4, 5), [(x, y)], structure="diagonal")


def test_soft_labels_are_of_classes():
    y = torch.full((6, 5), 0.2)
    x = torch.randn(6, 3)
    given = fisher(Reshaped(5), [(x, y)], structure="diagonal")
    assert given.shapes


class Swapped(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


# --- memory and precision -------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"tolerance": 0}, {"expectation": "empirical"}])
def test_a_bound_on_memory_changes_nothing(how):
    model, x = net(), images(30)
    structures = ["kfac", "diagonal", "ekfac", "block", "dense"]
    batch = x, torch.arange(30) % 4
    free = fisher(model, [batch], structure=structures, **how)
    tight = fisher(model, [batch], structure=structures, max_batch_bytes=1, **how)
    for a, b in zip(free, tight, strict=True):
        assert relative(b.to_dense(), a.to_dense()) <= 1e-5


def test_a_bound_on_memory_is_what_is_held_at_once(monkeypatch):
    model, x = net(), images(30)
    seen = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda x: (seen.append(len(x)), forward(x))[1]
    )
    fisher(model, [x], tolerance=0, max_batch_bytes=1)
    assert set(seen[2:3]) == {1}  # one alone
    assert set(seen[3:33]) == {2}  # the check, of an example and itself
    assert set(seen[33:]) == {1}


def many_batches(dtype):
    """A layer of each kind, over one position and several, and inputs of one sign."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    x = torch.rand(100, 1, 6, generator=torch.Generator().manual_seed(1))
    return model.to(dtype).eval(), list(x.to(dtype).split(1))


def exact(batches):
    """All in one batch, in float64."""
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    return x.double(), y


@pytest.mark.parametrize(
    ("dtype", "how"),
    [(torch.bfloat16, {}), (torch.float16, {"expectation": "empirical"})],
)
def test_many_batches_in_half_precision_lose_only_its_rounding(dtype, how):
    model, inputs = many_batches(dtype)
    batches = [(x, torch.tensor([i % 3])) for i, x in enumerate(inputs)]
    names = ("kfac", "diagonal", "ekfac", "block", "dense")
    found = fisher(model, batches, structure=names, **how)
    model.double()
    want = fisher(model, [exact(batches)], structure=names, **how)
    errors = {}
    for name, half, double in zip(names, found, want, strict=True):
        assert {d.dtype for d in half.diagonal().values()} == {dtype}
        errors[name] = relative(half.to_dense(), double.to_dense())
    assert max(errors.values()) <= 2 * torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_squared_gradients_in_half_precision(dtype):
    model, inputs = many_batches(dtype)
    batches = [(x, torch.tensor([i % 3])) for i, x in enumerate(inputs)]
    how = {"structure": "diagonal", "expectation": "empirical-batch"}
    found = [fisher(model, batches, **how)]
    squares = LastEpochSquares(model, epochs=1)
    for x, y in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        squares(1, 1)
    found.append(squares.curvature())
    model.double()
    want = fisher(model, [(x.double(), y) for x, y in batches], **how)
    for got in found:
        assert {d.dtype for d in got.diagonal().values()} == {dtype}
        error = relative(got.to_dense(), want.to_dense())
        assert error <= 2 * torch.finfo(dtype).eps


def test_autocast_is_accepted_and_sums_in_the_parameters_dtype():
    model, x = net(), images(30)
    names = ("kfac", "diagonal", "ekfac", "block", "dense")
    want = fisher(model, [x], structure=names, tolerance=0)
    batch = (x, torch.zeros(30, dtype=torch.long))
    for how in ({"tolerance": 0}, {}, {"expectation": "empirical"}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = fisher(model, [batch], structure=names, **how)
        for F in got:
            assert all(d.dtype == torch.float32 for d in F.diagonal().values())
        if how == {"tolerance": 0}:
            for a, b in zip(got, want, strict=True):
                assert relative(a.to_dense(), b.to_dense()) <= 0.01


@pytest.mark.parametrize("name", ["lowrank", "quasidiag", "implicit"])
def test_nngeometrys_other_representations_merge_like_any(name):
    model, x = net(), images()
    F = fisher(model, [x], structure=name, engine="nngeometry")
    dense = F.to_dense()
    v = {k: torch.randn(s) for k, s in F.shapes.items()}
    torch.testing.assert_close(flatten(F.matvec(v)), dense @ flatten(v))
    torch.testing.assert_close(F.scaled(2.0).to_dense(), 2 * dense)
    exact = fisher(model, [x], structure="dense", tolerance=0)
    if name != "quasidiag":
        assert relative(dense, exact.to_dense()) <= 1e-5
