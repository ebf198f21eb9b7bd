"""The options of a merge: their ranges, and each solver's defaults."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.options import Options, option
from flwr_fisher.params import NORM_STATISTICS, Params

# What each solver uses, with its defaults. Those of pcg and cg were chosen on
# validation data of MNIST, CIFAR-10 and digits (fedfisher_defaults.md and, for batch
# norms, pretrained.md in benchmarks/results). The other solvers reproduce the papers.
_PCG = {"anchor": 0.1, "damping": 0.0, "balance": 0.5, "robust": 1.0, "max_share": 0.5}
_CG = {"anchor": 0.03, "damping": 0.3, "balance": 1.0, "robust": 0.0, "max_share": 0.5}
_PAPER = dict.fromkeys((*_PCG, "shrink"), 0.0) | {"max_share": 1.0}
_DEFAULTS: dict[str, dict[str, float]] = {
    "pcg": _PCG | {"iterations": 4, "tolerance": 1e-6},
    "cg": _CG | {"shrink": 0.1, "iterations": 100, "tolerance": 1e-6},
    "closed-form": _PAPER,
    "adam": _PAPER | {"iterations": 2000, "lr": 0.01},
    "gd": _PAPER | {"iterations": 2000, "tolerance": 1e-6},
}
SOLVERS = tuple(_DEFAULTS)
# pcg's `shrink`, for models without and with batch norms.
_SHRINK, _SHRINK_WITH_NORMS = 0.3, 0.9
# What needs each client's own curvature, and the values that turn it off.
_OF_CLIENTS = {"balance": 0.0, "robust": 0.0, "max_share": 1.0, "trust": math.inf}

Score = Callable[[dict[str, Tensor]], float]  # of merged parameters, higher is better


class MergeOptions(Options):
    """How a server merges: see :func:`~flwr_fisher.merge.fedfisher` for the formulas.

    None means the solver's default, which :meth:`filled` fills in.

    Examples
    --------
    >>> MergeOptions(solver="adam").filled().iterations
    2000
    """

    solver: str = option("pcg", "How the systems are solved.", choices=SOLVERS)
    anchor: float = option(
        None, "The ridge, as a share of a layer's mean eigenvalue.", low=0
    )
    shrink: float = option(
        None, "Lowers correlations between a layer's inputs.", low=0, high=1
    )
    damping: float = option(
        None, "Evens out the moments of output gradients.", low=0, high=1
    )
    balance: float = option(
        None, "Divides weights by this power of a Fisher's trace.", low=0, high=1
    )
    robust: float = option(
        None, "Lowers the weights of clients far from the mean.", low=0
    )
    max_share: float = option(
        None, "One client's largest share of a layer's curvature.", low=0.5, high=1
    )
    trust: float = option(
        1.0, "Limits a layer's move, in a strategy from round 2 on.", low=0
    )
    iterations: int = option(None, "At most so many; 1 in a regression.", low=1)
    tolerance: float = option(
        None, "A small enough residual, relative to its start.", low=0, high=1
    )
    lr: float = option(None, "The step of adam.", low=0)

    def filled(self, params: Params | None = None) -> "MergeOptions":
        """Return the options with the solver's defaults in place of None.

        Parameters
        ----------
        params : Mapping[str, Tensor], optional
            The parameters to merge, which decide pcg's default of `shrink`.

        Raises
        ------
        ConfigurationError
            If an option is given that the solver does not use.

        Examples
        --------
        >>> import torch
        >>> norms = {"bn.running_mean": torch.zeros(2)}
        >>> MergeOptions().filled().shrink, MergeOptions().filled(norms).shrink
        (0.3, 0.9)
        """
        norms = any(name.endswith(NORM_STATISTICS[0]) for name in params or {})
        shrink = _SHRINK_WITH_NORMS if norms else _SHRINK
        defaults: dict[str, Any] = {"shrink": shrink, **_DEFAULTS[self.solver]}
        values = {k: v for k, v in self.settings().items() if v is not None}
        if unused := values.keys() - defaults.keys() - {"solver", "trust"}:
            raise ConfigurationError(
                f"solver='{self.solver}' does not use {min(unused)}: leave it out"
            )
        return replace(self, **(defaults | values))

    def for_sums(self, structure: str) -> "MergeOptions":
        """Return the options for sums, where no client's own curvature is known.

        With ``structure="kfac"`` clients balance their Fishers themselves, by default
        with a `balance` of 1.

        Raises
        ------
        ConfigurationError
            If an option has an effect that needs more than sums.
        """
        turned_off: dict[str, Any] = dict(_OF_CLIENTS)
        if structure == "kfac":
            own = self.settings()["balance"]
            turned_off["balance"] = 1.0 if own is None else own
        for name, value in turned_off.items():
            wanted, default = getattr(self, name), getattr(MergeOptions(), name)
            if wanted not in (value, default):
                raise ConfigurationError(
                    f"{name} must be {value:g}, got {wanted}: the server knows only "
                    f"sums, and {name} needs each client's own curvature"
                )
        return replace(self, **turned_off)


def check_score(score: object, solver: str) -> None:
    """Raise :class:`ConfigurationError` for a score that the solver does not use."""
    if score is not None and solver != "adam":
        raise ConfigurationError(
            f"score works with solver='adam' only, not '{solver}': leave it out"
        )
