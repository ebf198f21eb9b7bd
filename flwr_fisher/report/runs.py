"""The report of a run: a folder with its metrics, its model and its pictures."""

import json
from collections.abc import Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp.strategy import Result
from torch import nn

from flwr_fisher.callbacks import HISTORIES
from flwr_fisher.client import cross_entropy
from flwr_fisher.client.training import Loader
from flwr_fisher.curvature.losses import Loss
from flwr_fisher.devices import default_device
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.files import save_tensors
from flwr_fisher.log_lines import logger
from flwr_fisher.merge import MergeResult
from flwr_fisher.params import Params, weighted_mean
from flwr_fisher.report.accuracy import accuracy_of, class_hits, test_scores
from flwr_fisher.report.diagnosis import against_fedavg, one_shot_sentences
from flwr_fisher.report.pictures import plot_accuracies, plot_rounds, points_of
from flwr_fisher.strategies import CurvatureResult
from flwr_fisher.tangent import TCTModel
from flwr_fisher.wire import Additive, FisherUpload, HeadUpload
from flwr_fisher.wire.arrays import arrays_bytes, arrays_to_tensors, tensors_to_arrays

_TITLES = {
    "fedavg": "FedAvg",
    "best_client": "best client",
    "ensemble": "ensemble (reference)",
    "fedfisher_averaged": "FedFisher, averaged norms",
    "fedfisher_merge": "FedFisher, the merge",
    "fedfisher": "FedFisher",
}
_PUBLISHED = (
    "The final model is the published network with a new last layer (and steps from "
    "there, if you ask for any): the clients' training, which is in none of it, had "
    "made the network worse."
)


def resolve_output_dir(output_dir: str, run_id: int) -> Path:
    """Return the output directory, and make it if it does not exist.

    Parameters
    ----------
    output_dir : str
        An absolute path, or one under ``~``; empty for
        ``~/flwr-fisher/outputs/<run id>``.
    run_id : int
        The run's id.

    Raises
    ------
    ConfigurationError
        If the path is relative. Flower copies an app and runs it elsewhere, so the path
        would be relative to an unknown folder.
    """
    path = Path(output_dir or f"~/flwr-fisher/outputs/{run_id}").expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"output-dir must be an absolute path, got '{output_dir}': pass "
            f"--run-config \"output-dir='$PWD/{output_dir}'\""
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def report_one_shot(
    path: str | Path,
    model: nn.Module,
    loader: Loader,
    result: CurvatureResult,
    *,
    method: str = "FedFisher",
    config: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    title: str = "",
) -> dict[str, float]:
    """Compare the merge with simple alternatives on the same uploads; write a report.

    The alternatives are FedAvg's mean, the best single client (on the test set, so a
    generous reference), and the ensemble of all clients, which is not one model. With
    ``aggregate="sums"`` only FedAvg's mean can be computed. If the merge was refined,
    there is also the merge alone. If the clients have measured the merged model's batch
    norms, there is also the merge before that, whose norms are averaged as FedAvg's
    are. The log also has each client's share of the curvature, and the accuracy of its
    own model. All are of the uploads as the policy left them: a strict one shortens the
    steps of some.

    Parameters
    ----------
    path : str | Path
        The directory for ``metrics.json``, ``model.safetensors`` and ``accuracy.png``.
    model : nn.Module
        The network.
    loader : Iterable
        The test set, as for :func:`accuracies`.
    result : CurvatureResult
        The result of ``FedFisherOneShot`` or a subclass, with the last round's uploads.
    method : str, default "FedFisher"
        The name of such a subclass, for the log and the picture.
    config, seconds : optional
        The run's config and its duration, for ``metrics.json``.
    title : str, optional
        The picture's title, such as the data, their split and the number of test
        examples.

    Returns
    -------
    dict[str, float]
        Accuracy by method, as in ``metrics.json``.

    Raises
    ------
    ConfigurationError
        If the result has no merge: it is of another strategy, its last round was
        skipped, or it is of a resumed run that had nothing left to do. The model is
        saved all the same.
    """
    # The clients may have measured its norms after the merge.
    final, merged = arrays_to_tensors(result.arrays), getattr(result, "details", None)
    path = _save_model(path, final)  # it is safe, whatever a score raises
    if not isinstance(merged, MergeResult):
        raise ConfigurationError(
            f"the model is in {path}, but report_one_shot needs the last round's merge "
            "of FedFisherOneShot: for another strategy, such as FedAvg, call "
            "report_rounds; if the round was skipped, or finished before this run was "
            "resumed, resume it with reopen=True"
        )
    final, model = {**merged.params, **final}, model.to(default_device())
    models, merge = {"fedfisher": final}, final
    if result.unrefined is not None:
        merge = {**merged.params, **arrays_to_tensors(result.unrefined)}
        models["fedfisher_merge"] = merge
    if any(not torch.equal(merge[k], v) for k, v in merged.params.items()):
        models["fedfisher_averaged"] = merged.params
    # A merge of sums has no single client's model.
    uploads = result.uploads if merged.mean is None else []
    members = [upload.payload.params for upload in uploads]
    weights = [upload.num_examples for upload in uploads]
    models["fedavg"] = merged.mean or weighted_mean(members, weights)
    hits = {name: class_hits(model, [p], [1.0], loader) for name, p in models.items()}
    accuracy = {name: accuracy_of(of_model) for name, of_model in hits.items()}
    of_clients = {
        upload.client: class_hits(model, [params], [1.0], loader)
        for upload, params in zip(uploads, members, strict=True)
    }
    counted = zip(of_clients.items(), weights, merged.shares, strict=True)
    clients: list[dict[str, Any]] = [
        {"client": name, "examples": n, "share": share, "accuracy": accuracy_of(own)}
        for (name, own), n, share in counted
    ]
    if uploads:
        accuracy["ensemble"] = accuracy_of(class_hits(model, members, weights, loader))
        accuracy["best_client"] = max(row["accuracy"] for row in clients)
    titles = {name: t.replace("FedFisher", method) for name, t in _TITLES.items()}
    titled = {t: accuracy[name] for name, t in titles.items() if name in accuracy}
    plot_accuracies(path / "accuracy.png", titled, titles["fedfisher"], title=title)
    logger.info("Accuracy on %d test examples:", hits["fedfisher"][1].sum())
    for title, value in titled.items():
        logger.info("\t%-25s %5.1f %%", title, 100 * value)
    for row in clients:
        text = "\t%s: %g examples, %.1f %% of the curvature, test accuracy %.1f %%"
        shares = 100 * row["share"], 100 * row["accuracy"]
        logger.info(text, row["client"], row["examples"], *shares)
    names = "train_loss", "loss"  # what LocalSGD, and what Flower's examples call it
    heads = result.exchange_uploads.get("head", [])
    single = {u.client for u in heads if _has_one_class(u.payload)}
    losses = {
        u.client: next((u.metrics[n] for n in names if n in u.metrics), None)
        for u in uploads
    } | dict.fromkeys(single)
    rounds = rounds_of(result)
    last = rounds[max(rounds)].get("evaluate", {}) if rounds else {}
    told = accuracy, hits["fedfisher"], of_clients, losses, last.get("accuracy", nan)
    published = [_PUBLISHED] if _is_published(rounds) else None
    for sentence in published or one_shot_sentences(*told, method):
        logger.info(sentence)
    run = {"rounds": rounds, "seconds": seconds}
    metrics = {"accuracy": accuracy, "clients": clients, **run}
    _write_metrics(path, result, final, {**metrics, "config": dict(config or {})})
    return accuracy


def report_rounds(
    path: str | Path,
    model: nn.Module,
    loader: Loader,
    result: Result,
    *,
    method: str,
    config: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    marks: Mapping[int, str] | None = None,
    title: str = "",
    loss_fn: Loss = cross_entropy,
) -> dict[str, float]:
    """Write the metrics of a run with several rounds; log a summary.

    Parameters
    ----------
    path : str | Path
        The directory for ``metrics.json``, ``model.safetensors`` and ``rounds.png``.
    model : nn.Module
        The network.
    loader : Iterable
        The test set, as for :func:`accuracies`.
    result : Result
        The result of any strategy, also of Flower's. Bytes are reported if it has
        `uploads`. The metrics of its `evaluate_fn`, such as :func:`evaluate_on_test`,
        are drawn by round; of the last round, those of `loader`, if there are none.
    method : str
        The strategy's name. In ``metrics.json`` it is in small letters.
    config, seconds : optional
        The run's config and its duration, for ``metrics.json``.
    marks : Mapping[int, str], optional
        Rounds that are marked in the picture, and whose accuracies are reported, too,
        if they were evaluated: ``{20: "stage1"}``, for example.
    title : str, optional
        As for :func:`report_one_shot`.
    loss_fn : Callable[[Tensor, Tensor], Tensor], default cross_entropy
        As for :func:`evaluate_on_test`.

    Returns
    -------
    dict[str, float]
        The accuracies of ``metrics.json``: the method's after the last round, on
        `loader`, and those of `marks` by their texts. ``fedavg`` is the mean of the
        last round's models, not refined, if clients uploaded models; it is no run of
        FedAvg, unless `method` is FedAvg: then it is the run's own model, refined or
        not.
    """
    params = arrays_to_tensors(result.arrays)
    path = _save_model(path, params)  # it is safe, whatever a score raises
    rounds = rounds_of(result)
    last = rounds.setdefault(max(rounds, default=0), {}).setdefault("server", {})
    scores = test_scores(model, loader, params, loss_fn)
    if "accuracy" not in last:
        last |= scores
    ours = final = scores["accuracy"]
    # evaluate_fn may measure on other data, such as those for BestModel.
    near = isnan(ours) or abs(last["accuracy"] - ours) < 1e-4
    whose = "test" if near else "evaluate_fn's"
    history = {number: sources.get("server", {}) for number, sources in rounds.items()}
    accuracy = {method.lower(): final}
    for number, text in (marks or {}).items():
        if "accuracy" in history.get(number, {}):
            accuracy[text] = history[number]["accuracy"]
    curves = {key: points_of(history, key) for key in ("accuracy", "loss")}
    curves = {key: points for key, points in curves.items() if points}
    runs, picture = {method: history}, path / "rounds.png"
    plot_rounds(picture, runs, list(curves), marks=marks, title=title)
    for key, points in curves.items():
        ends = dict([points[0], points[-1]]).items()
        told = ", ".join(f"{value:.3f} (round {number})" for number, value in ends)
        logger.info("%s: %s %s %s", method, whose, key, told)
    uploads = result.uploads if isinstance(result, CurvatureResult) else []
    models = [each for u in uploads if (each := _model(u.payload)) is not None]
    who = method
    if isinstance(result, CurvatureResult) and result.unrefined is not None:
        before = arrays_to_tensors(result.unrefined)  # nor is FedAvg's mean refined
        ours = accuracy_of(class_hits(model, [before], [1.0], loader))
        who = f"{method}, before it is refined,"
        gain = 100 * (final - ours)
        if _is_published(rounds):
            logger.info(_PUBLISHED)
        elif not isnan(gain):
            logger.info("%s: refining the last model adds %.1f points", method, gain)
    if models and not method.lower().startswith("fedavg") and not isnan(ours):
        mean = weighted_mean(models, [upload.num_examples for upload in uploads])
        hits = class_hits(model, [mean], [1.0], loader)
        accuracy["fedavg"] = fedavg = accuracy_of(hits)
        compared = against_fedavg(who, ours, fedavg, int(hits[1].sum()))
        logger.info("In the last round: %s", compared)
    metrics = {"accuracy": accuracy, "rounds": rounds, "seconds": seconds}
    _write_metrics(path, result, params, {**metrics, "config": dict(config or {})})
    return accuracy


def rounds_of(result: Result) -> dict[int, dict[str, dict[str, Any]]]:
    """Return a result's metrics by round, and within a round by their source.

    ``{1: {"train": {…}, "evaluate": {…}, "server": {…}}, …}``: ``server`` has the
    metrics of ``evaluate_fn``, ``train`` and ``evaluate`` the aggregated metrics of the
    clients. A source without metrics in a round is left out.
    """
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for source, field in HISTORIES.items():
        for number, record in getattr(result, field).items():
            rounds.setdefault(number, {})[source] = dict(record)
    return dict(sorted(rounds.items()))


def _is_published(rounds: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> bool:
    """Return whether the last round took the network as it was published."""
    of_last = rounds[max(rounds)] if rounds else {}
    return bool(of_last.get("train", {}).get("start-taken"))


def _has_one_class(payload: object) -> bool:
    """Return whether the sums for a head are of examples of one class."""
    if not isinstance(payload, HeadUpload):
        return False
    return int((payload.sums.cross[-1] > 0).sum()) == 1


def _model(payload: object) -> Params | None:
    """Return the model that a client uploaded, or None if it is in another form."""
    if isinstance(payload, FisherUpload):
        return payload.params
    return (payload.part("params") or None) if isinstance(payload, Additive) else None


def _save_model(path: str | Path, params: Params) -> Path:
    path = Path(path).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(path / "model.safetensors", params)
    return path


def _write_metrics(
    path: Path, result: Result, params: Params, metrics: dict[str, Any]
) -> None:
    """Write ``metrics.json``; log the size of an upload, and what is in the folder."""
    if isinstance(result, CurvatureResult):
        metrics["left_out"] = result.left_out
        if result.uploads:
            network = {k: v for k, v in params.items() if not k.startswith("tct/")}
            sizes = result.upload_bytes, arrays_bytes(tensors_to_arrays(network))
            keys = "upload_per_client", "fedavg_per_client"
            metrics["bytes"] = dict(zip(keys, sizes, strict=True))
            text = "Upload, all requests: %.0f kB a client (FedAvg: %.0f kB)"
            logger.info(text, *(size / 1e3 for size in sizes))
    how = "safetensors.torch.load_model(model, path) loads them into the app's network"
    if TCTModel.is_in(params):
        how = "flwr_fisher.tangent.TCTModel.load(path, network) reads them"
    text = json.dumps(metrics, indent=2, default=float)
    (path / "metrics.json").write_text(text + "\n")
    logger.info("Results are in %s:", path)
    logger.info("\tmetrics.json: these numbers, by method, and by client or round")
    logger.info("\tmodel.safetensors: the model's parameters; %s", how)
    for picture in sorted(path.glob("*.png")):
        logger.info("\t%s: the accuracies as a picture", picture.name)
