"""Sums of clients' tensors that nobody can look into, for those who need them.

A strategy is given ``secure=SecureSums()``, a client ``mods=[SecureSumsMod()]``. The
protocol is SecAgg+ (Bell et al., CCS 2020): :class:`Participant` is one client of it,
:class:`Aggregator` the server. It needs ``pip install "flwr-fisher[secure]"``.
"""

from flwr_fisher.errors import extra

with extra("secure"):
    import cryptography  # noqa: F401

from flwr_fisher.secure.aggregator import Aggregator
from flwr_fisher.secure.mod import SecureSumsMod
from flwr_fisher.secure.participant import Participant
from flwr_fisher.secure.sums import SecureSums

__all__ = ["Aggregator", "Participant", "SecureSums", "SecureSumsMod"]
