"""What takes no memory until it is used."""

import pickle
from collections.abc import Callable

import pytest
import torch
from oracles import posteriors, random_blocks, random_kronecker, random_like
from uploads import upload_of

from flwr_fisher.curvature import BlockDiagonal, Curvature, Deferred, Kronecker
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.wire import Codec, FisherUpload, resolve


def counted(curvature: Curvature) -> tuple[Deferred, list[int]]:
    made: list[int] = []

    def make() -> Curvature:
        made.append(1)
        return curvature

    return Deferred(curvature, make), made


def test_it_does_all_that_the_curvature_does() -> None:
    curvature = random_kronecker(1, bias="b", rank=6)
    deferred, made = counted(curvature)
    v = random_like(curvature, 2)
    assert not made
    assert deferred.shapes == curvature.shapes
    assert deferred.numel() == curvature.numel()
    assert deferred.kind == "Kronecker"
    assert deferred.nbytes == 0
    assert not made
    for act in (
        lambda f: f @ v,
        lambda f: f.diagonal(),
        lambda f: f.solve(v, damping=0.1),
        lambda f: (2.0 * f) @ v,
        lambda f: f.to(dtype=torch.float64) @ v,
        lambda f: (f + f) @ v,
    ):
        for key, value in act(curvature).items():
            assert torch.equal(act(deferred)[key], value)
    assert deferred.trace() == curvature.trace()
    assert torch.equal(deferred.to_dense(), curvature.to_dense())
    assert isinstance(deferred.regularised(shrink=0.5), Kronecker)
    assert deferred.made() is curvature
    assert "Kronecker" in repr(deferred)


def deferred_twin(
    posterior: LocalPosterior, on_make: Callable[[], None]
) -> LocalPosterior:
    def block(own: Curvature) -> Deferred:
        def make() -> Curvature:
            on_make()
            return own

        return Deferred(own, make)

    curvature = BlockDiagonal([block(b) for b in posterior.curvature.blocks()])
    return LocalPosterior(posterior.params, curvature, posterior.num_examples)


@pytest.mark.parametrize("solver", ["pcg", "cg", "gd", "adam"])
def test_a_merge_makes_each_block_of_each_client_once(solver: str) -> None:
    clients, made = posteriors(random_blocks), []
    later = [deferred_twin(client, lambda: made.append(1)) for client in clients]
    want = fedfisher(clients, solver=solver, iterations=5)
    got = fedfisher(later, solver=solver, iterations=5)
    assert len(made) == sum(len(c.curvature.blocks()) for c in clients)
    assert got.shares == want.shares
    for key, value in want.params.items():
        assert torch.equal(got.params[key], value)
    for key, value in fedavg(clients).items():
        assert torch.equal(fedavg(later)[key], value)


def test_uploads_with_other_groups_have_another_layout() -> None:
    """A single client's ended the run, in a merge of unlike factors."""
    one, two = (random_kronecker(1, groups=groups) for groups in (1, 2))
    layouts = [FisherUpload({}, F).layout() for F in (one, two, counted(two)[0])]
    assert layouts[0] != layouts[1] == layouts[2]


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_a_packed_curvature_stays_packed_until_it_is_merged(budget: float) -> None:
    sent = upload_of("wide", "kfac")
    chosen = resolve(Codec(budget=budget), sent.params)
    got = FisherUpload.from_arrays(sent.to_arrays(chosen), sent.params, chosen)
    assert got.curvature.nbytes == 0
    made = FisherUpload(dict(got.params), got.curvature.made())
    assert made.curvature.nbytes > 0
    clients = [upload.posterior(3.0) for upload in (got, made)]
    later, now = (fedfisher([client, client], anchor=0.1).params for client in clients)
    for key, value in now.items():
        assert torch.equal(later[key], value)


def test_a_packed_upload_is_pickled_as_what_it_holds() -> None:
    sent = upload_of("mlp", "kfac")
    chosen = resolve(Codec("fedavg"), sent.params)
    got = FisherUpload.from_arrays(sent.to_arrays(chosen), sent.params, chosen)
    assert got.curvature.nbytes == 0
    copy = pickle.loads(pickle.dumps(got))
    assert torch.equal(copy.curvature.to_dense(), got.curvature.to_dense())
    assert all(
        torch.equal(copy.params[key], value) for key, value in got.params.items()
    )
