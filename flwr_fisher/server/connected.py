"""Nodes that must be there before a server app can begin."""

import time

from flwr.serverapp import Grid

from flwr_fisher.errors import RoundError, check_whole
from flwr_fisher.log_lines import logger


def wait_for_nodes(grid: Grid, minimum: int, timeout: float = 3600.0) -> list[int]:
    """Return the connected nodes, once there are enough.

    In a simulation all are there at once; SuperNodes come one after the other.

    Parameters
    ----------
    grid : Grid
        The server app's.
    minimum : int
        How many there must be.
    timeout : float, default 3600
        Seconds to wait.

    Raises
    ------
    RoundError
        If too few are connected then; at once where the grid's clients are virtual,
        and too few.
    """
    check_whole("minimum", minimum, 1)
    began, said = time.monotonic(), -1
    while len(nodes := list(grid.get_node_ids())) < minimum:
        waited = time.monotonic() - began
        if waited >= timeout or most_nodes(grid, minimum) < minimum:
            raise RoundError(
                f"{len(nodes)} nodes are connected after {waited:.0f} s, and "
                f"{minimum} are needed: start more SuperNodes, or lower min-nodes"
            )
        if len(nodes) != said:
            said = len(nodes)
            logger.info(
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                said,
                minimum,
            )
        time.sleep(1)
    return nodes


def most_nodes(grid: Grid, known: int) -> int:
    """Return how many nodes there can be, as virtual clients' grid says, or `known`."""
    most: int = getattr(grid, "num_supernodes", known)
    return most
