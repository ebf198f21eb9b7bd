"""Uploads that are added up as they come: a server holds a few, however many come."""

import torch
from virtual import LIFTED, quick_app, tiny_arrays

from flwr_fisher.strategies import FedFisherOneShot, MergeOptions
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors


class Punctual(LocalGrid):
    """All clients have replied when the first reply is pulled, as over a long night."""

    most = 0

    def pull_messages(self, message_ids):
        due = [id_ for id_ in message_ids if id_ in self._waiting]
        replies = [self._handle(self._waiting.pop(id_)) for id_ in due]
        if any(reply.metadata.message_type == "train" for reply in replies):
            self.most = max(self.most, len(replies))
        return replies


def merged(grid):
    strategy = FedFisherOneShot(
        aggregate="sums",
        merge=MergeOptions(iterations=1),
        fraction_evaluate=0.0,
        policy=LIFTED,
        norm_statistics="average",
    )
    return arrays_to_tensors(strategy.start(grid, tiny_arrays()).arrays)


def test_no_more_than_a_few_uploads_are_held():
    app = quick_app([0] * 8)
    grid = Punctual(app, 8)
    many = merged(grid)
    assert 1 < grid.most <= 4
    one_by_one = merged(LocalGrid(app, 8))
    for name, value in many.items():
        assert torch.equal(value, one_by_one[name]), name
