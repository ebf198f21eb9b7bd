"""The paper's codec, which the benchmarks compare with."""

import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import ArrayRecord
from rivals.paper_codec import pack_as_paper, unpack_as_paper
from uploads import SPECTRA, fedavg_reply_bytes, reply_bytes, upload_of

from flwr_fisher.curvature import Kronecker
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.wire import curvature_to_tensors, tensors_to_curvature
from flwr_fisher.wire.arrays import check_second_moment


def sent_and_read(client: LocalPosterior) -> tuple[ArrayRecord, LocalPosterior]:
    record = pack_as_paper(client)
    return record, unpack_as_paper(record, client)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_an_upload_comes_back_in_fedavgs_bytes(name: str, structure: str) -> None:
    client = upload_of(name, structure).posterior(3)
    record, got = sent_and_read(client)
    assert reply_bytes(record) <= fedavg_reply_bytes(dict(client.params))
    for key, value in client.params.items():
        torch.testing.assert_close(got.params[key], value, rtol=0.1, atol=1e-3)
    fedfisher([got, got])


def test_there_is_no_form_for_other_structures() -> None:
    for structure in ("ekfac", "dense"):
        with pytest.raises(ConfigurationError, match="no form for"):
            pack_as_paper(upload_of("cnn", structure).posterior(3))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_no_honest_factor_is_refused_for_its_rounding(spectrum: str) -> None:
    """Rounded to 8 bits and drawn back, a factor of any units has no negative side."""
    for seed in range(5):
        client = upload_of("cnn", "kfac", spectrum=spectrum, seed=seed).posterior(3)
        _, got = sent_and_read(client)
        tensors_to_curvature(curvature_to_tensors(got.curvature), got.params)


def test_inputs_that_are_rarely_on_have_no_negative_eigenvalue() -> None:
    """As of images' corners: rows far below the step of 8 bits."""
    generator = torch.Generator().manual_seed(1)
    on = torch.rand(400, 151, generator=generator) < torch.logspace(0, -4, 151)
    rows = torch.rand(400, 151, generator=generator) * on
    A, G = (rows.mT @ rows / 400).unsqueeze(0), torch.eye(151).unsqueeze(0)
    params = {"w": torch.randn(151, 151, generator=generator)}
    layer = Kronecker("w", params["w"].shape, A, G)
    _, got = sent_and_read(LocalPosterior(params, layer, 3))
    (block,) = got.curvature.blocks()
    assert isinstance(block, Kronecker)
    check_second_moment("A", block.A)
