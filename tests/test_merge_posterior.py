"""A posterior has its model's own tensors, and a merge notices if they change."""

import copy
import pickle

import pytest
import torch
from oracles import randn, seeded
from torch import nn

from flwr_fisher.curvature import fisher
from flwr_fisher.errors import ParamsError
from flwr_fisher.merge import (
    DiagonalSums,
    LocalPosterior,
    fedavg,
    fedfisher,
    fisher_merge,
    matched,
    refresh_norms,
)
from flwr_fisher.params import shared_state
from flwr_fisher.report import accuracies

DATA = [(randn(1, 8, 3), torch.arange(8) % 2)]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def clients(structure="diagonal"):
    models = [seeded(net, seed) for seed in (1, 2)]
    return models, [
        LocalPosterior(shared_state(m), fisher(m, DATA, structure=structure), 8)
        for m in models
    ]


MERGES = {
    "fedavg": fedavg,
    "fedfisher": fedfisher,
    "robust": lambda posteriors: fedfisher(posteriors, outlier=1.5),
    "fisher_merge": fisher_merge,
    "matched": matched,
    "sums": DiagonalSums.of,
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_a_merge_refuses_parameters_that_were_written_over(merge):
    models, posteriors = clients()
    models[1].load_state_dict(fedfisher(posteriors).params)
    with pytest.raises(ParamsError, match=r"posterior 1: '0.weight' was changed "):
        merge(posteriors)


def test_a_merge_refuses_a_model_that_was_trained_further():
    models, posteriors = clients()
    models[0](DATA[0][0])  # in train mode, so that a batch norm's statistics change
    with pytest.raises(ParamsError, match=r"posterior 0: '1.num_batches_tracked'"):
        fedavg(posteriors)
    models, posteriors = clients()
    optimizer = torch.optim.SGD(models[0][3].parameters(), lr=0.1)
    models[0].eval()(DATA[0][0]).sum().backward()
    optimizer.step()
    with pytest.raises(ParamsError, match=r"posterior 0: '3.weight'"):
        fedavg(posteriors)


def test_what_leaves_a_model_as_it_was_is_no_change():
    models, posteriors = clients()
    before = fedfisher(posteriors).params
    for structure in ("kfac", "diagonal"):
        fisher(models[0], DATA, structure=structure)
    accuracies(models[0], {"merged": before, "own": posteriors[1].params}, DATA)
    merged = copy.deepcopy(models[0])
    merged.load_state_dict(before)
    refresh_norms(merged, DATA)
    after = fedfisher(posteriors).params
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_can_be_merged(copied):
    _, posteriors = clients()
    want = fedavg(posteriors)
    for ours in (
        [copied(posterior) for posterior in posteriors],
        pickle.loads(pickle.dumps(posteriors)),
    ):
        got = fedavg(ours)
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_inference_tensors_have_no_counter():
    with torch.inference_mode():
        model = seeded(net, 1)
    F = clients()[1][0].curvature
    state = shared_state(model)
    assert fedavg([LocalPosterior(state, F, 1)]).keys() == state.keys()
