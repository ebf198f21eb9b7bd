"""The structures of curvatures, each registered from its own file."""

from flwr_fisher.curvature.structures import diagonal, kfac  # noqa: F401
from flwr_fisher.curvature.structures.base import (
    STRUCTURES,
    Form,
    Structure,
    preconditioner,
    register,
    structure_of,
)

__all__ = [
    "STRUCTURES",
    "Form",
    "Structure",
    "preconditioner",
    "register",
    "structure_of",
]
