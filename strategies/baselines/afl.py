"""AFL: the optimal linear head on a frozen backbone, in one round of sums."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_range
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summation, Uploads
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.tangent.frozen_head import HeadSums, closed_form_head
from flwr_fisher.wire import HeadUpload


class AFL(CurvatureStrategy):
    r"""Analytic federated learning (He et al., CVPR 2025): a head in closed form.

    Clients do not train. Each sends :math:`\sum x x^\top` and :math:`\sum x y^\top`
    over the features x of its data, the inputs of the model's last linear layer, and
    one-hot labels y; the server sets that layer to the pooled data's ridge regression,

    .. math:: W = \Big(\sum x x^\top + \lambda I\Big)^{-1} \sum x y^\top,

    which is the same however the data are split. The rest of the model is a frozen
    backbone. AFL is the right method if that backbone is good, such as one that was
    pre-trained on public images. It takes one round; a second would give the same.

    Difference from the paper: there, clients send their own solutions, from which the
    server computes the same head. Here they send the sums, so that `secure` can add
    them.

    Parameters
    ----------
    ridge : float, default 1e-3
        :math:`\lambda` as a share of the mean diagonal entry of :math:`\sum x x^\top`
        over the features.
    head : str, optional
        The linear layer to set; by default the last in the model's definition.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords, ``seed``, ``secure``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.

    Notes
    -----
    An upload has 8 (f + 1) (f + 1 + C) bytes for f features, a bias and C classes, and
    no parameters. With a secure sum, use ``SecureSums(bits=64)`` if the last digits of
    the solution matter.

    Examples
    --------
    ::

        strategy = AFL(fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord(shared_state(pretrained)))
    """

    def __init__(
        self, *, ridge: float = 1e-3, head: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.check_weighted_by_examples("AFL")
        check_range("ridge", ridge, 0)
        self.ridge, self.head = ridge, head

    def exchanges(self, server_round: int) -> Sequence[Exchange[HeadUpload]]:
        """Return one exchange, which asks for sums over every client's data."""
        options = {"job": "afl", "head": self.head or ""}
        summed = Summation[HeadUpload](weighted=False)
        read = HeadUpload.read
        return [
            Exchange(
                options,
                read,
                self._step,
                require_same_parameters=True,
                additive=summed,
            )
        ]

    def _step(self, state: ServerState, uploads: Uploads[HeadUpload]) -> Step:
        """Solve for the head."""
        first = uploads[0].payload
        sums = HeadSums.total([upload.payload.sums for upload in uploads])
        biased = first.bias is not None
        solution = closed_form_head(sums, bias=biased, ridge=self.ridge)
        params = dict(state.params)
        for name, value in zip((first.weight, first.bias), solution, strict=False):
            assert name is not None
            params[name] = value.to(params[name].dtype)
        return Step(ServerState(params), {}, sums)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"ridge": self.ridge, "head": self.head}
