"""Rivals that train: on whichever device the clients' networks are."""

import copy

import pytest
import rivals_path  # noqa: F401
import torch
from devices import pretended
from rivals import co_boosting, dense
from rivals.teacher import Ensemble
from test_rivals_students import INPUTS, SMALL, net


@pytest.mark.parametrize("method", [dense, co_boosting])
def test_a_student_learns_on_an_accelerator(method):
    clients = [net(seed, norm=True).to(pretended.NAME) for seed in (0, 1)]
    student = net(2).to(pretended.NAME)
    before = copy.deepcopy(student)
    how = {"num_classes": 4, "epochs": 3, "batch_size": 16, "synthesis": SMALL}
    params = method(clients, student, INPUTS, **how)
    x = torch.rand(64, *INPUTS.shape).to(pretended.NAME)
    with torch.no_grad():
        wanted = Ensemble.of(clients)(INPUTS(x)).softmax(-1)
        old, new = (m(INPUTS(x)).softmax(-1) for m in (before, student))
    assert {value.device.type for value in params.values()} == {pretended.NAME}
    assert torch.dist(new, wanted) < torch.dist(old, wanted)
