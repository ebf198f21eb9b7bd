"""Uploads of any structure over made-up models, without training or data."""

from dataclasses import dataclass, field

import torch
from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Diagonal, Kronecker
from flwr_fisher.wire import FisherUpload, serialized_bytes, tensors_to_arrays

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """A model's tensors: trained ones by shape, groups of convolutions, and buffers."""

    trained: dict[str, tuple[int, ...]]
    groups: dict[str, int] = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)


def norm(name, n, statistics=True):
    buffers = {
        f"{name}.running_mean": torch.linspace(-1, 1, n),
        f"{name}.running_var": torch.linspace(0.5, 2, n),
        f"{name}.num_batches_tracked": torch.tensor(2**40 + n),
    }
    return {f"{name}.weight": (n,), f"{name}.bias": (n,)}, buffers if statistics else {}


LAYOUTS = {
    "mlp": Layout(
        {"0.weight": (20, 12), "0.bias": (20,), "2.weight": (5, 20), "2.bias": (5,)}
    ),
    "linear": Layout({"weight": (3, 40)}),
    "cnn": Layout(
        {
            "0.weight": (8, 2, 3, 3),
            "0.bias": (8,),
            **norm("1", 8)[0],
            "3.weight": (8, 2, 2, 2),
            "6.weight": (4, 24),
            "6.bias": (4,),
        },
        {"3.weight": 4},
        norm("1", 8)[1],
    ),
    "odd": Layout(
        {
            "scale": (),
            "empty": (0,),
            "format": (3,),
            "ünï.weight": (1, 5),
            "table": (7, 3),
        },
        {},
        {
            "mask": torch.tensor([[True, False]]),
            "steps": torch.tensor([-3, 5], dtype=torch.int32),
            "nothing": torch.zeros(0, 2),
            "small": torch.tensor(1e-30),
        },
    ),
    "depthwise": Layout(
        {
            "0.weight": (64, 1, 3, 3),
            **norm("1", 64)[0],
            "2.weight": (16, 64, 1, 1),
            "3.weight": (10, 16),
        },
        {"0.weight": 64},
        norm("1", 64)[1],
    ),
    "wide": Layout({"0.weight": (60, 150), "0.bias": (60,), "1.weight": (2, 60)}),
}
STRUCTURES = ("kfac", "diagonal")
SPECTRA = ("flat", "steep", "low-rank", "zero", "huge")


def rng(seed):
    return torch.Generator().manual_seed(seed)


def psd(seed, groups, n, spectrum="steep"):
    """``[groups, n, n]``, float64, symmetric positive semi-definite."""
    generator = rng(seed)
    rank = max(n // 4, 1) if spectrum == "low-rank" else n
    draws = torch.randn(groups, n, n, dtype=torch.float64, generator=generator)
    vectors = torch.linalg.qr(draws)[0][..., :rank] if n else draws
    decades = {"steep": 6.0, "huge": 30.0}.get(spectrum, 0.5)
    values = torch.logspace(0, -decades, rank, dtype=torch.float64)
    if spectrum == "zero":
        values = values * 0
    matrices = vectors * values @ vectors.mT
    if spectrum == "huge":  # each row on a scale of its own, too
        scales = torch.logspace(-8, 8, n, dtype=torch.float64)
        matrices = scales[:, None] * matrices * scales
    return (matrices + matrices.mT) / 2


def positive(seed, shape, spectrum="steep"):
    draws = torch.randn(shape, dtype=torch.float64, generator=rng(seed))
    spread = {"steep": 3.0, "huge": 10.0}.get(spectrum, 1.0)
    return (spread * draws).exp() * (spectrum != "zero")


def params_of(layout, dtype=torch.float32):
    trained = {
        name: torch.randn(shape, generator=rng(seed)).to(dtype)
        for seed, (name, shape) in enumerate(layout.trained.items())
    }
    buffers = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in layout.buffers.items()
    }
    return trained | buffers


def curvature_of(layout, structure, dtype=torch.float32, spectrum="steep", seed=0):
    """A random curvature over a layout's trained tensors."""
    shapes = {name: torch.Size(shape) for name, shape in layout.trained.items()}
    if structure == "diagonal":
        return Diagonal(
            {
                name: positive(seed + i, shape, spectrum).to(dtype)
                for i, (name, shape) in enumerate(shapes.items())
            }
        )
    parts = []
    for i, (name, shape) in enumerate(shapes.items(), start=seed):
        if name.endswith("weight") and len(shape) > 1:
            bias = name.removesuffix("weight") + "bias"
            bias = bias if bias in shapes else None
            parts.append(_layer(layout, name, bias, dtype, spectrum, i))
    covered = {name for part in parts for name in part.shapes}
    rest = {
        name: positive(i, shape, spectrum).to(dtype)
        for i, (name, shape) in enumerate(shapes.items(), start=seed)
        if name not in covered
    }
    return BlockDiagonal([*parts, Diagonal(rest)] if rest else parts)


def _layer(layout, name, bias, dtype, spectrum, seed):
    shape = torch.Size(layout.trained[name])
    groups = layout.groups.get(name, 1)
    inputs, outputs = shape[1:].numel() + (bias is not None), shape[0] // groups
    A, G = psd(seed, groups, inputs, spectrum), psd(seed + 1, groups, outputs, spectrum)
    return Kronecker(name, shape, A.to(dtype), G.to(dtype), bias)


def upload_of(name, structure, dtype=torch.float32, spectrum="steep", seed=0):
    layout, wide = LAYOUTS[name], torch.promote_types(dtype, torch.float32)
    curvature = curvature_of(layout, structure, wide, spectrum, seed)
    return FisherUpload(params_of(layout, dtype), curvature)


def reply_bytes(record):
    """What a whole reply weighs, with its metrics."""
    metrics = MetricRecord({"num-examples": 123456, "train-loss": 0.123456789})
    return serialized_bytes(RecordDict({"arrays": record, "metrics": metrics}))


def fedavg_reply_bytes(params):
    """What FedAvg's reply weighs, in float32."""
    plain = {k: v.float() if v.is_floating_point() else v for k, v in params.items()}
    return reply_bytes(tensors_to_arrays(plain))
