"""What MaTS and FedBEns find on one split: the rivals nearest to FedFisher."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time

from harness.size import sized
from harness.timing import seconds
from harness.uploads import Setting, posteriors
from rivals import fedbens, mats, task_arithmetic
from rivals.fedbens import STARTS
from tasks import Task

from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, shared_state
from flwr_fisher.report import accuracies, ensemble_accuracy
from studies.rivals.split import started

# MaTS' factors are of at most 1000 examples of a client, as in the released code.
EMPIRICAL = FisherOptions.full(expectation="empirical", examples=1000)
ITERATIONS = sized((10, 100), (1,))  # its README's, for adapters and for whole networks


def matched_subspaces(setting: Setting, data_dir: Path) -> dict[str, dict[str, float]]:
    """Return MaTS' accuracy and cost on one split."""
    split = started(setting, data_dir)
    uploads = _empirical(setting, split.task)
    start = shared_state(split.model)
    apart = task_arithmetic([upload.params for upload in uploads], start)
    split.run(
        "MaTS *",
        *(
            partial(mats, uploads, start=begin, iterations=k)
            for begin in (None, apart)
            for k in ITERATIONS
        ),
    )
    return split.found


def _empirical(setting: Setting, task: Task) -> list[LocalPosterior]:
    found = []
    for client, upload in enumerate(posteriors(setting, task, "kfac")):
        model = task.make_model()
        model.load_state_dict(dict(upload.params))
        loader = task.eval_loader(task.train_images(client), batch_size=256)
        count = int(upload.num_examples)
        F = fisher(model, loader, options=EMPIRICAL, num_examples=count)
        found.append(replace(upload, curvature=F))
    return found


def mixtures(setting: Setting, data_dir: Path) -> dict[str, dict[str, float]]:
    """Return the accuracies of FedBEns' models, and their cost, on one split."""
    split = started(setting, data_dir)
    starts = [replace(setting, start=start) for start in range(STARTS)]
    members = [posteriors(own, own.from_start(split.task)) for own in starts]
    made: list[Params] = []
    took = seconds(
        lambda: made.extend(fedbens(members, score=split.score)), clock=process_time
    )
    model, test, best = split.model, split.test, max(made, key=split.score)
    found = {
        "FedBEns, the best model *": accuracies(model, {"best": best}, test)["best"],
        "FedBEns, a vote of three models *": ensemble_accuracy(
            model, made, [1.0] * len(made), test
        ),
    }
    passes = took / split.a_pass
    return {n: {"accuracy": 100 * v, "passes": passes} for n, v in found.items()}
