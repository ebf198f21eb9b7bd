"""Methods that ours are compared with, on the library's public interface.

FedExP, FedGA, FedPM, GIANT and DONE are strategies of many rounds, with their clients'
jobs. The others are one-shot. RegMean, PFNM, OTFusion, FedLPA and MaTS merge clients'
posteriors, and FedBEns several of each client. DENSE and Co-Boosting distil clients'
networks into a student, on images that a generator makes: they need a model that can be
called, and thousands of training steps on the server. RegMean++ and FENS need the
clients again after their uploads: an exchange for each layer, and hundreds for a
network that weighs the clients' votes. FedCGS and GH-LDA give a frozen network a head.
"""

from rivals.co_boosting import co_boosting
from rivals.dense import dense
from rivals.fedbens import fedbens
from rivals.fedexp import FedExP
from rivals.fedga import FedGA
from rivals.fedlpa import fedlpa
from rivals.fedpm import FedPM
from rivals.fens import fens, logits_of
from rivals.gaussian_heads import fedcgs, gh_lda
from rivals.images import Normalised
from rivals.mats import mats, task_arithmetic
from rivals.newton import DONE, GIANT
from rivals.otfusion import otfusion
from rivals.pfnm import pfnm
from rivals.regmean import regmean, regmean_plus_plus
from rivals.synthesis import Synthesis

__all__ = [
    "DONE",
    "GIANT",
    "FedExP",
    "FedGA",
    "FedPM",
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
    "regmean",
    "regmean_plus_plus",
    "task_arithmetic",
]
