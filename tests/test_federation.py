"""A SuperLink with TLS and SuperNodes with keys and data of their own, for real.

It takes minutes, most of them spent waiting, so it runs beside the other tests:
conftest starts it when they begin, and this file comes last.
"""

import json

import pytest
from beside import Beside
from flwr.serverapp import Grid

if not hasattr(Grid, "get_nodes"):
    pytest.skip(
        "federation/ wants Flower 1.38, whose SuperLink has one port for all and whose "
        "strategies are told the names of nodes",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.ray, pytest.mark.beside]


def test_a_node_and_the_link_are_killed_and_nothing_is_trained_twice(
    beside: Beside,
) -> None:
    said = beside.said()
    assert "the SuperNode whose key is not registered was refused" in said
    assert (
        "finished trainings: {'hospital-a': 1, 'hospital-b': 1, 'hospital-c': 1}"
        in (said)
    )
    metrics = json.loads((beside.folder / "output" / "metrics.json").read_text())
    accuracy = metrics["accuracy"]
    others = (accuracy["fedavg"], accuracy["best_client"])
    assert accuracy["fedfisher"] > max(others) + 0.05
    # Nobody said which partition it holds: they are known by their registered names.
    names = {row["client"] for row in metrics["clients"]}
    assert names == {"hospital-a", "hospital-b", "hospital-c"}


def test_the_nodes_had_nothing_but_the_bare_library(beside: Beside) -> None:
    beside.said()
    for name in ("hospital-a", "hospital-b", "hospital-c"):
        log = (beside.folder / f"{name}.log").read_text()
        assert "Traceback" not in log
        assert "epoch 30 of 30" in log
