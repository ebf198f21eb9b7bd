"""Every strategy that there is: what tables of them are made of, or held to."""

from flwr_fisher import strategies
from flwr_fisher.errors import ConfigurationError

KINDS: dict[str, type[strategies.CurvatureStrategy]] = {
    name: value
    for name, value in vars(strategies).items()
    if isinstance(value, type)
    and issubclass(value, strategies.CurvatureStrategy)
    and name != "CurvatureStrategy"
}


def of_sums() -> set[str]:
    """The names of those that take secure sums as they are."""
    from flwr_fisher.secure import SecureSums

    def takes_them(kind: type[strategies.CurvatureStrategy]) -> bool:
        try:
            kind(secure=SecureSums()).check_secure()
        except ConfigurationError:
            return False
        return True

    return {name for name, kind in KINDS.items() if takes_them(kind)}
