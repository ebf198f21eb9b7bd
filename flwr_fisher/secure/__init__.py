"""Secure sums: the server sees sums over clients, and no client's own tensors.

Pass ``secure=SecureSums()`` to a strategy, and ``mods=[SecureSumsMod()]`` to the client
app. The protocol is SecAgg+ (Bell et al., CCS 2020), with :class:`Participant` for a
client and :class:`Aggregator` for the server. Run
``pip install "flwr-fisher[secure]"`` first.
"""

from flwr_fisher.errors import extra

with extra("secure"):
    import cryptography  # noqa: F401

from flwr_fisher.secure.aggregator import Aggregator
from flwr_fisher.secure.mod import SecureSumsMod
from flwr_fisher.secure.participant import Participant
from flwr_fisher.secure.sums import SecureSums

__all__ = ["Aggregator", "Participant", "SecureSums", "SecureSumsMod"]
