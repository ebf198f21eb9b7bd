"""The client's side: a Flower ``ClientApp`` from a model, data and a loss."""

from flwr_fisher.client.fisher_client import FisherClient as FisherClient
from flwr_fisher.client.fisher_client import make_client_app as make_client_app
from flwr_fisher.client.jobs import register_job as register_job
from flwr_fisher.client.messages import ClientApp as ClientApp
from flwr_fisher.client.messages import identify as identify
from flwr_fisher.client.outbox import TrainingCheckpoint as TrainingCheckpoint
from flwr_fisher.client.plain_client_app import check_client as check_client
from flwr_fisher.client.plain_client_app import check_fisher as check_fisher
from flwr_fisher.client.plain_client_app import fisher_arrays as fisher_arrays
from flwr_fisher.client.problem import CountedLoader as CountedLoader
from flwr_fisher.client.problem import LocalProblem as LocalProblem
from flwr_fisher.client.request import ClientLimits as ClientLimits
from flwr_fisher.client.request import Reply as Reply
from flwr_fisher.client.request import Request as Request
from flwr_fisher.client.state import ClientState as ClientState
from flwr_fisher.client.training import LocalSGD as LocalSGD
from flwr_fisher.client.training import score as score
from flwr_fisher.curvature.losses import cross_entropy as cross_entropy
