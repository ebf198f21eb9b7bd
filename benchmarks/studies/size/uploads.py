"""Uploads of models of several sizes, from a few that are trained for a moment."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord
from harness.page import CACHE
from harness.timing import generated
from tasks import make_model
from torch import Tensor, nn

from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.params import shared_state
from flwr_fisher.wire import Codec, FisherUpload, resolve
from flwr_fisher.wire.budget import byte_limit
from flwr_fisher.wire.codec import PACKED, from_container, to_container
from flwr_fisher.wire.quantise import decode_param, encode_param

BATCH, STEPS, EXAMPLES = 32, 30, 256
MADE = 3  # uploads whose curvature is computed; the others are perturbed


def network(name: str) -> nn.Module:
    """Return a model for ten classes of 32x32 colour images."""
    return make_model(name, shape=(3, 32, 32), num_classes=10)


@lru_cache(maxsize=1)
def trained(name: str, seed: int) -> tuple[dict[str, Tensor], Curvature]:
    """Return parameters after some steps, and their K-FAC by one sampled label."""
    torch.manual_seed(seed)
    model = network(name)
    x, y = generated(STEPS * BATCH + EXAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for inputs, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    sample = list(x[:EXAMPLES].split(BATCH))
    options = FisherOptions.full(expectation="sampled")
    curvature = fisher(model, sample, options=options, seed=seed)
    return shared_state(model), curvature


def perturbed(tensor: Tensor, seed: int) -> Tensor:
    """Return a tensor with noise of a tenth of its own size."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor + 0.1 * tensor.std(correction=0) * noise


def record_of(name: str, seed: int) -> ArrayRecord:
    """Return an upload at FedAvg's size; its bytes are kept on disk."""
    path = CACHE / "size" / f"{name}-{seed}.bin"
    if not path.exists():
        params, curvature = trained(name, seed)
        upload = FisherUpload(params, curvature.scaled(1 + seed))
        record = upload.to_arrays(resolve(Codec("fedavg"), params))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record[PACKED].numpy().tobytes())
    return ArrayRecord({PACKED: Array(np.frombuffer(path.read_bytes(), np.uint8))})


def packed(name: str, count: int) -> Iterator[ArrayRecord]:
    """Yield clients' uploads; those beyond three are perturbed."""
    like = shared_state(network(name))
    codec = resolve(Codec("fedavg"), like)
    made = [record_of(name, seed) for seed in range(min(count, MADE))]
    yield from made
    for seed in range(MADE, count):
        size = byte_limit(like, codec)
        read = from_container(made[seed % MADE], limit=size, count=len(like))
        entries = {key: torch.from_numpy(entry.copy()) for key, entry in read.items()}
        for key, value in like.items():
            if value.is_floating_point():
                own = decode_param(read[key], value, field=key)
                entries[key] = encode_param(perturbed(own, seed), 16)
        yield to_container(entries)
