"""The report's table of each client's influence on the merge."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_fisher.log_lines import logger
from flwr_fisher.merge import LocalPosterior, MergeResult, influence
from flwr_fisher.merge.options import Score
from flwr_fisher.report.folder import log_table
from flwr_fisher.strategies import Upload

MOST_CLIENTS = 20
# Parameters times clients squared, which all merges without one client read: seconds
# for a small model, and many minutes for a ResNet of twenty clients.
MOST_WORK = 1e8
_QUICK = ("pcg", "cg", "closed-form")
_NO_SCORES = (
    "The table of influence has no accuracies: clients have measured the batch norms "
    "of the merge, and of no merge without one of them"
)


def influences(
    uploads: Sequence[Upload[Any]], merged: MergeResult, score: Score | None
) -> list[dict[str, Any]]:
    """Return one row for each client, the largest influence first.

    Parameters
    ----------
    uploads : Sequence[Upload]
        The merged uploads.
    merged : MergeResult
        The merge.
    score : Callable[[dict[str, Tensor]], float], optional
        The accuracy of parameters. None if clients have measured the merge's norms:
        they have not measured those of the merges without one of them.

    Returns
    -------
    list[dict[str, Any]]
        ``client``, ``examples``, ``share`` (of the curvature), ``distance`` (see
        :class:`~flwr_fisher.merge.Influence`) and, with a score, ``accuracy_without``.
        Empty if the influences are not computed; the log says why.
    """
    posteriors = []
    if merged.shares:  # or else the uploads are sums
        posteriors = [u.payload.posterior(u.num_examples) for u in uploads]
    if reason := _why_not(posteriors, merged):
        logger.info("Skipping the table of influence: %s", reason)
        return []
    if score is None:
        logger.info(_NO_SCORES)
    each = influence(posteriors, merged, score=score)
    rows = [
        {
            "client": upload.client,
            "examples": upload.num_examples,
            "share": share,
            "distance": own.distance,
            **({} if score is None else {"accuracy_without": own.score}),
        }
        for upload, share, own in zip(uploads, merged.shares, each, strict=True)
    ]
    return sorted(rows, key=lambda row: -row["distance"])


def log_influences(rows: Sequence[Mapping[str, Any]]) -> None:
    """Log the table, if there are rows."""
    if not rows:
        return
    columns = ["client", "examples", "share", "moves model"]
    cells = [
        [
            row["client"],
            f"{row['examples']:g}",
            f"{100 * row['share']:.1f} %",
            f"{row['distance']:.2f} x",
        ]
        for row in rows
    ]
    if "accuracy_without" in rows[0]:
        columns.append("accuracy without")
        for cell, row in zip(cells, rows, strict=True):
            cell.append(f"{100 * row['accuracy_without']:.1f} %")
    log_table("Influence: the merge without each client", columns, cells)


def _why_not(posteriors: Sequence[LocalPosterior], merged: MergeResult) -> str:
    clients = len(posteriors)
    if not merged.shares:
        return "with sums, no client's part is known"
    if merged.settings is None or merged.settings.solver not in _QUICK:
        quick = ", ".join(_QUICK)
        return f"it takes one merge for each client, and only {quick} are quick"
    if clients < 2:
        return "there is one client"
    if clients > MOST_CLIENTS:
        return (
            f"it takes one merge for each of {clients} clients, and the report makes "
            f"{MOST_CLIENTS} at most"
        )
    if posteriors[0].curvature.numel() * clients**2 > MOST_WORK:
        return (
            "it takes one merge for each client, which is long for a model of this "
            "size: call flwr_fisher.merge.influence"
        )
    return ""
