"""What a client remembers of a run: found on its disk by what the server sent."""

from dataclasses import dataclass

from torch import Tensor

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request
from flwr_fisher.client.store import ClientStore
from flwr_fisher.errors import ParamsError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, check_same_layout
from flwr_fisher.wire import Roster


@dataclass(frozen=True)
class OwnControl:
    """What a client keeps from one of its rounds to the next: its control variate.

    SCAFFOLD's and TCT's. The server tells in which step it last had a reply of this
    client: from what it kept in that step the client goes on.

    Parameters
    ----------
    store : ClientStore
        Where it is kept.
    like : Mapping[str, Tensor]
        Gives its keys, shapes and dtypes.
    name : str
        The name of its files.
    last_step : int | None
        The step of the last reply that the server had; None: there was none.
    next_step : int
        The step that this request is for.
    """

    store: ClientStore
    like: Params
    name: str
    last_step: int | None
    next_step: int

    @classmethod
    def of(
        cls, problem: LocalProblem, request: Request, name: str, like: Params
    ) -> "OwnControl":
        """Find a client's control variate for a request.

        Raises
        ------
        ClientError
            If it takes more than the client's ``state_bytes``, or the server did not
            say which run and step this is.
        WireError
            If the server's list of clients cannot be read.
        """
        run, limit = request.count("run"), problem.state_bytes
        store = ClientStore(problem.state_dir, run, request.client, max_bytes=limit)
        # That of the last step stays until the server has had this one's.
        store.check_room(2 * sum(v.nbytes for v in like.values()))
        last_step = Roster.from_tensors(request.facts).steps.get(request.client)
        return cls(store, like, name, last_step, request.count("steps") + 1)

    def load(self) -> dict[str, Tensor] | None:
        """Return it, in the shapes and dtypes of `like`; None if there is none.

        One that the server knows of and this disk does not have is told to the log.
        """
        if self.last_step is None:
            return None
        tensors = self.store.load(self.name, self.last_step)
        if tensors is not None:
            what = f"the state of step {self.last_step} in {self.store.path}"
            try:
                check_same_layout(self.like, tensors, what)
                return {n: tensors[n].to(value) for n, value in self.like.items()}
            except ParamsError as error:
                logger.warning("%s: it is another model's, and treated as lost", error)
        logger.warning(
            "The state of step %s is not in %s: the control variate starts from zero",
            self.last_step,
            self.store.path,
        )
        return None

    def save(self, control: Params) -> None:
        """Keep the new one, and the last one until the server has had this reply."""
        self.store.save(self.name, self.next_step, control, keep=self.last_step)
