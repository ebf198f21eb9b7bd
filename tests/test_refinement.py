"""What follows a merge: a head in closed form, then quasi-Newton steps by K-FAC."""

import copy
import logging
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, MetricRecord
from oracles import randn, relative
from test_secure_sums import secure_app
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    LIFTED,
    Remembering,
    Watched,
    app_by_partition,
    close,
    fail,
    killing_app,
    quick_app,
    same_bits,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.curvature import FisherOptions, Kronecker, fisher, gradient
from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    StructureError,
)
from flwr_fisher.params import double, flatten, scale, unflatten
from flwr_fisher.rounds.quasi_newton import (
    DAMPING,
    FIRST,
    Descent,
    damped_inverse,
    two_loops,
)
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.policy import Sizes
from flwr_fisher.strategies import (
    AFL,
    FedAvg,
    FedFisherOneShot,
    Policy,
    Privacy,
    Refinement,
)
from flwr_fisher.strategies.exchanges import refinement
from flwr_fisher.tangent import (
    HeadSums,
    chosen_ridge,
    closed_form_head,
    head_sums,
    lda_head,
)
from flwr_fisher.tangent.frozen_head import head_losses, majorizer, output_layer
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import (
    arrays_to_tensors,
    checked_to_curvature,
    curvature_to_tensors,
    tensors_to_curvature,
)
from flwr_fisher.wire.head_upload import HeadLossUpload

CLASSES, WIDTH, N = 3, 5, 60
SUMS = {"aggregate": "sums", "structure": "diagonal"}


# --- the sums and what is solved from them


def features(seed=0, classes=CLASSES):
    """Features of classes with unlike means, in float64, and their labels."""
    y = torch.arange(N) % classes
    z = randn(seed, N, WIDTH, dtype=torch.float64)
    return z + 1.5 * torch.eye(WIDTH, dtype=torch.float64)[y] + 0.3, y


def sums_of(z, y, classes=CLASSES, bias=True, batch=7):
    model = nn.Sequential(nn.Linear(WIDTH, classes, bias=bias)).double()
    return head_sums(model, DataLoader(TensorDataset(z, y), batch), "0")


def dense_ridge(z, targets, bias, penalty):
    """Least squares with a row for each feature's penalty."""
    if bias:
        m, t = z.mean(0), targets.mean(0)
        weight = dense_ridge(z - m, targets - t, False, penalty)[0]
        return weight, t - weight @ m
    rows = penalty**0.5 * torch.eye(WIDTH, dtype=torch.float64)
    both = torch.cat([z, rows]), torch.cat([targets, rows.new_zeros(WIDTH, CLASSES)])
    return (torch.linalg.lstsq(*both).solution.mT,)


def error_of(z, targets, bias, penalty):
    """Generalised cross-validation, from the matrix that smooths the targets."""
    x, t = (z - z.mean(0), targets - targets.mean(0)) if bias else (z, targets)
    inner = x.mT @ x + penalty * torch.eye(WIDTH, dtype=torch.float64)
    smoother = x @ torch.linalg.solve(inner, x.mT)
    df = float(smoother.trace()) + bias
    return N * float((t - smoother @ t).square().sum()) / (N - df) ** 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_ridge_is_that_of_least_cross_validation_error(bias):
    z, y = features()
    targets = F.one_hot(y, CLASSES).double()
    sums = sums_of(z, y)
    chosen = chosen_ridge(sums, bias=bias) * float(z.square().sum(0).mean())
    own = error_of(z, targets, bias, chosen)
    for factor in (10**0.5, 10**-0.5):
        assert own <= error_of(z, targets, bias, chosen * factor) * (1 + 1e-9)
    found = closed_form_head(sums, bias=bias)
    for value, wanted in zip(found, dense_ridge(z, targets, bias, chosen), strict=True):
        assert relative(value, wanted) < 1e-10


def test_fewer_rows_than_features_take_a_large_ridge():
    """Where nothing can be learned, little is: labels are random here."""
    z = randn(5, 30, 60, dtype=torch.float64)
    y = torch.arange(30) % 2
    model = nn.Sequential(nn.Linear(60, 2)).double()
    assert chosen_ridge(head_sums(model, [(z, y)], "0"), bias=True) > 1.0


def dense_lda(z, y, penalty):
    """Each class's Gaussian, with the covariance that all share."""
    n = len(y)
    means = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    residual = z - means[y]
    system = residual.mT @ residual / n
    system += penalty / n * torch.eye(WIDTH, dtype=z.dtype)
    shares = torch.bincount(y, minlength=CLASSES).double() / n

    def logits(x):
        distance = [
            torch.einsum("ni,ij,nj->n", x - m, torch.linalg.inv(system), x - m)
            for m in means
        ]
        return -0.5 * torch.stack(distance, 1) + shares.log()

    return logits


def test_lda_has_the_posteriors_of_gaussian_classes():
    z, y = features()
    y = torch.where(torch.arange(N) < 20, 0, y)  # unlike shares
    weight, bias = lda_head(sums_of(z, y), bias=True, ridge=0.1)
    penalty = 0.1 * float(z.square().sum(0).mean())
    logits = dense_lda(z, y, penalty)(z)
    found = (z @ weight.mT + bias).log_softmax(1)
    assert relative(found, logits.log_softmax(1)) < 1e-10


def test_lda_without_a_bias_has_what_features_can_carry_of_it():
    z, y = features()
    ones = torch.cat([z[:, :-1], torch.ones(N, 1, dtype=z.dtype)], 1)
    (weight,) = lda_head(sums_of(ones, y, bias=False), bias=False, ridge=1e-3)
    whole, bias = lda_head(sums_of(ones, y), bias=True, ridge=1e-3)
    found, wanted = ones @ weight.mT, ones @ whole.mT + bias
    assert relative(found.log_softmax(1), wanted.log_softmax(1)) < 1e-6


@pytest.mark.parametrize("solve", [lda_head, closed_form_head])
def test_a_class_that_nobody_has_is_never_guessed(solve):
    z, y = features(classes=2)
    weight, bias = solve(sums_of(z, y), bias=True)
    assert (z @ weight.mT + bias).argmax(1).max() < 2
    (alone,) = solve(sums_of(z, y), bias=False)
    assert alone.isfinite().all()


@pytest.mark.parametrize("solve", [lda_head, closed_form_head])
def test_neither_the_split_nor_batches_nor_the_order_matter(solve):
    z, y = features()
    whole = solve(sums_of(z, y, batch=N), bias=True)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    for parts in ([shuffled[:1], shuffled[1:]], shuffled.tensor_split(9)):
        every = [sums_of(z[part], y[part], batch=4) for part in parts]
        found = solve(HeadSums.total(every), bias=True)
        for value, wanted in zip(found, whole, strict=True):
            assert relative(value, wanted) < 1e-10


def test_a_label_of_minus_100_adds_nothing():
    z, y = features()
    hidden = torch.where(torch.arange(N) % 4 == 0, -100, y)
    kept = hidden != -100
    found, wanted = sums_of(z, hidden), sums_of(z[kept], y[kept])
    torch.testing.assert_close(found.gram, wanted.gram)
    torch.testing.assert_close(found.cross, wanted.cross)
    with pytest.raises(DataError, match="no examples with a label other"):
        sums_of(z, torch.full_like(y, -100))


def test_losses_are_those_of_the_model_and_of_each_scale():
    model, loader = tiny_model().eval(), [tiny_data(0).tensors, tiny_data(1).tensors]
    weight, bias = torch.randn(3, 4).double(), torch.randn(3).double()
    scales = [0.5, 2.0]
    losses, _ = head_losses(model, loader, "3", [weight, bias], scales, F.cross_entropy)
    x, y = (torch.cat(each) for each in zip(*loader, strict=True))
    wanted = [F.cross_entropy(model(x), y)]
    for factor in scales:
        model[3].weight.data, model[3].bias.data = factor * weight, factor * bias
        wanted.append(F.cross_entropy(model.double()(x.double()), y))
    torch.testing.assert_close(losses, torch.stack(wanted).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, F.mse_loss])
def test_a_head_that_is_spoilt_costs_the_others_no_digits(loss_fn):
    """A secure sum rounds all losses to the same step."""
    z, y = randn(0, N, WIDTH), torch.arange(N) % CLASSES
    layer, solved = nn.Linear(WIDTH, CLASSES), [randn(1, CLASSES, WIDTH)]
    layer.weight.data.mul_(1e15)
    classes = loss_fn is F.cross_entropy
    labels = y if classes else randn(2, N, CLASSES)
    solved.append(torch.zeros(CLASSES))
    asked = layer, [(z, labels)], "", solved, [1.0], loss_fn
    losses, _ = head_losses(*asked, classes=classes)
    wanted = [100 * loss_fn(torch.zeros(N, CLASSES), labels)]
    wanted.append(loss_fn(F.linear(z, *solved), labels))
    torch.testing.assert_close(losses.float(), torch.stack(wanted))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoids"])
def test_a_step_from_any_head_lowers_its_loss(kind, bias):
    """Also of a head that is far away."""
    z, y = features(classes=CLASSES)
    layer = nn.Linear(WIDTH, CLASSES, bias=bias)
    loss_fn, bound, targets = {
        "softmax": (F.cross_entropy, 0.5, y),
        "sigmoids": (
            F.binary_cross_entropy_with_logits,
            0.25 / CLASSES,
            F.one_hot(y, CLASSES).float(),
        ),
    }[kind]
    batches = [(z.float(), targets)]
    sums = head_sums(layer, batches, "", classes=kind == "softmax")
    metric = majorizer(sums, bias=bias, bound=bound, ridge=1e-6)
    for seed in range(5):
        solved = [randn(seed, CLASSES, WIDTH), *[randn(9 + seed, CLASSES)] * bias]
        asked = layer, batches, "", solved, [1.0], loss_fn
        losses, (_, slope) = head_losses(*asked, classes=kind == "softmax")
        parts = (slope @ metric).float().split([WIDTH, *[1] * bias], 1)
        moved = [v - p.reshape(v.shape) for v, p in zip(solved, parts, strict=True)]
        with torch.no_grad():
            after = loss_fn(F.linear(z.float(), *moved), targets)
        assert after < losses[1]


def test_the_bound_is_right_where_clients_label_unlike_shares():
    """One has a label in each sequence, the other ten: losses are by examples."""
    torch.manual_seed(0)
    layer, sums, found = nn.Linear(WIDTH, CLASSES, bias=False), [], []
    for labelled, offset in ((1, 3.0), (10, 0.0)):
        x = torch.randn(30, 10, WIDTH) + offset
        y = torch.randint(CLASSES, (30, 10))
        y[:, labelled:] = -100
        sums.append(head_sums(layer, [(x, y)], ""))
        found.append((x, y))
    solved = [torch.zeros(CLASSES, WIDTH, dtype=torch.float64)]

    def pooled_losses(solved):
        every = [
            head_losses(layer, [own], "", solved, [1.0], F.cross_entropy)
            for own in found
        ]
        losses, slopes = zip(*every, strict=True)
        return torch.stack(losses).mean(0)[1], torch.stack(slopes).mean(0)[1]

    metric = majorizer(HeadSums.total(sums), bias=False, bound=0.5, ridge=0.0)
    for _ in range(5):
        before, slope = pooled_losses(solved)
        solved = [solved[0] - slope @ metric]
        assert pooled_losses(solved)[0] < before + 1e-5  # float32


@pytest.mark.parametrize("others", [{}, {0: 2}])
def test_a_head_takes_no_step_if_a_client_has_left_since_the_sums(others, caplog):
    """The bound would be that of other data than the slopes are of.

    Also if another client is back, so that there are as many.
    """

    def leaves(request, content):
        if next(asked[request]) == request:
            fail(content)

    failing = {1: 3, **others}  # which request: a training, sums, losses
    asked = {request: iter(range(1, 1000)) for request in failing.values()}
    app = Watched(tamper={k: partial(leaves, n) for k, n in failing.items()})
    with caplog.at_level(logging.INFO, "flwr"):
        run(app=app, refine=Refinement(), norm_statistics="average")
    assert "with the last layer in closed form\n" in caplog.text


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_steps_of_a_regression_do_not_depend_on_the_targets_unit(unit):
    def model():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))
        net[2].weight.data *= unit
        return net

    def client_of(partition):
        x, y = tiny_data(partition).tensors
        own = DataLoader(TensorDataset(x, unit * y.float().unsqueeze(1)), 4)
        likelihood = {"loss_fn": F.mse_loss, "likelihood": "gaussian"}
        keep = lambda *_: {}  # noqa: E731
        return FisherClient(model(), own, train_fn=keep, device="cpu", **likelihood)

    refine = Refinement(head=False, steps=4)
    arrays = ArrayRecord(model().state_dict())
    result = run(app=app_by_partition(client_of), arrays=arrays, refine=refine)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss-after-steps"] < 0.9 * metrics["loss-before-steps"]


def test_slopes_of_usual_length_that_lead_far_are_limited():
    """A liar's point where the features of its own sums hardly vary."""
    flattest = []

    def lie(content):
        (record,) = content.array_records.values()
        if "head/gram" in record:
            upper, gram = record["head/gram"].numpy(), torch.zeros(5, 5)
            gram[tuple(torch.triu_indices(5, 5))] = torch.from_numpy(upper).float()
            flattest[:] = [torch.linalg.eigh(gram + gram.triu(1).mT)[1][:, 0]]
        if "slopes" in record:
            slopes = torch.from_numpy(record["slopes"].numpy().copy())
            lengths = slopes.norm(dim=(1, 2), keepdim=True)
            direction = torch.outer(torch.eye(CLASSES)[0], flattest[0])
            record["slopes"] = Array((lengths * direction).numpy())

    strict = {"refine": Refinement(), "policy": Policy.strict()}
    result = run(app=Watched(tamper={1: lie}), clients=5, **strict)
    parts = {u.client: u.limited for u in result.exchange_uploads["head losses"]}
    limited = parts["partition-1"].items()
    assert min(left for name, left in limited if "slopes" in name) < 0.5


def test_a_candidate_that_nobody_takes_costs_no_client_another_ones_loss():
    """A published model with a lower loss was left, for one that clients had spoilt."""
    losses = torch.tensor([[9.0, 0.2], [1, 0.1], [2, 0.3]], dtype=torch.float64)
    slopes = torch.tensor([[7.0, 1.0], [1, 0.5], [1, 2]]).view(3, 2, 1, 1)
    uploads = [
        Upload(n, str(n), 1.0, HeadLossUpload(*own), MetricRecord(), 0)
        for n, own in enumerate(zip(losses, slopes, strict=True))
    ]
    sizes = [Sizes.of(upload.payload, {}) for upload in uploads]
    policy = Policy.strict()
    limited = policy.limit(uploads, sizes, {}, policy.references(sizes, {}))
    left = torch.stack([upload.payload.losses for upload in limited])
    assert left.tolist() == [[2, 0.2], [1, 0.1], [2, 0.2]]
    left = torch.stack([upload.payload.slopes.view(2) for upload in limited])
    assert left.tolist() == [[1, 1], [1, 0.5], [1, 1]]


def test_slopes_are_the_gradients_of_the_losses():
    model, loader = tiny_model().double().eval(), [tiny_data(0).tensors]
    loader = [(x.double(), y) for x, y in loader]
    solved = [randn(0, 3, 4).double(), randn(1, 3).double()]
    asked = model, loader, "3", solved, [0.5, 2.0], F.cross_entropy
    losses, slopes = head_losses(*asked)
    heads = [[*model[3].parameters()], *([s * p for p in solved] for s in (0.5, 2.0))]
    for candidate, loss, slope in zip(heads, losses, slopes, strict=True):
        own = [part.detach().requires_grad_() for part in candidate]
        head, model[3] = model[3], nn.Identity()
        there = F.cross_entropy(F.linear(model(loader[0][0]), *own), loader[0][1])
        model[3] = head
        weight, offset = torch.autograd.grad(there, own)
        wanted = torch.cat([weight, offset.unsqueeze(1)], 1)
        assert float(loss) == pytest.approx(there.item())
        assert relative(slope, wanted) < 1e-10


# --- which layer it is


class Positions(nn.Module):
    """Scores every position, and returns the last one's."""

    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.score(self.body(x).tanh())[:, -1]


def test_the_head_is_the_layer_that_computes_the_outputs():
    x, y = torch.randn(6, 5, 4), torch.zeros(6).long()
    after = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1))
    assert output_layer(Positions().eval(), [(x, y)]) == "score"
    assert output_layer(after.eval(), [(x[:, 0], y)]) == "0"
    model = Positions().eval()
    z = model.body(x[:, -1]).tanh().double()
    for _ in range(2):
        sums = head_sums(model, [(x, y)], "score")
        torch.testing.assert_close(sums.gram[:-1, :-1], z.mT @ z)
        # All its outputs are alike: nobody sees which of them the model returns.
        nn.init.zeros_(model.score.weight)


class Reshaping(nn.Linear):
    def forward(self, x):
        return super().forward(x).reshape(len(x), 2, -1)


class Named(nn.Linear):
    def forward(self, *, data):
        return super().forward(data)


class Pairs(nn.Linear):
    def forward(self, x):
        return super().forward(x[..., :3]).chunk(2, -1)


def test_linear_layers_below_the_head_may_be_called_in_other_ways():
    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Reshaping(4, 6), Named(3, 4), Pairs(3, 4)
            self.head = nn.Linear(2, CLASSES)

        def forward(self, x):
            left, right = self.three(self.two(data=self.one(x).mean(1)))
            return self.head(left * right)

    x, y = torch.randn(6, 4), torch.zeros(6).long()
    assert output_layer(Unusual().eval(), [(x, y)]) == "head"


def zeros_of(model):
    """A model of zeros: what it computes does not show what becomes of its outputs."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: nn.Sequential(m, nn.Softplus()), "not those of an nn.Linear"),
        (lambda m: nn.Sequential(m, nn.Hardtanh(-9, -8, inplace=True)), "not those"),
        (lambda m: nn.Sequential(zeros_of(m), nn.Tanh()), "not those"),
        (lambda m: m.requires_grad_(False), "'0' has frozen"),
        (lambda m: m[0].bias.requires_grad_(False) is None or m, "'0' has frozen"),
        (lambda m: nn.Sequential(m[0], m[0]), "called 2 times"),
    ],
)
def test_what_is_no_head_is_told(spoil, says):
    model = spoil(nn.Sequential(nn.Linear(3, 3))).eval()
    with pytest.raises(StructureError, match=says):
        output_layer(model, [(torch.randn(4, 3), torch.zeros(4).long())])


# --- the steps


def quadratic(size=6):
    """A convex quadratic with its gradient, and a metric that is not its Hessian."""
    root = randn(3, size, size, dtype=torch.float64)
    hessian = root @ root.mT + torch.eye(size)
    metric = hessian.diagonal()

    def at(x):
        return {"w": hessian @ x["w"] - 1}, float(
            0.5 * x["w"] @ hessian @ x["w"] - x["w"].sum()
        )

    return (
        at,
        lambda v: {"w": v["w"] / metric},
        torch.linalg.solve(hessian, torch.ones(size, dtype=torch.float64)),
    )


def test_steps_end_at_the_minimum_and_no_loss_that_is_taken_rises():
    at, inverse, minimum = quadratic()
    x = {"w": torch.zeros(6, dtype=torch.float64)}
    descent, losses = Descent.begin(*at(x), inverse), []
    for _ in range(25):
        tried = {"w": x["w"] + descent.step["w"]}
        slope, loss = at(tried)
        if descent.is_better(loss):
            x = tried
        descent = descent.after(slope, loss, inverse)
        losses.append(descent.loss)
    assert losses == sorted(losses, reverse=True)
    assert relative(x["w"], minimum) < 1e-6


def test_a_step_after_which_the_loss_rose_is_taken_back():
    at, inverse, _ = quadratic()
    slope, loss = at({"w": torch.zeros(6, dtype=torch.float64)})
    far = replace(Descent.begin(slope, loss, inverse), gamma=20.0)._turned(inverse, 1.0)
    after = far.after(*at({"w": far.step["w"]}), inverse)
    assert after.loss == loss
    torch.testing.assert_close(after.gradient, slope)
    assert after.step["w"].norm() <= 0.25 * far.step["w"].norm() * (1 + 1e-12)
    again = after.after(slope, 2e11 + loss, inverse)  # nothing finite there
    assert again.step["w"].norm() <= 0.25 * after.step["w"].norm() * (1 + 1e-12)
    assert len(after.pairs) == 1


def test_two_loops_are_the_dense_update():
    """BFGS's inverse Hessian, pair after pair (Nocedal & Wright 2006, eq. 6.17)."""
    at, inverse, _ = quadratic()
    pairs = []
    for i in range(3):
        step = randn(10 + i, 6, dtype=torch.float64)
        change = at({"w": step})[0]["w"] + 1
        pairs.append(({"w": step}, {"w": change}))
    H = 0.7 * torch.diag(inverse({"w": torch.ones(6, dtype=torch.float64)})["w"])
    for step, change in pairs:
        s, y = step["w"], change["w"]
        rho = 1 / (s @ y)
        left = torch.eye(6) - rho * torch.outer(s, y)
        H = left @ H @ left.mT + rho * torch.outer(s, s)
    g = randn(20, 6, dtype=torch.float64)
    assert relative(two_loops({"w": g}, pairs, inverse, 0.7)["w"], H @ g) < 1e-12


# --- rounds


def run(make=FedFisherOneShot, app=None, clients=3, *, arrays=None, **own):
    of_start = ("checkpoint_dir", "resume", "num_rounds", "train_config")
    start = {k: own.pop(k) for k in of_start if k in own}
    strategy = make(**{"fraction_evaluate": 0.0, "policy": LIFTED, **own})
    grid = LocalGrid(quick_app() if app is None else app, clients)
    return strategy.start(grid, arrays or tiny_arrays(), **start)


def untrained_app():
    """Clients that keep the model as it is."""

    def client_of(partition):
        own = DataLoader(tiny_data(partition), 4)
        keep = lambda *_: {}  # noqa: E731
        return FisherClient(tiny_model(), own, train_fn=keep, device="cpu")

    return Remembering(app_by_partition(client_of), lambda partition: "untrained")


def pooled(clients=3):
    x, y = zip(*(tiny_data(client).tensors for client in range(clients)), strict=True)
    return torch.cat(x), torch.cat(y)


def loss_of(arrays, model=None):
    model = (tiny_model() if model is None else model).eval()
    model.load_state_dict(arrays_to_tensors(arrays), strict=False)
    x, y = pooled()
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def test_fedfisher_ends_in_a_head_and_keeps_its_merge():
    merged, refined = run(refine=None), run()
    assert merged.unrefined is None
    assert same_bits(refined.unrefined, merged.arrays)
    before, after = (arrays_to_tensors(r.arrays) for r in (merged, refined))
    changed = [k for k in before if not torch.equal(before[k], after[k])]
    assert changed == ["3.weight", "3.bias"]
    # It is the discriminant analysis of all data on the merged model's features, at the
    # scale of least loss, and a step from there.
    model = tiny_model().eval()
    model.load_state_dict(before)
    loader = [pooled()]
    sums = head_sums(model, loader, "3")
    solved = lda_head(sums, bias=True)
    scale = refined.train_metrics_clientapp[1]["head-scale"]
    asked = model, loader, "3", solved, [scale], F.cross_entropy
    _, (_, slope) = head_losses(*asked)
    ridge = chosen_ridge(sums, bias=True)
    step = slope @ majorizer(sums, bias=True, bound=0.5, ridge=ridge)
    for name, part, own in zip(changed, solved, step.split([4, 1], 1), strict=True):
        assert relative(after[name], scale * part - own.reshape(part.shape)) < 1e-6
    metrics = refined.train_metrics_clientapp[1]
    assert metrics["loss-before-head"] == pytest.approx(loss_of(merged.arrays))
    assert loss_of(refined.arrays) < loss_of(merged.arrays)
    assert type(refined.details) is type(merged.details)


def test_a_head_that_is_better_stays_but_for_a_step():
    """As after many steps of logistic regression on the same features."""
    again = run()
    for _ in range(8):  # each from the model that the clients do not train any more
        again = run(FedAvg, untrained_app(), arrays=again.arrays, refine=Refinement())
    metrics = again.train_metrics_clientapp[1]
    assert metrics["head-scale"] == 0.0
    assert metrics["head-loss"] == metrics["loss-before-head"]
    assert loss_of(again.arrays) < metrics["head-loss"]


@pytest.mark.parametrize("make", [FedFisherOneShot, FedAvg, AFL])
def test_steps_lower_the_loss_of_all_data(make):
    head, steps = (run(make, refine=Refinement(steps=k)) for k in (0, 6))
    assert loss_of(steps.arrays) < loss_of(head.arrays)
    metrics = steps.train_metrics_clientapp[1]
    assert metrics["loss-after-steps"] == pytest.approx(loss_of(steps.arrays), rel=1e-4)
    assert not [name for name in steps.exchange_uploads if "step" in name]


def dense_solution(block, vector):
    """Return the product with a damped block's inverse, by its whole matrix."""
    own = {k: vector[k].double() for k in block.shapes}
    system = block.to_dense() + DAMPING * torch.eye(block.numel()).double()
    if isinstance(block, Kronecker):
        (A,), (G,) = block.A, block.G
        pi = (A.diagonal().mean() / G.diagonal().mean()).sqrt()
        A, G = (
            each + part * DAMPING**0.5 * torch.eye(len(each)).double()
            for each, part in ((A, pi), (G, 1 / pi))
        )
        matrix = block.as_matrices(own)[0]
        solved = torch.linalg.solve(torch.kron(G, A), matrix.flatten())
        return block.as_params(solved.reshape(1, *matrix.shape))
    return unflatten(torch.linalg.solve(system, flatten(own)), block.shapes)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_the_damped_inverse_is_the_dense_one(structure):
    model = tiny_model().eval()
    F_whole = fisher(model, [pooled()], structure).to(dtype=torch.float64)
    vector = {k: randn(3, *p.shape).double() for k, p in model.named_parameters()}
    found = damped_inverse(F_whole)(vector)
    for block in F_whole.blocks():
        for name, dense in dense_solution(block, vector).items():
            assert relative(found[name], dense) < 1e-10


def test_gradients_of_the_smallest_floats_have_a_metric():
    """As of a model that makes no error: their squares are rounded to few digits."""
    weight = {"0.weight": torch.zeros(4, 3)}
    kfac = fisher(nn.Sequential(nn.Linear(3, 4, bias=False)), [pooled()])
    tensors = curvature_to_tensors(kfac)
    name = "curvature/kfac/0.weight/G"
    tiny = 1e-21 * randn(5, 4, 4)
    tensors[name] = (tiny @ tiny.mT)[None] * torch.ones_like(tensors[name][:1, :1, :1])
    assert tensors_to_curvature(tensors, weight)  # a client's upload is admitted
    inverse = damped_inverse(checked_to_curvature(double(tensors), double(weight)))
    assert inverse(double({"0.weight": torch.ones(4, 3)}))["0.weight"].isfinite().all()


def test_the_first_step_is_that_of_the_pooled_data():
    """A and G are means over all clients' examples."""

    def client_of(partition):
        own = tiny_data(partition).tensors
        data = TensorDataset(own[0].double(), own[1])
        return FisherClient(tiny_model().double(), DataLoader(data, 4), device="cpu")

    model = tiny_model().double().eval()
    arrays = ArrayRecord(model.state_dict())
    options = {"ridge": 1.0, "refine": Refinement(head=False, steps=1)}
    result = run(AFL, app_by_partition(client_of), arrays=arrays, **options)
    before, after = (arrays_to_tensors(a) for a in (result.unrefined, result.arrays))
    model.load_state_dict(before)
    x, y = pooled()
    slope, _ = gradient(model, [(x.double(), y)])
    empirical = FisherOptions(expectation="empirical")
    F_whole = fisher(model, [(x.double(), y)], options=empirical)
    for block in F_whole.to(dtype=torch.float64).blocks():
        for name, step in dense_solution(block, slope).items():
            assert relative(after[name] - before[name], -FIRST * step) < 1e-10


def test_nobody_asks_where_nothing_is_refined():
    app = Watched()
    run(FedAvg, app)
    assert {config.get("job") for config in app.configs} == {"train"}


def headless(**options):
    """An app whose model ends in a tanh, and the arrays to start from."""

    def client_of(partition):
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3), nn.Tanh())
        return FisherClient(model, DataLoader(tiny_data(0), 4), device="cpu")

    torch.manual_seed(0)
    arrays = ArrayRecord(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3)).state_dict())
    return {"app": app_by_partition(client_of, **options), "arrays": arrays}


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_without_such_a_head_stays_and_the_log_says_why(
    masked, tmp_path, caplog
):
    secure = {"secure": SecureSums(), "policy": None} if masked else {}
    results = []
    for refine in (None, Refinement()):
        mods = [SecureSumsMod(state_dir=tmp_path / str(refine))] if masked else []
        with caplog.at_level(logging.INFO, "flwr"):
            results.append(run(**headless(mods=mods), **SUMS, refine=refine, **secure))
    assert same_bits(*(result.arrays for result in results))
    assert "head: it stays as it was, since the model's outputs" in caplog.text
    assert "left out" not in caplog.text


@pytest.mark.parametrize("kind", ["tempered", "cosine", "softcap"])
def test_a_last_layer_that_is_not_linear_stays(kind, caplog):
    class Head(nn.Linear):
        def forward(self, x):
            cosine = 16 * F.linear(F.normalize(x), F.normalize(self.weight))
            return cosine if kind == "cosine" else super().forward(x) / 16

    def make():
        head = (nn.Linear if kind == "softcap" else Head)(8, 3, bias=kind != "cosine")
        if kind == "softcap":
            head.register_forward_hook(lambda m, args, out: torch.tanh(9 * out))
        return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), head)

    def client_of(partition):
        return FisherClient(make(), DataLoader(tiny_data(partition), 4), device="cpu")

    app, arrays = app_by_partition(client_of), ArrayRecord(make().state_dict())
    with caplog.at_level(logging.INFO, "flwr"):
        result = run(app=app, arrays=arrays, refine=Refinement())
    assert same_bits(result.arrays, result.unrefined)
    assert "since the outputs of the last layer '3' are not its weight" in caplog.text
    with pytest.raises(StructureError, match="a method of its class, or a hook"):
        head_sums(make(), [tiny_data(0).tensors], "3")


def test_a_small_heads_large_sums_are_sent_if_they_are_asked_for(caplog):
    """As where a backbone is frozen: few numbers travel, and features are many."""
    model = nn.Sequential(nn.Linear(3, 30), nn.Linear(30, 3))
    model[0].requires_grad_(False)

    def client_of(partition):
        own = DataLoader(tiny_data(partition), 4)
        return FisherClient(copy.deepcopy(model), own, device="cpu")

    arrays = ArrayRecord(model[1].state_dict(prefix="1."))
    few, all_ = (
        run(
            app=app_by_partition(client_of), arrays=arrays, refine=Refinement(head=head)
        )
        for head in ("auto", True)
    )
    assert (
        "the last layer '1' have 990 numbers, more than the model's 93" in caplog.text
    )
    assert same_bits(few.arrays, few.unrefined)
    assert loss_of(all_.arrays, model) < loss_of(few.arrays, model)


def numbers(likelihood, loss_fn, targets, **options):
    """A round of clients whose labels are two numbers: the targets of their inputs."""

    def model():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def client_of(partition):
        x, _ = tiny_data(partition).tensors
        loader = DataLoader(TensorDataset(x, targets(x)), 4)
        train = LocalSGD(loss_fn=loss_fn)
        return FisherClient(model(), loader, train_fn=train, likelihood=likelihood)

    torch.manual_seed(0)
    arrays = ArrayRecord(model().state_dict())
    result = run(app=app_by_partition(client_of), arrays=arrays, **options)
    return result.train_metrics_clientapp[1]


def test_a_regressions_head_is_least_squares():
    metrics = numbers(
        "gaussian",
        F.mse_loss,
        lambda x: torch.stack([x.sum(1), x[:, 0] - 1], 1),
        refine=Refinement(steps=2),
    )
    assert metrics["head-loss"] < 0.5 * metrics["loss-before-head"]
    assert metrics["head-scale"] == 1.0
    assert metrics["loss-after-steps"] < metrics["loss-before-steps"]


def test_sigmoids_have_a_head_too():
    metrics = numbers(
        "bernoulli",
        F.binary_cross_entropy_with_logits,
        lambda x: (x[:, :2] + x[:, 1:] > 0.2).float(),
    )
    assert metrics["head-loss"] < metrics["loss-before-head"]


REFINED = {**SUMS, "refine": Refinement(steps=2)}


@cache
def refined(**start):
    """What an undisturbed run gives."""
    return run(**REFINED, **start)


def test_secure_sums_give_the_same_model(tmp_path):
    plain = run(app=secure_app(tmp_path / "a"), **REFINED)
    secure = {**REFINED, "policy": None, "secure": SecureSums()}
    summed = run(app=secure_app(tmp_path / "b"), **secure)
    assert len(summed.exchange_uploads["head"]) == 1
    assert summed.unrefined is not None
    for name, value in arrays_to_tensors(summed.arrays).items():
        wanted = arrays_to_tensors(plain.arrays)[name]
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "own",
    [
        {"norm_statistics": "refresh"},
        {"refine": Refinement(head=True)},
        {"refine": Refinement(head=False, steps=2)},
    ],
)
def test_with_weights_of_a_loops_own_too(own, tmp_path):
    """What is optional is a mean over examples, whatever weights the training has."""

    def client_of(partition):
        def weighs(*args):
            return {**LocalSGD()(*args), "num-examples": [1, 1, 1000][partition]}

        return tiny_client(partition, train_fn=weighs)

    def merged(secure):
        app = app_by_partition(client_of, mods=[SecureSumsMod(state_dir=tmp_path)])
        return run(FedAvg, app, secure=secure, policy=None, **own).arrays

    plain, masked = (merged(each) for each in (None, SecureSums()))
    assert close(masked, plain, 1e-4)


# Once in each exchange: before its first, second or third client.
@pytest.mark.parametrize("asked", [1, 5, 6, 10, 14, 15, 19])
def test_a_run_that_stops_anywhere_ends_in_the_same_bits(asked, tmp_path):
    whole = refined()
    with pytest.raises(KeyboardInterrupt):
        run(app=killing_app(asked, 3), **REFINED, checkpoint_dir=tmp_path)
    resumed = run(**REFINED, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)
    assert same_bits(resumed.unrefined, whole.unrefined)
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp


def test_sums_that_a_head_was_made_of_may_not_get_lost(tmp_path):
    """Or else the resumed run would end in another model without a word."""
    with pytest.raises(KeyboardInterrupt):
        run(app=killing_app(8, 3), refine=Refinement(), checkpoint_dir=tmp_path)
    path = tmp_path / "uploads-0001" / "exchange-2" / "partition-1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="partition-1 is damaged"):
        run(refine=Refinement(), checkpoint_dir=tmp_path, resume=True)


@pytest.mark.parametrize("request_number", range(2, 8))
def test_a_client_that_fails_is_skipped_by_name(request_number, caplog):
    count = iter(range(1, 100))

    def once(content):
        return fail(content) if next(count) == request_number else None

    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(app=Watched(tamper={1: once}), refine=Refinement(steps=2))
    assert "left out partition-1" in caplog.text
    assert len(result.uploads) == 3
    for value in arrays_to_tensors(result.arrays).values():
        assert value.isfinite().all()
    assert not same_bits(result.arrays, result.unrefined)


def test_a_step_that_is_too_long_is_taken_back_when_a_client_leaves(
    server_patch, caplog
):
    begin = Descent.begin

    def too_long(*args):
        first = begin(*args)
        return replace(first, step=scale(first.step, 3000.0))

    def second(content):
        return fail(content) if next(count) == 3 else None

    server_patch.setattr(Descent, "begin", too_long)
    count = iter(range(1, 100))
    app, refine = Watched(tamper={1: second}), Refinement(head=False, steps=2)
    with caplog.at_level(logging.INFO, "flwr"):
        result = run(app=app, norm_statistics="average", refine=refine)
    assert "left out partition-1" in caplog.text
    assert "step: taken back" in caplog.text
    before, after = (
        result.train_metrics_clientapp[1][name]
        for name in ("loss-before-steps", "loss-after-steps")
    )
    assert after <= 1.05 * before  # of the clients that are left


def test_the_loss_after_steps_is_that_of_the_model_that_is_kept(tmp_path):
    """It was 0 where a client had left the secure sum."""

    def leaves(message, context, stage):
        if stage == "keys" and context.node_config["partition-id"] == 2:
            asked.append(stage)
            assert len(asked) < 3, "gone"  # the training, a gradient; no last loss

    asked, steps = [], Refinement(head=False, steps=1)
    app = secure_app(tmp_path, leaves)
    own = {"policy": None, "secure": SecureSums(), "refine": steps}
    result = run(FedAvg, app, clients=4, **own)
    metrics = result.train_metrics_clientapp[1]
    assert len(asked) == 3
    assert metrics["loss-after-steps"] == pytest.approx(metrics["loss-before-steps"])
    assert same_bits(result.arrays, result.unrefined)


def test_where_nobody_is_left_the_merge_stays(caplog):
    def later(content):
        return fail(content) if next(counts) > 3 else None

    counts = iter(range(1, 1000))
    app = Watched(tamper=dict.fromkeys(range(3), later))
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(app=app, refine=Refinement(steps=2), norm_statistics="average")
    assert same_bits(result.arrays, run(refine=None, norm_statistics="average").arrays)
    assert result.unrefined is None
    assert "head: the model stays that of the step before" in caplog.text


@pytest.mark.parametrize(
    ("name", "refine"),
    [("lda_head", Refinement()), ("damped_inverse", Refinement(head=False, steps=2))],
)
def test_whatever_fails_on_the_server_the_merge_stays(
    name, refine, server_patch, caplog
):
    def out_of_memory(*args, **options):
        raise torch.OutOfMemoryError("no memory left")

    server_patch.setattr(refinement, name, out_of_memory)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(refine=refine)
    assert same_bits(result.arrays, run(refine=None).arrays)
    assert "it failed: OutOfMemoryError('no memory left')" in caplog.text
    assert "in out_of_memory" in caplog.text  # its traceback


def test_a_run_that_goes_on_is_the_run_of_all_its_rounds(tmp_path, caplog):
    whole = refined(num_rounds=2)
    run(**REFINED, num_rounds=1, checkpoint_dir=tmp_path)
    resumed = run(**REFINED, num_rounds=2, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)
    assert same_bits(resumed.unrefined, whole.unrefined)
    assert "Round 1's refined model is taken back" in caplog.text


def test_the_last_round_alone_is_refined():
    result, plain = refined(num_rounds=2), run(**SUMS, refine=None, num_rounds=2)
    assert same_bits(result.unrefined, plain.arrays)
    first, last = (result.train_metrics_clientapp[n] for n in (1, 2))
    assert "loss-before-steps" not in first
    assert last["loss-after-steps"] <= last["loss-before-steps"]


def test_noise_of_privacy_is_not_undone():
    own = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    with pytest.raises(ConfigurationError, match="refine= with privacy="):
        FedAvg(privacy=own, secure=SecureSums(), refine=Refinement())


def test_a_head_asks_clients_that_have_neither_a_name_nor_a_partition():
    """With fraction_train below 1 it asked only those that have one."""
    grid = LocalGrid(tiny_client().as_client_app(), 4)
    for node, partition in grid.nodes.items():
        if partition:
            del grid._contexts[node].node_config["partition-id"]
    strategy = FedFisherOneShot(fraction_train=0.5, fraction_evaluate=0.0)
    assert len(strategy.start(grid, tiny_arrays()).exchange_uploads["head"]) == 4


def stretched(policy, *, refine):
    """Return metrics of clients of which two see features on a larger scale.

    And the true loss of the result.
    """

    def data(partition):
        x = randn(partition, 60, 3).float()
        y = (x[:, 0] + randn(9 + partition, 60) > 0).long()
        return x * (10 if partition > 2 else 1), y

    def client_of(partition):
        own = data(partition)
        keep = lambda *_: {}  # noqa: E731
        return FisherClient(nn.Linear(3, 2), [own], train_fn=keep, device="cpu")

    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 0.3)
    result = run(
        FedAvg,
        app_by_partition(client_of),
        clients=5,
        arrays=ArrayRecord(model.state_dict()),
        policy=policy,
        refine=refine,
    )
    model.load_state_dict(arrays_to_tensors(result.arrays))
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y) for x, y in map(data, range(5))]
    return result.train_metrics_clientapp[1], float(sum(losses)) / 5


def test_a_step_is_within_the_bound_of_sums_that_the_policy_has_cut():
    """The bound of what was left let the step raise the loss of all data."""
    metrics, after = stretched(Policy(max_curvature=1), refine=Refinement(head=True))
    assert after < metrics["head-loss"]


def test_the_last_steps_loss_is_limited_as_those_before():
    """Only it was cut by `max_distance`, so the last step seemed to be a good one."""
    policy = Policy(max_distance=1)
    metrics, after = stretched(policy, refine=Refinement(head=False, steps=1))
    assert metrics["loss-after-steps"] == pytest.approx(after, rel=1e-4)


def test_a_clients_weight_counts_in_its_head():
    """A training's own weight, and not the examples that a pass reads."""

    def app(weights):
        def client_of(partition):
            own = {"num-examples": weights[partition]}
            loader, loop = DataLoader(tiny_data(partition), 4), lambda *_: own
            return FisherClient(tiny_model(), loader, train_fn=loop, device="cpu")

        return app_by_partition(client_of)

    few, many = (run(app=app([scale * n for n in (8, 10, 12)])) for scale in (0.1, 1.0))
    torch.testing.assert_close(
        *(arrays_to_tensors(r.arrays)["3.weight"] for r in (few, many))
    )
    assert "head-loss" in few.train_metrics_clientapp[1]
