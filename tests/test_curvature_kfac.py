"""K-FAC against loops over positions, and against nngeometry."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import OverTime
from oracles import (
    SMALL_SHAPE,
    dense_fisher,
    flat,
    headed,
    in_double,
    randn,
    relative,
    seeded,
    small_net,
)
from torch import Tensor, nn

from flwr_fisher import curvature
from flwr_fisher.curvature import (
    STRUCTURES,
    Kronecker,
)
from flwr_fisher.curvature.estimate import accumulators
from flwr_fisher.curvature.estimate.accumulators import SecondMoment
from flwr_fisher.errors import (
    StructureError,
)

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

TOLERANCE = 1e-5


# --- K-FAC ----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_is_the_dense_fisher_of_one_linear_layer_on_one_example(
    bias: bool,
) -> None:
    model, x = seeded(lambda: nn.Linear(4, 5, bias=bias)), randn(1, 1, 4)
    assert relative(fisher(model, [x]).to_dense(), dense_fisher(model, x)) <= TOLERANCE


def layer_records(
    model: nn.Module, name: str, inputs: Tensor
) -> list[tuple[Tensor, list[tuple[float, Tensor]]]]:
    """Return one layer's input, and p_c with the gradient at its output, by example."""
    model, inputs = in_double(model, inputs)
    caught: list[tuple[Tensor, Tensor]] = []
    hook = lambda module, args, output: caught.append((args[0].detach(), output))  # noqa: E731
    model.get_submodule(name).register_forward_hook(hook)
    records = []
    for x in inputs:
        log_p = F.log_softmax(model(x.unsqueeze(0)), dim=1)[0]
        layer_input, output = caught.pop()
        gradients = [
            (
                float(v.detach().exp()),
                torch.autograd.grad(v, output, retain_graph=True)[0][0],
            )
            for v in log_p
        ]
        records.append((layer_input[0], gradients))
    return records


def kfac_of_conv(model: nn.Module, name: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return A, summed over positions, and G, averaged, position by position."""
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    (ph, pw), (sh, sw), (dh, dw) = conv.padding, conv.stride, conv.dilation  # type: ignore[misc]
    kh, kw = conv.kernel_size
    A: Any = 0.0
    G: Any = 0.0
    for x, gradients in layer_records(model, name, inputs):
        padded = F.pad(x, [pw, pw, ph, ph])
        _, height, width = gradients[0][1].shape
        for i in range(height):
            for j in range(width):
                top, left = i * sh, j * sw
                rows = slice(top, top + dh * (kh - 1) + 1, dh)
                columns = slice(left, left + dw * (kw - 1) + 1, dw)
                a = padded[:, rows, columns].reshape(-1)
                if conv.bias is not None:
                    a = torch.cat([a, torch.ones(1, dtype=a.dtype)])
                A = A + torch.outer(a, a) / len(inputs)
                for p, g in gradients:
                    at = g[:, i, j]
                    G = G + p * torch.outer(at, at) / (height * width * len(inputs))
    return A, G


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_of_a_convolution_sums_a_and_averages_g_over_positions(bias: bool) -> None:
    conv = lambda: nn.Conv2d(  # noqa: E731
        2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=bias
    )
    model = seeded(lambda: headed(conv(), (2, 4, 4)))
    x = randn(1, 4, 2, 4, 4)
    block = fisher(model, [x]).blocks()[0]
    assert isinstance(block, Kronecker)
    A, G = kfac_of_conv(model, "0", x)
    assert relative(block.A[0], A) <= TOLERANCE
    assert relative(block.G[0], G) <= TOLERANCE


def test_kfac_of_a_linear_layer_over_time_does_the_same() -> None:
    model, x = seeded(OverTime), randn(1, 3, 4, 3)
    block = fisher(model, [x]).blocks()[0]
    assert isinstance(block, Kronecker)
    A: Any = 0.0
    G: Any = 0.0
    for inputs, gradients in layer_records(model, "step", x):
        for t in range(4):
            a = torch.cat([inputs[t], torch.ones(1).double()])
            A = A + torch.outer(a, a) / 3
            G = G + sum(p * torch.outer(g[t], g[t]) for p, g in gradients) / (4 * 3)
    assert relative(block.A[0], A) <= TOLERANCE
    assert relative(block.G[0], G) <= TOLERANCE


class Separate(nn.Module):
    """A grouped convolution, written as one convolution a group."""

    def __init__(self, grouped: nn.Conv2d, rest: nn.Module) -> None:
        super().__init__()
        self.groups = nn.ModuleList()
        size, out = grouped.in_channels // grouped.groups, grouped.out_channels
        out //= grouped.groups
        for g in range(grouped.groups):
            conv = nn.Conv2d(size, out, grouped.kernel_size)  # type: ignore[arg-type]
            conv.weight.data = grouped.weight.data[g * out : (g + 1) * out].clone()
            assert conv.bias is not None
            assert grouped.bias is not None
            conv.bias.data = grouped.bias.data[g * out : (g + 1) * out].clone()
            self.groups.append(conv)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.groups), dim=1)
        outputs = [conv(p) for conv, p in zip(self.groups, parts, strict=True)]
        return self.rest(torch.cat(outputs, dim=1))


def test_kfac_of_a_grouped_convolution_is_that_of_separate_ones() -> None:
    model = seeded(lambda: headed(nn.Conv2d(6, 3, 2, groups=3), (6, 3, 3)))
    grouped = model[0]
    separate = Separate(grouped, copy.deepcopy(model[1:]))
    x = randn(1, 5, 6, 3, 3)
    torch.testing.assert_close(model(x), separate(x))
    block, *_ = fisher(model, [x]).blocks()
    others = fisher(separate, [x]).blocks()
    assert isinstance(block, Kronecker)
    assert block.A.shape[0] == block.G.shape[0] == 3
    for g in range(3):
        other = others[g]
        assert isinstance(other, Kronecker)
        assert relative(block.A[g], other.A[0]) <= TOLERANCE
        assert relative(block.G[g], other.G[0]) <= TOLERANCE


# --- nngeometry -----------------------------------------------------------------------


def nngeometry_matrix(model: nn.Module, x: Tensor, kind: type) -> Any:
    from nngeometry.metrics import FIM
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(x), batch_size=4)
    return FIM(model, loader, kind, "classif_logits", device="cpu")


def test_nngeometry_agrees() -> None:
    from nngeometry.object.pspace import PMatDense, PMatDiag, PMatKFAC

    model, x = seeded(small_net).eval(), randn(1, 6, *SMALL_SHAPE)
    found = dict(nngeometry_matrix(model, x, PMatKFAC).data)
    blocks = fisher(model, [x]).blocks()
    assert len(found) == len(blocks) == 4
    for block in blocks:
        assert isinstance(block, Kronecker)
        A, G = found[block.weight.removesuffix(".weight")]
        # It moves a factor between the two; their product is the same.
        factor = (3 - 1) ** 0.5
        assert relative(block.A[0] * factor, A) <= TOLERANCE
        assert relative(block.G[0] / factor, G) <= TOLERANCE
    diagonal = nngeometry_matrix(model, x, PMatDiag).get_diag()
    ours = fisher(model, [x], structure="diagonal")
    assert relative(flat(ours.diagonal()).float(), diagonal) <= TOLERANCE
    dense = nngeometry_matrix(model, x, PMatDense).data
    ours = fisher(model, [x], structure="dense")
    assert relative(ours.to_dense(), dense) <= TOLERANCE


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_nngeometry_engine_returns_the_same_curvature(structure: str) -> None:
    for make, shape in ((small_net, SMALL_SHAPE), (lambda: nn.Linear(3, 3), (3,))):
        model, x = seeded(make), randn(1, 7, *shape)
        batches = [(x[:3], None), (x[3:6], None), (x[6:], None)]
        ours = fisher(model, batches, structure=structure)
        theirs = fisher(model, batches, structure=structure, engine="nngeometry")
        assert type(ours) is type(theirs)
        assert ours.shapes == theirs.shapes
        assert list(ours.shapes) == list(theirs.shapes)
        # Where eigenvalues are nearly equal, rounding (and so the processor) decides
        # which vectors an eigendecomposition returns.
        tolerance = 10 * TOLERANCE if structure == "ekfac" else TOLERANCE
        for name, entries in ours.diagonal().items():
            assert relative(theirs.diagonal()[name], entries) <= tolerance, name
        assert relative(theirs.to_dense(), ours.to_dense()) <= tolerance
        assert not any(p.requires_grad for p in theirs.diagonal().values())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(2, 2, 2, groups=2), "wrong for grouped convolutions"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), "only zero padding"),
        (nn.Conv2d(2, 2, 3, padding="same"), "only zero padding"),
        (nn.BatchNorm2d(2), "BatchNorm2d is not supported"),
        (nn.Conv2d(2, 2, 2).requires_grad_(False), "frozen parameters"),
        (nn.ConvTranspose2d(2, 2, 2), "ConvTranspose2d is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_nngeometry_engine_refuses_what_it_gets_wrong(
    layer: nn.Module, reason: str
) -> None:
    model = headed(layer, (2, 4, 4))
    with pytest.raises(
        StructureError, match=rf"layer '0' through nngeometry: .*{reason}"
    ):
        fisher(model, [randn(0, 3, 2, 4, 4)], engine="nngeometry")


@pytest.mark.parametrize("size", [1, 4, 5, 8, 9, 70])
def test_half_of_a_second_moment_is_all_of_it(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(accumulators, "_BLOCK", 4)
    columns = randn(0, 2, size, 3).double()
    moment = SecondMoment(2, size, columns)
    moment.add(columns, 2.0)
    moment.add_products(columns @ columns.mT)
    got = moment.mean(6)
    torch.testing.assert_close(got, columns @ columns.mT / 2, rtol=1e-12, atol=1e-12)
    assert got.data_ptr() == moment.total.data_ptr()


def test_a_wide_layers_factors_are_those_of_its_inputs_and_gradients() -> None:
    model, x = seeded(lambda: nn.Linear(300, 4)), randn(1, 20, 300)
    (layer,) = fisher(model, [x]).blocks()
    assert isinstance(layer, Kronecker)
    a = torch.cat([x, torch.ones(20, 1)], 1).double()
    assert relative(layer.A[0], a.mT @ a / 20) < 1e-6
    p = model(x).detach().softmax(-1).double()
    G = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    assert relative(layer.G[0], G.mean(0)) < 1e-5
