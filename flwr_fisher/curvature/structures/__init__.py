"""The structures of curvatures, each registered from its own file."""

from flwr_fisher.curvature.structures import diagonal, kfac  # noqa: F401
from flwr_fisher.curvature.structures.base import STRUCTURES as STRUCTURES
from flwr_fisher.curvature.structures.base import Form as Form
from flwr_fisher.curvature.structures.base import Structure as Structure
from flwr_fisher.curvature.structures.base import preconditioner as preconditioner
from flwr_fisher.curvature.structures.base import register as register
from flwr_fisher.curvature.structures.base import structure_of as structure_of
