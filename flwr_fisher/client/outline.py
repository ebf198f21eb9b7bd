"""What a client uploads, in a few lines of its log."""

from collections.abc import Iterable
from textwrap import wrap

from torch import nn

from flwr_fisher.curvature import Curvature
from flwr_fisher.log_lines import logger

_COLUMNS, _NAMED = 100, 6  # signs of a line; layers whose names are all told
_KINDS = {
    "Kronecker": "K-FAC",
    "EigenKronecker": "E-KFAC",
    "Dense": "dense blocks",
    "Diagonal": "diagonal",
}
_told: set[str] = set()


def outline(
    model: nn.Module, curvature: Curvature, structure: str | None, upload: str
) -> list[str]:
    """Return lines that say which layers have which curvature, and what is uploaded.

    Parameters
    ----------
    model : nn.Module
        Its frozen parameters are told, too.
    curvature : Curvature
        Of a few examples.
    structure : str
        What was asked for: E-KFAC is tried as K-FAC.
    upload : str
        Its size, in words.

    Examples
    --------
    >>> import torch
    >>> from flwr_fisher.curvature import fisher
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> F = fisher(model, [torch.randn(4, 2)])
    >>> outline(model, F, "kfac", "upload 1.0 kB")
    ['curvature: K-FAC of 0, 2; diagonal of 1 (2 tensors); upload 1.0 kB']
    """
    groups: dict[str, list[str]] = {}
    for block in curvature.blocks():
        kind = _KINDS.get(block.kind, block.kind)
        kind = "E-KFAC" if structure == "ekfac" and kind == "K-FAC" else kind
        groups.setdefault(kind, []).extend(block.shapes)
    parts = [
        f"{kind} of {_layers(names)}"
        + (f" ({len(names)} tensors)" if kind == "diagonal" else "")
        for kind, names in groups.items()
    ]
    if frozen := [n for n, p in model.named_parameters() if not p.requires_grad]:
        parts.append(f"frozen: {_layers(frozen)}")
    text = "; ".join(["curvature: " + parts[0], *parts[1:], upload])
    return wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def tell_once(lines: Iterable[str]) -> None:
    """Log lines, unless this process has."""
    text = "\n".join(lines)
    if text not in _told:
        _told.add(text)
        for line in text.splitlines():
            logger.info("%s", line)


def _layers(parameters: Iterable[str]) -> str:
    """Return the names of the layers that parameters are of; of many, two."""
    own = dict.fromkeys(name.rpartition(".")[0] or name for name in parameters)
    names = list(own)
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} layers, {names[0]} … {names[-1]}"
