"""A method of a user's own, from the library's public faces alone: signSGD.

Bernstein et al., *signSGD with Majority Vote* (ICLR 2019): clients send the signs of
their gradients, the server steps against the sign of their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from virtual import Watched, change_array, tiny_app, tiny_arrays, tiny_client

from flwr_fisher.client import LocalProblem, Reply, Request, register_job
from flwr_fisher.curvature import gradient
from flwr_fisher.errors import ConfigurationError, RoundError, WireError
from flwr_fisher.params import Params, trainable_names
from flwr_fisher.strategies import (
    CurvatureResult,
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Payload, arrays_to_tensors, tensors_to_arrays


@dataclass(frozen=True)
class Signs(Payload):
    """A client's gradient, as int8 signs."""

    signs: dict[str, torch.Tensor]

    def layout(self) -> tuple[str, ...]:
        return tuple(sorted(self.signs))

    def to_arrays(self) -> ArrayRecord:
        return tensors_to_arrays(self.signs)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "Signs":
        signs = arrays_to_tensors(record, limit=10_000)
        for key, sign in signs.items():
            if key not in like or sign.shape != like[key].shape:
                raise WireError("unexpected key or shape", field=key)
            if sign.dtype != torch.int8 or bool((sign.abs() > 1).any()):
                raise WireError("must be int8 signs", field=key)
        return cls(signs)


@register_job("signs")
def signs_job(problem: LocalProblem, request: Request) -> Reply:
    vector, loss = gradient(
        problem.model, problem.trainloader, loss_fn=problem.differentiable_loss
    )
    signs = Signs({key: value.sign().to(torch.int8) for key, value in vector.items()})
    return Reply({"train_loss": loss}, signs.to_arrays())


class SignSGD(CurvatureStrategy):
    def __init__(self, *, lr: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr = lr

    def exchanges(self, server_round: int) -> Sequence[Exchange[Signs]]:
        return [Exchange({"job": "signs"}, Signs.from_arrays, self.vote)]

    def vote(self, state: ServerState, uploads: Sequence[Upload[Signs]]) -> Step:
        params = dict(state.params)
        for key in uploads[0].payload.signs:
            total = sum(upload.payload.signs[key].int() for upload in uploads)
            params[key] = params[key] - self.lr * torch.sign(torch.as_tensor(total))
        return Step(ServerState(params), {"voters": len(uploads)})

    def settings(self) -> dict[str, Any]:
        return {"lr": self.lr}


def run(app: Any, **start: Any) -> CurvatureResult:
    strategy = SignSGD(fraction_evaluate=0.0, lr=0.05)
    return strategy.start(LocalGrid(app, 3), tiny_arrays(), **start)


def test_a_round_is_the_papers() -> None:
    result = run(tiny_app(), num_rounds=1)
    expected = arrays_to_tensors(tiny_arrays())
    votes = dict.fromkeys(trainable_names(tiny_client().problem.model), torch.tensor(0))
    for i in range(3):
        problem = tiny_client(i).problem
        loss_fn = torch.nn.functional.cross_entropy
        local, _ = gradient(problem.model, problem.trainloader, loss_fn=loss_fn)
        votes = {key: votes[key] + local[key].sign() for key in votes}
    for key, vote in votes.items():
        expected[key] = expected[key] - 0.05 * vote.sign()
    actual = arrays_to_tensors(result.arrays)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert result.train_metrics_clientapp[1]["voters"] == 3


def test_what_is_no_sign_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    app = Watched(tiny_app(), {1: change_array("0.bias", lambda a: 2 * a)})
    result = run(app, num_rounds=1)
    assert result.train_metrics_clientapp[1]["voters"] == 2
    assert "left out partition-1" in caplog.text
    assert "'0.bias': must be int8 signs" in caplog.text


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = run(tiny_app(), num_rounds=3)
    app = Watched(tiny_app())
    run(app, num_rounds=2, checkpoint_dir=tmp_path)
    goes_on = run(app, num_rounds=3, checkpoint_dir=tmp_path, resume=True)
    assert [server_round for server_round, _ in app.trained].count(1) == 3
    actual, expected = map(arrays_to_tensors, (goes_on.arrays, whole.arrays))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_job_that_nobody_registered_is_told_with_those_that_there_are() -> None:
    strategy = SignSGD(fraction_evaluate=0.0)
    strategy.exchanges = lambda server_round: [  # type: ignore[method-assign]
        Exchange({"job": "sings"}, Signs.from_arrays, strategy.vote)
    ]
    with pytest.raises(RoundError, match=r"'sings'; known: .*signs"):
        strategy.start(LocalGrid(tiny_app(), 3), tiny_arrays(), num_rounds=1)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is a job 'train' already"):
        register_job("train")(signs_job)
