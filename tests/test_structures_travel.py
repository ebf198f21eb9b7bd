"""Structures: merged to the dense solution, and still mergeable when decoded."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from uploads import STRUCTURES as NAMES
from uploads import upload_of

from flwr_fisher.curvature import BlockDiagonal, FisherOptions, Kronecker, fisher
from flwr_fisher.curvature.structures import STRUCTURES, Form
from flwr_fisher.curvature.structures.kfac import KFAC
from flwr_fisher.errors import WireError
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.merge.posterior import check_posteriors
from flwr_fisher.params import flatten, shared_state, unflatten
from flwr_fisher.wire import LOSSLESS, Codec, FisherUpload, resolve


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    )


def posterior(structure: str, seed: int) -> LocalPosterior:
    model = net(seed)
    x = torch.randn(7, 2, 3, 3)
    curvature = fisher(model, [x], structure, options=FisherOptions.full(tolerance=0))
    return LocalPosterior(shared_state(model), curvature, 3 + seed)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_it_merges_to_the_dense_solution(structure):
    clients = [posterior(structure, seed) for seed in range(3)]
    total = sum(c.num_examples for c in clients)
    mean = fedavg(clients)
    got = fedfisher(
        clients, anchor=0.1, shrink=0.0, damping=0.0, balance=0.0,
        robust=0.0, iterations=500, tolerance=1e-7,
    ).params  # fmt: skip
    for parts in zip(*[c.curvature.blocks() for c in clients], strict=True):
        names, F = list(parts[0].shapes), [part.to_dense().double() for part in parts]
        p = [c.num_examples / total for c in clients]
        H = sum(a * f for a, f in zip(p, F, strict=True))
        H = H + 0.1 * H.trace() / len(H) * torch.eye(len(H), dtype=torch.float64)
        away = [
            flatten({k: c.params[k] - mean[k] for k in names}).double() for c in clients
        ]
        rhs = sum(a * f @ v for a, f, v in zip(p, F, away, strict=True))
        want = unflatten(torch.linalg.solve(H, rhs).float(), parts[0].shapes)
        for name in names:
            torch.testing.assert_close(
                got[name], mean[name] + want[name], rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("structure", NAMES)
@pytest.mark.parametrize("codec", [LOSSLESS, Codec(budget=2.0), Codec(budget=8.0)])
def test_what_is_decoded_can_be_merged(structure, codec):
    """Rounding makes no curvature negative, and no dtype another."""
    for dtype, spectrum in (
        (torch.float16, "flat"),
        (torch.float16, "low-rank"),
        (torch.float32, "low-rank"),
        (torch.float32, "zero"),
        (torch.float64, "flat"),
    ):
        sent = upload_of("mlp", structure, dtype, spectrum)
        record = sent.to_arrays(chosen := resolve(codec, sent.params))
        back = FisherUpload.from_arrays(record, sent.params, chosen)
        unpacked = FisherUpload(dict(back.params), back.curvature.made())
        check_posteriors([unpacked.posterior(3)])


class InputsAlone(Kronecker):
    """A layer's curvature as A ⊗ I, of which only A travels."""

    def __init__(self, weight, weight_shape, A, bias=None):
        eye = torch.eye(weight_shape[0]).unsqueeze(0)
        super().__init__(weight, weight_shape, A, eye, bias)


class InputsStructure(KFAC):
    """A structure that the wire and the merge have never heard of."""

    name, block = "inputs", InputsAlone
    tensors: ClassVar = {"A": Form.MATRIX}

    def parts(self, block):
        return {"A": block.A}

    def block_of(self, name, shape, parts, bias):
        return InputsAlone(name, shape, parts["A"], bias)

    def trace(self, traces):
        return sum(traces["A"]) * 3  # outputs


@pytest.mark.parametrize("codec", [LOSSLESS, Codec(budget=20.0)])
def test_a_structure_that_is_registered_travels(codec, monkeypatch):
    monkeypatch.setitem(STRUCTURES, "inputs", InputsStructure())
    params = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    A = torch.eye(5).unsqueeze(0) * torch.arange(1, 6)
    F = InputsAlone("weight", params["weight"].shape, A, "bias")
    sent = FisherUpload(params, BlockDiagonal([F]))
    record = sent.to_arrays(codec)
    got = FisherUpload.from_arrays(record, params, codec, structure="inputs")
    (block,) = got.curvature.blocks()
    assert isinstance(block.made(), InputsAlone)
    assert block.trace() == pytest.approx(45, rel=1e-3)
    dense = got.curvature.made().to_dense()
    torch.testing.assert_close(dense, F.to_dense(), rtol=1e-3, atol=1e-3)
    merged = fedfisher([got.posterior(2.0), sent.posterior(2.0)]).params
    torch.testing.assert_close(merged["weight"], params["weight"], rtol=1e-3, atol=1e-3)
    with pytest.raises(WireError, match="requested structure 'kfac'"):
        FisherUpload.from_arrays(record, params, codec, structure="kfac")
