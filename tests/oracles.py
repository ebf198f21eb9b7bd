"""Slow, obviously correct twins, and small inputs for them.

Everything here is a plain loop in float64: no batching over examples, no vmap, no
closed form. A test compares the library with one of these.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature import (
    STRUCTURES,
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
    WeightedSum,
    fisher,
)
from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.merge import LocalPosterior

Tensors = dict[str, Tensor]


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
    """Return p_c(x) and the gradient of log p_c(x) for every example x and class c."""
    model, inputs = in_double(model, inputs)
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = []
    for x in inputs:
        log_p = F.log_softmax(model(x.unsqueeze(0)), dim=1)[0]
        for value in log_p:
            gradients = torch.autograd.grad(
                value, list(named.values()), retain_graph=True, allow_unused=True
            )
            pairs = zip(named.items(), gradients, strict=True)
            filled = {k: torch.zeros_like(p) if g is None else g for (k, p), g in pairs}
            found.append((float(value.detach().exp()), filled))
    return found


def dense_fisher(model, inputs):
    """Return the mean over examples of the sum over classes of p g g^T, ``[d, d]``."""
    parts = [
        p * torch.outer(flat(g), flat(g)) for p, g in class_gradients(model, inputs)
    ]
    return torch.stack(parts).sum(0) / len(inputs)


def diagonal_fisher(model, inputs):
    found = class_gradients(model, inputs)
    return {
        name: torch.stack([p * g[name] ** 2 for p, g in found]).sum(0) / len(inputs)
        for name in found[0][1]
    }


def check_exact(model, x, *, diagonal=None, slow=None, tolerance=1e-5):
    """Check every structure against the dense Fisher of loops.

    `diagonal` are the parameters of which K-FAC has no more than that, and `slow` those
    that take each example's gradient, where a test knows them.
    """
    want = dense_fisher(model, x)
    params = {k: p for k, p in model.named_parameters() if p.requires_grad}
    dtype = next(iter(params.values())).dtype
    places = cut(torch.arange(len(want)), params)
    found = fisher(model, [x], structure=list(STRUCTURES), tolerance=0)
    for structure, curvature in zip(STRUCTURES, found, strict=True):
        assert sorted(curvature.shapes) == sorted(params)
        assert {d.dtype for d in curvature.diagonal().values()} == {dtype}
        assert not any(tensor.requires_grad for tensor in curvature.tensors())
        for block in curvature.blocks():
            rows = flat({n: places[n] for n in block.shapes}).long()
            own = want[rows][:, rows]
            what = f"{structure} of {list(block.shapes)}"
            if isinstance(block, Diagonal):
                assert relative(flat(block.entries), own.diagonal()) <= tolerance, what
            elif isinstance(block, Dense):
                assert relative(block.matrix, own) <= tolerance, what
            elif isinstance(block, EigenKronecker):
                moments = diagonal_in_basis(block, own)
                assert relative(block.moments, moments) <= 10 * tolerance, what
        if structure in ("diagonal", "dense"):
            assert list(curvature.shapes) == list(params)
        elif diagonal is not None:
            own_kind = {n for n, kind in kinds(curvature).items() if kind is Diagonal}
            assert own_kind == diagonal, structure
    if slow is not None:
        forms = Forms.of(copy.deepcopy(model).eval(), Inputs((x,)))
        assert set(forms.others) == slow


def diagonal_in_basis(block, matrix):
    """Return a layer's matrix at each pair of its basis's columns, ``[groups, m, n]``.

    The matrix's rows are in the order of the weight and then the bias.
    """
    moments = torch.zeros(block.moments.shape).double()
    for place in moments.new_ones(moments.shape).nonzero():
        unit = torch.zeros(moments.shape).double()
        unit[tuple(place)] = 1
        turned = block.basis_G.double() @ unit @ block.basis_A.double().mT
        column = flat(block.as_params(turned))
        moments[tuple(place)] = column @ matrix @ column
    return moments


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


def random_psd(size, rank, seed, dtype=torch.float64):
    rows = randn(seed, rank, size, dtype=dtype)
    return rows.mT @ rows / rank


def random_kronecker(seed, weight="w", shape=(4, 3), bias=None, groups=1, rank=2):
    size, out = torch.Size(shape), shape[0] // groups
    n = size[1:].numel() + (bias is not None)
    A = [random_psd(n, rank, 100 * seed + 2 * g) for g in range(groups)]
    G = [random_psd(out, rank, 100 * seed + 2 * g + 1) for g in range(groups)]
    return Kronecker(weight, size, torch.stack(A), torch.stack(G), bias)


def random_eigen(seed, weight="w", shape=(4, 3), bias=None, groups=1):
    """Return random moments in the eigenbasis of a random K-FAC."""
    k = random_kronecker(seed, weight, shape, bias, groups, rank=5)
    bases = [torch.linalg.eigh(factor).eigenvectors for factor in (k.A, k.G)]
    moments = randn(7000 + seed, *k.matrix_shape, dtype=torch.float64).square()
    return EigenKronecker(weight, k.weight_shape, *bases, moments, bias)


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


SHAPES = {
    "conv.weight": (2, 1, 2),
    "conv.bias": (2,),
    "position": (2, 2),
    "norm.weight": (3,),
    "fc.bias": (3,),
    "fc.weight": (3, 2),
}
CURVATURES = {
    "diagonal": lambda s: random_diagonal(s, w=(2, 3), b=(2,)),
    "kronecker": random_kronecker,
    "kronecker-bias": lambda s: random_kronecker(s, bias="b"),
    "kronecker-conv": lambda s: random_kronecker(s, shape=(4, 2, 3, 2), bias="b"),
    "kronecker-groups": lambda s: random_kronecker(s, shape=(6, 2, 2), groups=3),
    "kronecker-groups-bias": lambda s: random_kronecker(
        s, shape=(6, 1, 2), bias="b", groups=3
    ),
    "eigen-bias": lambda s: random_eigen(s, bias="b"),
    "eigen-groups-bias": lambda s: random_eigen(s, shape=(6, 1, 2), bias="b", groups=3),
    "dense": lambda s: random_dense(s, 4, w=(2, 3), b=(2,)),
    "dense-layers": lambda s: random_dense(s, 6, **SHAPES),
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


def cast(curvature, dtype):
    if isinstance(curvature, BlockDiagonal):
        return BlockDiagonal([cast(child, dtype) for child in curvature.children])
    if isinstance(curvature, Diagonal):
        return Diagonal({k: entry.to(dtype) for k, entry in curvature.entries.items()})
    if isinstance(curvature, Dense):
        return Dense(curvature.shapes, curvature.matrix.to(dtype))
    A, G = curvature.A.to(dtype), curvature.G.to(dtype)
    return Kronecker(curvature.weight, curvature.weight_shape, A, G, curvature.bias)


def as_float32(posterior):
    params = {k: v.float() for k, v in posterior.params.items()}
    curvature = cast(posterior.curvature, torch.float32)
    return LocalPosterior(params, curvature, posterior.num_examples)
