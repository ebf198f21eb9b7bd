"""The policy of a round: limits on a single client's influence."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from flwr_fisher.errors import WireError
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import WEIGHT, P, Upload
from flwr_fisher.wire import Payload

_LARGEST = 1e18  # the largest plausible size; float32 holds its square
_FEWEST = 3  # between two clients, nobody can say which one is wrong
# The limit of a part that clients keep is at least _LATE times the median of each
# earlier round, times _FADES for each round since.
_LATE = 0.25
_FADES = 0.98
_FIRST = "first "  # the prefix of the name of a part's first reference


@dataclass(frozen=True)
class Sizes:
    """The sizes of an upload that a policy limits, in float64.

    Parameters
    ----------
    step_norms, curvature_norms : Mapping[str, float]
        The results of the methods of :class:`~flwr_fisher.wire.schema.Payload`.
    """

    step_norms: Mapping[str, float]
    curvature_norms: Mapping[str, float]

    @classmethod
    def of(
        cls, payload: Payload, like: Params, measured: Mapping[str, float] = {}
    ) -> "Sizes":
        """Return an upload's sizes; this unpacks its parameters.

        `measured` are the further lengths of its exchange.
        """
        return cls({**payload.step_norms(like), **measured}, payload.curvature_norms())

    def check_plausible(self) -> None:
        """Raise :class:`WireError` for sizes that only a diverged training can have."""
        for name, size in {**self.step_norms, **self.curvature_norms}.items():
            if not (isfinite(size) and size <= _LARGEST):
                reason = f"is of size {size:g}, which is not possible unless the "
                reason += "client's training has diverged"
                raise WireError(reason, field=name)


class Policy(Options):
    r"""Limits a single client's influence on a round of three clients or more.

    What exceeds a limit is cut down to it, so more never counts for less. The defaults
    are for honest clients. They cut only what no honest client could send: a federation
    whose sizes span three decades is left as it is, bit for bit. But a client that lies
    can have nearly all of the weight. Where clients may lie, use :meth:`strict`.

    Of M clients, one has at most the share :math:`k / (k + \lceil M / 2 \rceil - 1)` of
    the weight, for `max_weight` k, because half of all clients have the median or more.
    With :meth:`strict` this is 20 % for ten clients, and 10 % if all have the same
    size. The client moves a mean by this share of at most `max_distance` references.
    The same holds for curvature and `max_curvature`.

    The reference is at most `max_distance` times the first round's median. Otherwise a
    client that has moved the model far could go on and on, because all others take long
    steps from there. So no client moves by more than ``max_distance ** 2`` times the
    first round's median, or the present one if that is longer.

    Some clients keep a part of their upload on their disk, such as :class:`Scaffold`'s
    change of a control variate. They keep no more of it than the server used: their
    next request says how much that was. For such a part, the medians of earlier rounds
    count, too: the reference is at least a quarter of each, times 0.98 for each round
    since. So a client that is still on its way when the others have arrived gets there,
    too, and one that never arrives does not get far in a few rounds. All that one
    client adds to what the server keeps is at most ``14 * max_distance`` times its
    share of the sum of all rounds' medians.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    """

    max_weight: float = option(
        1000.0,
        "How much a client may weigh, in multiples of the clients' median: nobody can "
        "check how many examples it has. ``inf`` lifts the limit.",
        low=1,
    )
    max_distance: float = option(
        1000.0,
        "How far a client's parameters may be from those that it was sent, and how "
        "long its gradient or any other vector may be, in multiples of the reference: "
        "the clients' median, with the two exceptions above. ``inf`` lifts the limit.",
        low=1,
    )
    max_curvature: float = option(
        inf,
        "How large a client's curvature of a layer may be, times its weight, in "
        "multiples of the clients' median. It also limits products with a curvature, "
        "and moments of inputs. No limit by default: honest clients' curvatures differ "
        "by any factor.",
        low=1,
    )
    limit_scores: bool = option(
        False,
        "Whether `max_weight` holds in evaluations, too. Otherwise they are weighted "
        "as clients report, as Flower's are.",
    )

    @classmethod
    def strict(cls) -> "Policy":
        """Return limits for clients that may lie: none counts more than the median.

        They also affect honest clients. A client with more data than others loses
        weight, in training and in evaluations, and a client's long steps are shortened.

        Examples
        --------
        >>> Policy.strict()
        Policy(max_weight=1, max_distance=1, max_curvature=1, limit_scores=True)
        """
        return cls(max_weight=1, max_distance=1, max_curvature=1, limit_scores=True)

    @property
    def is_stricter(self) -> bool:
        """Whether it limits uploads more than the default does.

        Examples
        --------
        >>> Policy(max_curvature=9).is_stricter, Policy(limit_scores=True).is_stricter
        (True, False)
        """
        return any(
            getattr(self, name) < default
            for name, default in Policy().settings().items()
            if name != "limit_scores"
        )

    def limit(
        self,
        uploads: Sequence[Upload[P]],
        sizes: Sequence[Sizes],
        like: Params,
        references: Mapping[str, float],
    ) -> list[Upload[P]]:
        """Return the uploads, each scaled down to the limits.

        An upload within the limits comes back as it is. Any other one has in its
        `limited` which parts were cut, and what is left of each.

        Parameters
        ----------
        uploads : Sequence[Upload]
            The uploads of one exchange, all with the same layout.
        sizes : Sequence[Sizes]
            The uploads' sizes, from :meth:`Sizes.of`.
        like : Mapping[str, Tensor]
            The parameters that the server sent.
        references : Mapping[str, float]
            The result of :meth:`references` for these sizes.
        """
        if len(uploads) < _FEWEST:
            return list(uploads)
        weights = self.weights([upload.num_examples for upload in uploads])
        left: list[dict[str, float]] = [{} for _ in uploads]  # shares of cut parts

        def cut(name: str, before: Sequence[float], after: Sequence[float]) -> None:
            for shares, old, new in zip(left, before, after, strict=True):
                if new < old:
                    shares[name] = new / old

        for name in sizes[0].step_norms:
            lengths = [size.step_norms[name] for size in sizes]
            cut(name, lengths, self.distances(lengths, references.get(name)))
        for name in sizes[0].curvature_norms:
            pairs = zip(weights, sizes, strict=True)
            norms = [weight * size.curvature_norms[name] for weight, size in pairs]
            cut(name, norms, self.curvatures(norms))
        return [
            _limited(upload, weight, shares, like)
            for upload, weight, shares in zip(uploads, weights, left, strict=True)
        ]

    def references(
        self, sizes: Sequence[Sizes], before: Mapping[str, float], kept: str = ""
    ) -> dict[str, float]:
        """Return each part's reference length; its limit is a multiple of it.

        Parameters
        ----------
        sizes : Sequence[Sizes]
            The sizes of one exchange's uploads.
        before : Mapping[str, float]
            The result of :func:`remembered` in the round before.
        kept : str
            The part that clients keep.

        Examples
        --------
        >>> sizes = [Sizes({"step": length}, {}) for length in (1.0, 2.0, 5.0)]
        >>> Policy().references(sizes, {})
        {'step': 2.0}
        >>> Policy().references(sizes, {"first step": 1e-3})
        {'step': 1.0}
        >>> Policy().references(sizes, {"step": 40.0}, kept="step")
        {'step': 9.8}
        """
        if len(sizes) < _FEWEST or self.max_distance == inf:
            return {}
        lengths = {}
        for name in sizes[0].step_norms:
            every = [size.step_norms[name] for size in sizes]
            most = self.max_distance * before.get(_FIRST + name, inf)
            if (length := min(_usual(self.max_distance, every), most)) < inf:
                lengths[name] = length
        if kept in lengths:
            lengths[kept] = max(lengths[kept], _LATE * _FADES * before.get(kept, 0.0))
        return lengths

    def weights(self, weights: Sequence[float]) -> list[float]:
        """Return weights, each at most `max_weight` times the median.

        Examples
        --------
        >>> Policy().weights([10, 100, 10_000])
        [10, 100, 10000]
        >>> Policy.strict().weights([10, 100, 10_000])
        [10, 100, 100]
        """
        return _at_most(self.max_weight, weights)

    def distances(
        self, distances: Sequence[float], reference: float | None = None
    ) -> list[float]:
        """Return lengths, each at most `max_distance` times the reference.

        The default reference is the median. What is no longer than that is never cut.
        """
        return _at_most(self.max_distance, distances, reference)

    def curvatures(self, curvatures: Sequence[float]) -> list[float]:
        """Return sizes, each at most `max_curvature` times the median."""
        return _at_most(self.max_curvature, curvatures)


def _at_most(
    multiple: float, values: Sequence[float], reference: float | None = None
) -> list[float]:
    """Return values clipped at a multiple of the reference, by default the median."""
    if multiple == inf:
        return list(values)
    median = _usual(multiple, values)
    most = max(median, multiple * (median if reference is None else reference))
    return [min(value, most) for value in values]


def _usual(multiple: float, values: Sequence[float]) -> float:
    """Return the median, or infinity if too few values show what is usual.

    Where a limit is above the median, zeros show nothing: of a feature that few
    clients have, most send 0.
    """
    some = [value for value in values if value or multiple <= 1]
    return statistics.median(some) if len(some) >= _FEWEST else inf


def remembered(
    references: Mapping[str, float], before: Mapping[str, float], kept: str = ""
) -> dict[str, float]:
    """Return the numbers that the next round's references need.

    Parameters
    ----------
    references : Mapping[str, float]
        This round's references.
    before : Mapping[str, float]
        The result of this function in the round before.
    kept : str
        The part that clients keep.

    Examples
    --------
    >>> remembered({"step": 2.0}, {"first step": 1.0, "step": 5.0}, "step")
    {'first step': 1.0, 'step': 4.9}
    """
    first = {_FIRST + name: length for name, length in references.items() if length}
    largest = {}  # median so far, faded
    if kept in references:
        largest[kept] = max(references[kept], _FADES * before.get(kept, 0.0))
    return {**first, **before, **largest}


def _limited(
    upload: Upload[P], weight: float, factors: Mapping[str, float], like: Params
) -> Upload[P]:
    """Return an upload with another weight, and its parts times factors."""
    payload, limited = upload.payload, dict[str, float]()
    if weight != upload.num_examples:
        limited[WEIGHT] = weight / upload.num_examples
        payload = payload.reweighted(limited[WEIGHT])
    if factors:
        limited |= factors
        payload = payload.scaled(factors, like)
    if not limited:
        return upload
    return replace(upload, num_examples=weight, payload=payload, limited=limited)


def limits_of(
    limited: Mapping[str, Mapping[str, float]], clients: Sequence[str]
) -> dict[str, int | list[float]]:
    """Return the metrics of a round's limits: how many clients, and what was left.

    ``limited-weights`` and ``limited-parts`` have an entry for each of these `clients`.
    """
    every = [{WEIGHT: 1.0} | dict(limited.get(client, {})) for client in clients]
    weights = {"limited-weights": [parts.pop(WEIGHT) for parts in every]}
    parts = {"limited-parts": [min([1.0, *parts.values()]) for parts in every]}
    return {"num-limited": len(limited), **weights, **parts} if limited else {}
