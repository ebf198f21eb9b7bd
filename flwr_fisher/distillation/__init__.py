"""Data-free distillation on the server: images made of clients' models, and a student.

Rivals of merging: they need a model that can be called, a prior of what its inputs are
(images of a size, in a range), and thousands of training steps on the server.
"""

from flwr_fisher.distillation.co_boosting import co_boosting
from flwr_fisher.distillation.dense import dense
from flwr_fisher.distillation.images import Normalised
from flwr_fisher.distillation.synthesis import Synthesis

__all__ = ["Normalised", "Synthesis", "co_boosting", "dense"]
