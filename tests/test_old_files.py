"""Files that the version before wrote."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from flwr_fisher.curvature import Kronecker
from flwr_fisher.curvature.operators.factors import DenseFactor, LowRankFactor
from flwr_fisher.wire import Codec, FisherUpload, tensors_to_arrays

DATA = Path(__file__).parent / "data"
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def test_an_upload_of_format_1_is_read_as_it_was() -> None:
    """Packed when decoding still made every factor dense.

    The file has the packed bytes, and what was read from them then: parameters, and
    the factors `A` and `G` of both layers.
    """
    saved = load_file(DATA / "upload-format-1.safetensors")
    record = tensors_to_arrays({"packed": saved["packed"]})
    like = {name: saved[f"like/{name}"] for name in NAMES}
    got = FisherUpload.from_arrays(record, like, Codec(0.8, factor_bits=6))
    for name in NAMES:
        assert torch.equal(got.params[name], saved[f"params/{name}"])
    kinds = set()
    for layer in got.curvature.made().blocks():
        assert isinstance(layer, Kronecker)
        kinds |= {type(layer.of_inputs), type(layer.of_outputs)}
        for letter, factor in (("A", layer.A), ("G", layer.G)):
            want = saved[f"{letter}/{layer.weight}"]
            rounding = 1e-6 * float(want.abs().max())
            torch.testing.assert_close(factor, want, rtol=1e-6, atol=rounding)
    assert kinds == {DenseFactor, LowRankFactor}  # whole, and by leading vectors
