"""What a server sends beside parameters, and what all payloads have in common."""

import pytest
import torch

from flwr_fisher.wire import join_groups, split_groups
from flwr_fisher.wire.options import SERVER

PARAMS = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}
GROUPS = {
    "": {"run": torch.tensor(7), "clients": torch.tensor([[1, 2]])},
    "probe": {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2)},
    "control": {"fc.bias": torch.zeros(2)},
}


def listed(groups):
    return [(group, list(tensors)) for group, tensors in groups.items()]


def test_groups_travel_under_the_documented_keys():
    assert SERVER == "server/"
    assert list(join_groups(GROUPS)) == [
        "server/run",
        "server/clients",
        "server/probe/fc.weight",
        "server/probe/fc.bias",
        "server/control/fc.bias",
    ]


@pytest.mark.parametrize("order", [["", "probe", "control"], ["control", "probe", ""]])
def test_groups_come_back_in_their_order(order):
    groups = {group: GROUPS[group] for group in order}
    params, back = split_groups({**PARAMS, **join_groups(groups)})
    assert list(params) == list(PARAMS)
    assert all(params[name] is PARAMS[name] for name in PARAMS)
    assert listed(back) == listed(groups)
    for group, tensors in groups.items():
        assert all(back[group][name] is value for name, value in tensors.items())


def test_the_whole_prefix_makes_a_group_which_ends_at_the_first_slash():
    mixed = {
        "server/probe/a/b.c": torch.tensor(1),
        "fc.bias": torch.tensor(2),
        "server/run": torch.tensor(3),
        "server/probe/b.weight": torch.tensor(4),
        "server.weight": torch.tensor(5),
        "my/server/run": torch.tensor(6),
    }
    params, groups = split_groups(mixed)
    assert list(params) == ["fc.bias", "server.weight", "my/server/run"]
    assert listed(groups) == [("probe", ["a/b.c", "b.weight"]), ("", ["run"])]
    assert join_groups(groups).keys() == mixed.keys() - params.keys()
