"""One-shot merging of the clients' posteriors into one model, without Flower."""

from flwr_fisher.merge.batch_norms import refresh_norms as refresh_norms
from flwr_fisher.merge.fedfisher import MergeResult as MergeResult
from flwr_fisher.merge.fedfisher import fedfisher as fedfisher
from flwr_fisher.merge.fedfisher import fisher_merge as fisher_merge
from flwr_fisher.merge.options import SOLVERS as SOLVERS
from flwr_fisher.merge.options import MergeOptions as MergeOptions
from flwr_fisher.merge.posterior import LocalPosterior as LocalPosterior
from flwr_fisher.merge.posterior import fedavg as fedavg
from flwr_fisher.merge.sums import DiagonalSums as DiagonalSums
from flwr_fisher.merge.sums import balanced as balanced
from flwr_fisher.merge.sums import fedfisher_from_sums as fedfisher_from_sums
from flwr_fisher.merge.sums import partial_traces as partial_traces
