"""What a client keeps on its disk from one request of a secure sum to the next."""

import json
from dataclasses import dataclass

from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.errors import ClientError
from flwr_fisher.secure.contribution import Contribution
from flwr_fisher.secure.participant import Participant

_NAME = "secure-sum"


@dataclass(frozen=True)
class SumMemory:
    """What a client remembers from one request of a secure sum to the next.

    Parameters
    ----------
    disk : ClientDisk
        Where.
    participant : Participant
        Its secrets.
    contribution : Contribution
        What it adds to the sum under way.
    index : int
        The sum that told how large the contribution is; -1: there is none.
    """

    disk: ClientDisk
    participant: Participant
    contribution: Contribution
    index: int = -1

    @classmethod
    def new(cls, disk: ClientDisk, client: int, sums: int) -> "SumMemory":
        """Draw the secrets of as many sums."""
        return cls(disk, Participant.new(client, sums), Contribution({}))

    @classmethod
    def load(cls, disk: ClientDisk, index: int) -> "SumMemory":
        """Find what was kept, for a sum of those that it is of.

        Raises
        ------
        ClientError
            If there is nothing, or it has no secrets for that sum.
        """
        kept = disk.load(_NAME)
        if kept is None:
            raise ClientError(
                f"the secrets of this secure sum are not in {disk.path}: it goes on "
                "without this client"
            )
        tensors, note = kept.tensors, json.loads(kept.note)
        participant = Participant.from_json(note["participant"])
        if index >= len(participant.own):
            raise ClientError(
                f"the server asks for sum {index}, and this client has secrets "
                f"for {len(participant.own)}"
            )
        return cls(
            disk,
            participant,
            Contribution(tensors, note["weight"], note["bound"]),
            int(note["index"]),
        )

    def save(self) -> None:
        """Keep it: a client that was restarted goes on with the same secrets."""
        note = json.dumps(
            {
                "participant": self.participant.to_json(),
                "weight": self.contribution.weight,
                "bound": self.contribution.bound,
                "index": self.index,
            }
        )
        tensors = self.contribution.tensors
        num_bytes = sum(value.nbytes for value in tensors.values())
        self.disk.check_room(num_bytes, "what this client adds to a sum")
        self.disk.save(_NAME, tensors, note=note)
