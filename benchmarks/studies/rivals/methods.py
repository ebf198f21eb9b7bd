"""What each part of `merges.py` finds on one split."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.size import sized
from harness.uploads import Setting, posteriors
from rivals import fedlpa, otfusion, pfnm
from rivals.git_rebasin import matched
from rivals.regmean import regmean

from flwr_fisher.curvature import Kronecker
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher, fisher_merge
from flwr_fisher.report import accuracies, ensemble_accuracy
from studies.rivals.bayes import matched_subspaces, mixtures
from studies.rivals.exchanges import exchanges, heads
from studies.rivals.split import Found, Rivals, given, positions_of, started
from studies.rivals.students import students
from studies.rivals.sums import from_sums

LPA_STEPS, ADAM_STEPS = sized(((0, 10_000), 2000), ((0, 5), 5))
# What rivals teach: the default's constants, and others, on the server's examples.
CONSTANTS: dict[str, dict[str, float]] = {
    "default": {},
    "balance 0, robust 1": {"balance": 0},
    "balance 0, robust 3": {"balance": 0, "robust": 3},
    "balance 1/2, robust 0": {"robust": 0},
    "balance 1, robust 0": {"balance": 1, "robust": 0},
    "balance 1, robust 1": {"balance": 1},
}
ITERATIONS = 4
OURS = "FedFisher K-FAC (default)"
MATCHED = f"{OURS}, matched first"
SUMS = "FedFisher K-FAC from sums"


def prepared(
    setting: Setting, data_dir: Path
) -> tuple[Rivals, dict[str, list[LocalPosterior]]]:
    """Return a split, and what its clients upload."""
    split = started(setting, data_dir)
    return split, given(setting, split.task)


def merges(setting: Setting, data_dir: Path) -> Found:
    """Return every merge's accuracy and cost on one split, but Adam's."""
    split, uploads = prepared(setting, data_dir)
    model, test = split.model, split.test
    kfac, diagonal, empirical = (uploads[k] for k in ("kfac", "diagonal", "empirical"))
    where = positions_of(model, split.held[0][0][:1])
    split.run("FedAvg", lambda: fedavg(kfac))
    split.run("OTFusion", lambda: otfusion(kfac))
    split.run("Git Re-Basin, then FedAvg", lambda: fedavg(matched(kfac)))
    split.run(
        "PFNM, FedMA's for convolutions *",
        *(partial(pfnm, kfac, iterations=i) for i in (0, 3)),
    )
    split.run("FisherMerge", lambda: fisher_merge(diagonal))
    split.run(
        "RegMean *", *(partial(regmean, kfac, off_diagonal=a) for a in (0.9, 0.1))
    )
    for name, own in (("as released", empirical), ("with FedFisher's factors", kfac)):
        split.run(
            f"FedLPA, {name} *",
            *(partial(fedlpa, own, steps=k, positions=where) for k in LPA_STEPS),
        )
    split.run(OURS, lambda: fedfisher(kfac).params)
    split.run(MATCHED, lambda: fedfisher(matched(kfac)).params)
    split.run(SUMS, lambda: from_sums(kfac, iterations=ITERATIONS))
    params = [upload.params for upload in kfac]
    weights = [upload.num_examples for upload in kfac]
    single = accuracies(model, {str(i): p for i, p in enumerate(params)}, test)
    split.found["best single client (chosen on the test set)"] = {
        "accuracy": 100 * max(single.values()),
        "passes": 0.0,
    }
    together = ensemble_accuracy(model, params, weights, test)
    split.found["ensemble of clients (not one model)"] = {
        "accuracy": 100 * together,
        "passes": 0.0,
    }
    size = sum(value.numel() for value in params[0].values())
    layers = [b.made() for b in kfac[0].curvature.blocks()]
    found = [layer for layer in layers if isinstance(layer, Kronecker)]
    sizes = {"A": sum(x.A.numel() for x in found), "G": sum(x.G.numel() for x in found)}
    return {**split.found, "sizes": {k: n / size for k, n in sizes.items()}}


def constants(setting: Setting, data_dir: Path) -> Found:
    """Return accuracies of the default's solver with other constants on one split."""
    split = started(setting, data_dir)
    uploads = posteriors(setting, split.task, "kfac")
    made = {name: fedfisher(uploads, **own).params for name, own in CONSTANTS.items()}
    held = accuracies(split.model, made, split.held)
    test = accuracies(split.model, made, split.test)
    return {n: {"held": 100 * held[n], "accuracy": 100 * test[n]} for n in made}


def adam(setting: Setting, data_dir: Path) -> Found:
    """Return the accuracy and cost of the paper's solver on one split."""
    split, uploads = prepared(setting, data_dir)
    run = partial(fedfisher, solver="adam", iterations=ADAM_STEPS, score=split.score)
    split.run("FedFisher diagonal *", lambda: run(uploads["diagonal"]).params)
    split.run("FedFisher K-FAC, paper's Adam *", lambda: run(uploads["kfac"]).params)
    return split.found


PARTS: dict[str, Callable[[Setting, Path], Found]] = {
    "merges": merges,
    "exchanges": exchanges,
    "heads": heads,
    "adam": adam,
    "students": students,
    "mats": matched_subspaces,
    "fedbens": mixtures,
    "constants": constants,
}
