"""Names that README and CHANGELOG promised in 0.1's first rooms."""

import importlib

import pytest

MOVED = {
    "curvature.TCTModel": "tangent.TCTModel",
    "curvature.TangentFeatures": "tangent.TangentFeatures",
    "merge.merge_fisher": "merge.fedfisher",
    "merge.merge_sums": "merge.fedfisher_from_sums",
    "merge.tct_update": "tangent.tct_update",
    "merge.tct_steps": "tangent.tct_steps",
    "merge.fagh_step": "rounds.fagh_step",
    "merge.fedexp_step": "rounds.fedexp_step",
    "merge.fedfish_average": "rounds.fedfish_average",
    "merge.fedga_start": "rounds.fedga_start",
    "merge.giant_direction": "rounds.giant_direction",
    "merge.done_direction": "rounds.done_direction",
    "merge.scaffold_step": "rounds.scaffold_step",
    "merge.server_step": "rounds.server_step",
}


def find(name: str) -> object:
    module, _, attribute = f"flwr_fisher.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_name_is_found_and_the_warning_says_where_it_is(old):
    with pytest.warns(DeprecationWarning, match=rf"{old} is now .*{MOVED[old]};"):
        found = find(old)
    assert found is find(MOVED[old])


@pytest.mark.parametrize("room", ["curvature", "merge"])
def test_a_name_that_never_was_is_not_found(room):
    with pytest.raises(AttributeError, match=f"{room}' has no attribute 'fedavgg'"):
        find(f"{room}.fedavgg")
