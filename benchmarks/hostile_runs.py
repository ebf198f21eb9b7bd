"""How many federations a hostile client harms, and how many clients a hostile server.

    python benchmarks/hostile_runs.py [--only STRATEGY]

Six clients learn to tell three clouds of points apart, by every strategy there is, and
FedFisher's by every solver for each structure and aggregate. In
each run one client sends something else than what it computed, in every reply of one
kind. The run is harmed if it ended, if an honest upload was lost, if a parameter is not
finite, or if its accuracy fell below 0.9 of the honest run's. All are done twice: with
``policy=Policy.strict()``, which is for clients that may lie, and with the default,
which is for honest ones. All other settings are the defaults: nobody says how many
clients are hostile, and robust merging is off.

Then a hostile server: before each kind of honest request, a client gets that request
with every setting and every array in it wrong, in many ways, with other numbers of
runs and steps, too. The client is harmed if that takes more than 5 s, leaves more than
1 MiB on its disk, raises what is none of the library's errors or an error of many
lines; or if the run ends with other parameters than without it.
"""

import json
import logging
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.page import (
    CACHE,
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.tables import head, row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harness.hostile_attacks import cases, within_the_limits
from hostile import ENOUGH, STRICT, VICTIMS, Outcome, honest_accuracy, run
from hostile_servers import besiege

from flwr_fisher.strategies import Policy

POLICIES = {"strict": STRICT, "default": Policy()}
NAMES, EVERY = sized(([*VICTIMS], 1), (["FedFish", "FAGH"], 20))  # case that is run
SEEN = """\
| what was seen to do harm | what happens instead | test |
|---|---|---|
| a factor for an embedding of 50 000 rows, announced by 18 bytes | refused by its announced shape, before anything is allocated; of few bytes nothing larger than they are is made until it is used | `test_no_factor_is_larger_than_a_client_would_send`, `test_a_few_bytes_make_no_matrix_until_it_is_used` |
| an exception in decoding that is no `WireError` | costs that reply alone | `test_any_exception_of_one_reply_costs_that_reply_alone` |
| A = G = 1e30 I | refused: "of size 1e+…, which cannot be"; not kept on disk, and a resumed run does not meet it | `test_what_did_harm_does_none`, `test_a_rejected_reply_is_not_kept` |
| an upload with which the step fails | left out with its reason, and the step is taken without it | `test_an_upload_that_no_step_can_take_is_left_out_by_name` |
| factors at 1e-20 of their size, packed or not | merged at their scale | `test_what_did_harm_does_none` |
| `num-examples` -192, or a list as loss, in an evaluate reply | refused by name; the round's other evaluations count | the runs below |
| FAGH with gradients of 1e30 | refused: "of size 1e+…" | `test_what_did_harm_does_none` |
| TCT: `num-examples` 30 000 | by the strict policy it counts as the clients' median; a client with too many examples of its own says so in the first round | `test_what_did_harm_does_none` |
| TCT: feature means of 1e300 | refused: "of size 1e+…" | `test_what_did_harm_does_none` |
| TCT: `largest-eigenvalue` 1e300, or 1e9 | refused; by the strict policy, cut to twice the number of features | `test_what_did_harm_does_none` |
| `num-examples` 2⁶² and random weights | refused: nobody has more than 10¹⁵ examples |
| `num-examples` 10⁹ and random weights | by the strict policy it counts as the clients' median, and so does the step | `test_what_did_harm_does_none` |
| parameters ten thousand times too large | by the strict policy, a step of the median length | `test_what_did_harm_does_none` |
| FedFish with F = 1e30; sums with curvature × 10⁶ | refused; by the strict policy, cut to the clients' median in that layer | `test_what_did_harm_does_none` |
| a residual of NaN after 0 iterations | the layer stays at the clients' mean, with a warning, and `solver-fallbacks` counts it | `test_merge_scale.py` |
| a factor with negative eigenvalues, also beside a diagonal that ends with 0: the merge fails, or follows the attacker | refused by a Cholesky factorisation of its correlations | `test_what_did_harm_does_none`, `test_a_matrix_with_a_negative_eigenvalue_is_no_second_moment` |
| batch norm: one variance below 0, which makes NaN of every output; a negative count of batches, which divides by 0 in every client | refused by name | `test_what_did_harm_does_none` |
| sums: a product of 1e-37 beside a Fisher of 1e-42, which pulls a parameter anywhere | computed from the Fisher and the parameters | `test_products_of_one_client_are_computed_and_not_believed` |
| K-FAC from sums: parameters × -100, products of 3e38, of which every sum was made as they came | all uploads are held, and limited as others are; a direction that is not finite is not sent | `test_what_did_harm_does_none` |
| K-FAC from sums: random numbers for a product. They are not 0 where the client's Fisher is, and the merge divides them by next to nothing | the server limits the step to which each of a client's products would lead by itself, as it limits steps | `test_what_did_harm_does_none`, `test_numbers_that_are_no_product_of_a_fisher_lead_far` |
| SCAFFOLD: the opposite of its change of the control variate, in every round | by the strict policy, a change is at most of the median length, or of a quarter of an earlier round's | `test_what_did_harm_does_none`, `test_what_one_client_adds_to_a_kept_part_is_bounded` |
| a claim to another's partition id | refused for both, by name; where a node is registered, the name is the SuperLink's, and no claim of one that is not costs it its place | `test_nodes_that_claim_one_partition_are_not_asked`, `test_a_registered_name_is_who_a_node_is_and_is_lost_to_no_claim`, `test_an_unregistered_claim_costs_a_registered_node_nothing` |
| partition -5, which collided with 5 | is none: the node goes by its id | `test_a_partition_that_cannot_be_is_none` |
| half the clients with one metric more vote out the others | metrics that most report are averaged; an odd metric costs metrics alone | `test_odd_metrics_cost_metrics_and_no_upload` |
| cohorts that anyone can predict | clients get seeds derived from the run's, one way | `test_the_seed_that_draws_cohorts_is_sent_to_nobody` |
| 100 000 keys (13 s); keys and errors of megabytes, with control characters | counted before they are read; what the log quotes is one printable line, cut | `test_too_many_keys_are_refused_before_anything_is_read`, `test_what_did_harm_does_none` |
| local steps and epochs without a limit | refused beyond its `ClientLimits` | `test_more_than_the_cap_is_refused_before_anything_is_done` |
| state for every run that a server invents | the oldest runs' state goes, within the client's `state_bytes` | `test_a_server_that_invents_runs_does_not_fill_the_disk` |
""".strip()  # noqa: E501
BEYOND = """\
A client that knows the policy can stay within it. Here one client of six sends the
opposite of its step (of its gradient, of its moments), as long, in every round, and
says that it has as many examples as the median client: by the strict policy that is all
that it can do. These runs are not among those counted above."""


def quiet() -> None:
    """Say nothing, and compute on one thread."""
    warnings.simplefilter("ignore")
    logger = logging.getLogger("flwr")  # whose warnings say what became of a client
    logger.setLevel(logging.WARNING)
    logger.handlers.clear()
    logger.propagate = False
    torch.set_num_threads(1)


def told(outcome: Outcome) -> str:
    """Return what the log says became of what the hostile client sent."""
    for what, pattern in {
        "left out": r"left out .*(partition|node)-",
        "limited": "limited partition-2",
        "its metrics left out": "metrics without",
    }.items():
        if re.search(pattern, outcome.log):
            return what
    return "taken as it is"


def measure(name: str) -> dict[str, Any]:
    """Return what became of all a strategy's runs."""
    found: dict[str, Any] = {}
    for word, policy in POLICIES.items():
        honest, runs = honest_accuracy(name, policy=policy), []
        for _, kind, attack, act in [c for c in cases() if c[0] == name][::EVERY]:
            end = run(name, act, (kind,), policy=policy)
            runs.append([kind, attack, told(end), end.harm[:200], end.accuracy])
        found[word] = {"honest": honest, "runs": runs}
        print(name, word, len(runs), [run for run in runs if run[3]], flush=True)
    found["knowing"] = run(name, within_the_limits).accuracy
    found["requests"], found["clients harmed"] = besiege(name)
    return found


def kept(name: str) -> tuple[str, dict[str, Any]]:
    """Return :func:`measure`'s numbers, from the cache where they are there."""
    path = CACHE / "hostile" / f"{re.sub('[^a-zA-Z]+', '-', name)}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(name)))
    numbers: dict[str, Any] = json.loads(path.read_text())
    return name, numbers


def by_strategy(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each strategy."""
    columns = ("honest accuracy", "lowest with a hostile client", "harmed")
    words = [f"{word}: {column}" for word in POLICIES for column in columns]
    yield from head("strategy", "runs", *words, "hostile requests", "clients harmed")
    for name, each in found.items():
        cells = [str(len(each["strict"]["runs"]))]
        for word in POLICIES:
            runs = each[word]["runs"]
            _, worst, _, _, lowest = min(runs, key=lambda run: run[-1])
            cells += [
                f"{100 * each[word]['honest']:.1f}",
                f"{100 * lowest:.1f} ({worst})",
                str(len(harms(each[word]))),
            ]
        yield row(name, *cells, str(each["requests"]), str(len(each["clients harmed"])))


def harms(each: dict[str, Any]) -> list[list[Any]]:
    """Return the runs that came to harm."""
    return [run for run in each["runs"] if run[3]]


def harmful(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each attack that harms by a policy: whom, and how badly."""
    yield from head("policy", "reply", "what is sent", "harmed", "lowest accuracy, %")
    for word in POLICIES:
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for name, each in found.items():
            for kind, attack, _, _, accuracy in harms(each[word]):
                rows.setdefault((kind, attack), {})[name] = accuracy
        for (kind, attack), own in sorted(rows.items(), key=lambda r: -len(r[1])):
            lowest = f"{100 * min(own.values()):.0f}"
            yield row(word, kind, attack, f"{len(own)}: {'; '.join(own)}", lowest)


def by_attack(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each attack: what the servers did, and how bad it got."""
    yield from head("reply", "what is sent", "what becomes of it", "lowest share, %")
    rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for each in found.values():
        strict = each["strict"]
        for kind, attack, what, _, accuracy in strict["runs"]:
            share = accuracy / strict["honest"]
            rows.setdefault((kind, attack), []).append((what, share))
    for (kind, attack), own in rows.items():
        counts = Counter(what for what, _ in own).most_common()
        became = ", ".join(f"{what} ({n})" for what, n in counts)
        yield row(kind, attack, became, f"{100 * min(s for _, s in own):.0f}")


def beyond(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each strategy under a client that knows the limits."""
    yield from head("strategy", "honest accuracy", "with that client", "share, %")
    for name, each in found.items():
        honest, knowing = each["strict"]["honest"], each["knowing"]
        share = f"{100 * knowing / honest:.0f}"
        yield row(name, f"{100 * honest:.1f}", f"{100 * knowing:.1f}", share)


def main() -> None:
    """Run one strategy anew, or all that are not in the cache, and write the page."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=VICTIMS, help="the others' are the page's")
    options = parser.parse_args()
    if options.only:
        quiet()
        known = numbers_of("hostile") | {options.only: measure(options.only)}
        found = {name: known[name] for name in VICTIMS if name in known}
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.workers, quiet) as pool:
            found = dict(pool.imap(kept, NAMES))
    sys.exit(report(found) > 0)


def report(found: dict[str, dict[str, Any]]) -> int:
    """Write the page; return how many came to harm that should not."""
    count = sum(len(each["strict"]["runs"]) for each in found.values())
    bad = {
        w: [run for each in found.values() for run in harms(each[w])] for w in POLICIES
    }
    lost = [run for run in bad["default"] if not run[3].startswith("accuracy")]
    requests = sum(each["requests"] for each in found.values())
    clients = sum(len(each["clients harmed"]) for each in found.values())
    missing = ", ".join(VICTIMS.keys() - found.keys())
    left_out = f"Not among them: {missing}." if missing else ""
    lines = blocks(
        opening("Hostile clients, and hostile servers", __doc__),
        f"**{count} runs with a hostile client: {len(bad['strict'])} harmed by the "
        f"strict policy, {len(bad['default'])} by the default, of which {len(lost)} "
        "ended, lost an honest upload or made a parameter infinite. "
        f"{requests} hostile requests: {clients} clients harmed.** {left_out}",
        "## What does harm",
        "The strategies that it harms, and the lowest accuracy of these.",
        list(harmful(found)),
        "## What was seen to do harm",
        SEEN.split("\n"),
        "## By strategy",
        list(by_strategy(found)),
        f"Accuracy in %. Below {100 * ENOUGH:.0f} % of the honest run's, it is harm.",
        "## By what is sent",
        "By the strict policy: in how many strategies' runs it was what, as the log "
        "tells it, and the lowest accuracy, in % of the honest run's.",
        list(by_attack(found)),
        "## Beyond these",
        BEYOND,
        list(beyond(found)),
    )
    write_page("hostile", lines, found)
    return len(bad["strict"]) + len(lost) + clients


if __name__ == "__main__":
    main()
