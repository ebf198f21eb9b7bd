"""How secure sums are taken: a strategy's option."""

from dataclasses import dataclass

from flwr_fisher.errors import check_range, check_whole
from flwr_fisher.secure.fixed_point import word_type
from flwr_fisher.secure.graph import degree_for


@dataclass(frozen=True, kw_only=True)
class SecureSums:
    """That the server sees sums over clients, and no client's upload.

    SecAgg+ (Bell et al., CCS 2020): each client's summand is hidden by masks that it
    agrees on with its neighbours, which cancel in the sum. What a malicious server can
    still do, and what stops it, is told in docs/secure-sums.md.

    Parameters
    ----------
    bits : 32 | 64, default 32
        Of a word. The sum of a tensor whose largest entry is below ``2**e`` is off by
        at most ``clients / 2 * 2**-(bits - 1 - ceil(log2(clients + 1)) - e)``.
    threshold : float, default 0.55
        The share of a client's neighbours, more than a half, that must still be there
        to open what it has masked. The rest may leave. Two thirds are for servers that
        may tell clients different things.
    neighbours : int, optional
        With how many others each client shares its secrets. Default: with all, up to 40
        clients; then as many as make it unlikely that a fifth of all clients, who leave
        or are in league with the server, are too many of one's neighbours.

    Raises
    ------
    ConfigurationError
        If a value is out of range.

    Examples
    --------
    ::

        strategy = FedFisherOneShot(aggregate="sums", secure=SecureSums())
    """

    bits: int = 32
    threshold: float = 0.55
    neighbours: int | None = None

    def __post_init__(self) -> None:
        word_type(self.bits)
        check_range("threshold", self.threshold, 0.5, 1)
        if self.neighbours is not None:
            check_whole("neighbours", self.neighbours, 2)

    def degree(self, clients: int) -> int:
        """Return with how many others a client of so many shares its secrets."""
        if self.neighbours is None:
            return degree_for(clients, self.threshold)
        return min(self.neighbours, clients - 1)
