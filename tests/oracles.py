"""Slow, obviously correct twins, and small inputs for them.

Everything here is a plain loop in float64: no batching over examples, no closed form. A
test compares the library with one of these.
"""

import copy

import torch
from torch import nn
from torch.func import functional_call, jacrev

from flwr_fisher.curvature import (
    STRUCTURES,
    BlockDiagonal,
    Curvature,
    Diagonal,
    FisherOptions,
    Inputs,
    Kronecker,
    WeightedSum,
    fisher,
)
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import flatten, select, unflatten

# Every label, so that only rounding separates a Fisher from the oracles.
EXACT = FisherOptions.full(tolerance=0)


def rng(seed):
    return torch.Generator().manual_seed(seed)


def randn(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=rng(seed), dtype=dtype)


def seeded(make, seed=0):
    """Build a model from a seed, and leave torch's own generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def flat(tensors):
    return torch.cat([t.double().reshape(-1) for t in tensors.values()])


def cut(vector, like):
    out, start = {}, 0
    for name, tensor in like.items():
        out[name] = vector[start : start + tensor.numel()].reshape(tensor.shape)
        start += tensor.numel()
    return out


def relative(got, want):
    """Return the norm of the difference over the norm of `want`; 0 for 0 and 0."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm()
    return float(error / want.double().norm()) if error else 0.0


def in_double(model, inputs):
    twin = copy.deepcopy(model).double().eval()
    return twin, inputs.double() if inputs.is_floating_point() else inputs


# --- the true Fisher ------------------------------------------------------------------


def class_gradients(model, inputs):
    """Return p and the gradient of log p for each example, position and class."""
    model, inputs = in_double(model, inputs)
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    pairs = []
    for x in inputs:
        log_p = model(x.unsqueeze(0)).log_softmax(-1)
        for value in log_p.flatten():
            gradients = torch.autograd.grad(
                value,
                list(named.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            of_names = dict(zip(named, gradients, strict=True))
            pairs.append((float(value.detach().exp()), of_names))
    return pairs


def diagonal_fisher(model, inputs):
    pairs = class_gradients(model, inputs)
    return {
        name: torch.stack([p * g[name] ** 2 for p, g in pairs]).sum(0) / len(inputs)
        for name in pairs[0][1]
    }


def layer_factors(model, name, inputs, *, reduce=False):
    """Return a layer's A and G by loops over examples, classes and positions."""
    model, inputs = in_double(model, inputs)
    layer, calls = model.get_submodule(name), []
    alone = copy.deepcopy(layer)
    groups = getattr(layer, "groups", 1)

    def watch(_, args, output):
        calls.append((args[0].detach(), output))
        return output.clone()  # what comes next may work in place

    layer.register_forward_hook(watch)
    A, G = (torch.zeros(()).double() for _ in "AG")
    for x in inputs:
        log_p = model(x.unsqueeze(0)).log_softmax(-1)
        inputs_of_layer, output = calls.pop()
        a = input_columns(alone, inputs_of_layer, groups)
        if reduce:
            a = a.mean(1, keepdim=True)
        A = A + a.mT @ a / len(inputs)
        for value in log_p.flatten():
            (gradient,) = torch.autograd.grad(value, output, retain_graph=True)
            g = by_position(layer, gradient).unflatten(0, (groups, -1))
            if reduce:
                g = g.sum(2, keepdim=True)
            G = G + value.detach().exp() * g @ g.mT / g.shape[2] / len(inputs)
    return A, G


def input_columns(layer, inputs, groups):
    """Return what a layer multiplies its weight's rows by, ``[groups, T, n]``.

    That is the derivative of an output by its own row, whatever the layer is.
    """
    params = {k: p.detach() for k, p in layer.named_parameters() if p.requires_grad}

    def first_of_groups(params):
        outputs = by_position(layer, functional_call(layer, params, (inputs,)))
        return outputs.unflatten(0, (groups, -1))[:, 0]

    J = jacrev(first_of_groups)(params)  # 0 for the rows of other outputs
    return torch.cat([j.sum(2).reshape(*j.shape[:2], -1) for j in J.values()], 2)


def by_position(layer, outputs):
    """Return one example's outputs, or their gradient, as ``[out, T]``."""
    channels = outputs[0].movedim(-1, 0) if isinstance(layer, nn.Linear) else outputs[0]
    return channels.reshape(len(channels), -1)


def check_exact(model, x, *, diagonal=None, slow=None, tolerance=1e-5):
    """Check every structure against loops: diagonals, and the factors of layers.

    `diagonal` are the parameters of which K-FAC has no more than that, and `slow` those
    that take each example's gradient, where a test knows them.
    """
    want = diagonal_fisher(model, x)
    params = {k: p for k, p in model.named_parameters() if p.requires_grad}
    dtype = next(iter(params.values())).dtype
    for structure in STRUCTURES:
        curvature = fisher(model, [x], structure, options=EXACT)
        assert sorted(curvature.shapes) == sorted(params)
        assert {tensor.dtype for tensor in curvature.tensors()} == {dtype}
        assert not any(tensor.requires_grad for tensor in curvature.tensors())
        for block in curvature.blocks():
            if isinstance(block, Diagonal):
                ((name, entries),) = block.entries.items()
                assert relative(entries, want[name]) <= tolerance, name
                continue
            A, G = layer_factors(model, block.weight.rpartition(".")[0], x)
            assert relative(block.A, A) <= tolerance, block.weight
            assert relative(block.G, G) <= tolerance, block.weight
        if structure == "diagonal":
            assert list(curvature.shapes) == list(params)
            assert set(kinds(curvature).values()) == {Diagonal}
        elif diagonal is not None:
            of_kind = {n for n, kind in kinds(curvature).items() if kind is Diagonal}
            assert of_kind == set(diagonal)
    if slow is not None:
        assert set(Forms.of(copy.deepcopy(model).eval(), Inputs((x,))).others) == slow


def kinds(curvature):
    """Return which kind of block each parameter is in."""
    return {name: type(b) for b in curvature.blocks() for name in b.shapes}


# --- small nets and curvatures --------------------------------------------------------


def headed(body, shape, classes=3):
    """Put a linear classifier behind a layer, for inputs ``[n, *shape]``."""
    body.eval()  # so that looking at the width leaves batch norm's statistics alone
    with torch.no_grad():
        width = body(torch.zeros(1, *shape)).numel()
    return nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.Linear(width, classes))


def small_net():
    """Linear and convolution layers, with and without bias."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2, 3, 2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


SMALL_SHAPE = (1, 4, 4)


class Dense(Curvature):
    """Any matrix as a curvature, for what holds of every kind."""

    def __init__(self, shapes, matrix):
        self.shapes, self.matrix = dict(shapes), matrix

    def matvec(self, vector):
        self.check(vector)
        product = self.matrix @ flatten(select(vector, self.shapes))
        return unflatten(product, self.shapes)

    def diagonal(self):
        return unflatten(self.matrix.diagonal().clone(), self.shapes)

    def scaled(self, factor):
        return self.mapped(lambda matrix: matrix * factor)

    def to_dense(self):
        return self.matrix

    def tensors(self):
        return [self.matrix]

    def mapped(self, function):
        return Dense(self.shapes, function(self.matrix))


def random_psd(size, rank, seed, dtype=torch.float64):
    rows = randn(seed, rank, size, dtype=dtype)
    return rows.mT @ rows / rank


def dense(F):
    """The matrix of a curvature from its tensors, without any of its products."""
    if isinstance(F, Diagonal):
        return torch.diag(flatten(F.entries))
    if isinstance(F, BlockDiagonal):
        return torch.block_diag(*map(dense, F.children))
    if isinstance(F, WeightedSum):
        return sum(weight * dense_in(term, F.shapes) for weight, term in F)
    if not isinstance(F, Kronecker):
        return F.matrix
    blocks = [torch.kron(g, a) for a, g in zip(F.A, F.G, strict=True)]
    matrix = blocks[0].new_zeros(F.numel(), F.numel())
    entries = unflatten(torch.arange(F.numel()), F.shapes)
    for at, block in zip(F.as_matrices(entries).flatten(1), blocks, strict=True):
        matrix[at.unsqueeze(1), at] = block
    return matrix


def dense_in(F, names):
    """The matrix with its rows in another order of the parameters."""
    order = flatten(select(unflatten(torch.arange(F.numel()), F.shapes), names))
    return dense(F)[order][:, order]


def random_kronecker(seed, weight="w", shape=(4, 3), bias=None, groups=1, rank=2):
    size, out = torch.Size(shape), shape[0] // groups
    n = size[1:].numel() + (bias is not None)
    A = [random_psd(n, rank, 100 * seed + 2 * g) for g in range(groups)]
    G = [random_psd(out, rank, 100 * seed + 2 * g + 1) for g in range(groups)]
    return Kronecker(weight, size, torch.stack(A), torch.stack(G), bias)


def random_diagonal(seed, **shapes):
    items = enumerate(shapes.items())
    entries = {
        k: randn(10 * seed + i, *s, dtype=torch.float64).square() for i, (k, s) in items
    }
    return Diagonal(entries)


def random_dense(seed, rank, **shapes):
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    total = sum(size.numel() for size in sizes.values())
    return Dense(sizes, random_psd(total, rank, seed))


def random_blocks(seed):
    """Two layers with K-FAC and a norm with a diagonal, as `fisher` returns them."""
    return BlockDiagonal(
        [
            random_kronecker(3 * seed, "conv.weight", (4, 2, 2), groups=2),
            random_kronecker(3 * seed + 1, "fc.weight", (3, 4), bias="fc.bias"),
            random_diagonal(seed, **{"norm.weight": (4,), "norm.bias": (4,)}),
        ]
    )


CURVATURES = {
    "diagonal": lambda s: random_diagonal(s, w=(2, 3), b=(2,)),
    "kronecker": random_kronecker,
    "kronecker-bias": lambda s: random_kronecker(s, bias="b"),
    "kronecker-groups": lambda s: random_kronecker(s, shape=(6, 2, 2), groups=3),
    "kronecker-groups-bias": lambda s: random_kronecker(
        s, shape=(6, 1, 2), bias="b", groups=3
    ),
    "blocks": random_blocks,
    "weighted-sum": lambda s: WeightedSum(
        [random_blocks(3 * s + i) for i in range(3)], [0.2, 0.0, 1.5]
    ),
    "weighted-sum-mixed": lambda s: WeightedSum(
        [random_kronecker(s, bias="b"), random_dense(s, 3, b=(4,), w=(4, 3))],
        [0.5, 2.0],
    ),
    "sum-of-sums": lambda s: WeightedSum(
        [CURVATURES["weighted-sum"](s), random_blocks(s)], [2.0, 0.1]
    ),
}


# One client's each, as merges are tried on them.
CLIENT_CURVATURES = {
    "diagonal": lambda seed: random_diagonal(seed, w=(2, 3), b=(3,)),
    "kfac": random_blocks,
    "dense": lambda seed: random_dense(seed, 2, w=(2, 3), b=(3,)),
}


def random_like(curvature, seed):
    return {
        name: randn(1000 * seed + i, *shape, dtype=torch.float64)
        for i, (name, shape) in enumerate(curvature.shapes.items())
    }


def posteriors(make, count=3, seed=0):
    """Return clients with random parameters and `make(seed)` as their curvature."""
    found = []
    for i in range(count):
        curvature = make(10 * seed + i + 1)
        params = random_like(curvature, 50 + 10 * seed + i)
        found.append(LocalPosterior(params, curvature, 10 * (i + 1)))
    return found


def as_float32(posterior):
    params = {k: v.float() for k, v in posterior.params.items()}
    curvature = posterior.curvature.to(dtype=torch.float32)
    return LocalPosterior(params, curvature, posterior.num_examples)
