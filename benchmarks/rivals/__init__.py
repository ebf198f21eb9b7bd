"""One-shot methods that FedFisher is compared with, and that users do not choose.

PFNM, OTFusion, FedLPA and MaTS merge clients' posteriors, as :mod:`flwr_fisher.merge`
does, and FedBEns several of each client.
DENSE and Co-Boosting distil clients' networks into a student, on images that a
generator makes: they need a model that can be called, to know what its inputs are, and
thousands of training steps on the server. RegMean++ and FENS need the clients again
after their uploads: an exchange for each layer, and hundreds for a network that weighs
the clients' votes. FedCGS and GH-LDA train no network, they give a frozen one a head.
"""

from rivals.co_boosting import co_boosting
from rivals.dense import dense
from rivals.fedbens import fedbens
from rivals.fedlpa import fedlpa
from rivals.fens import fens, logits_of
from rivals.gaussian_heads import fedcgs, gh_lda
from rivals.images import Normalised
from rivals.mats import mats, task_arithmetic
from rivals.otfusion import otfusion
from rivals.pfnm import pfnm
from rivals.regmean_plus_plus import regmean_plus_plus
from rivals.synthesis import Synthesis

__all__ = [
    "Normalised",
    "Synthesis",
    "co_boosting",
    "dense",
    "fedbens",
    "fedcgs",
    "fedlpa",
    "fens",
    "gh_lda",
    "logits_of",
    "mats",
    "otfusion",
    "pfnm",
    "regmean_plus_plus",
    "task_arithmetic",
]
