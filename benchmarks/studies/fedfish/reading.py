"""What the numbers say in words, whichever way they fall."""

from collections.abc import Sequence
from itertools import product
from statistics import fmean

from harness.jobs import Numbers
from harness.page import blocks
from harness.stats import standard_error

from studies.fedfish.choice import EPOCHS, HIGH, KINDS, LOW, TOTAL, Found, Runs
from studies.fedfish.strategies import AVG, BALANCED, FISH, MENDED, ROOT
from studies.fedfish.tables import BARRIER, GLOBAL, HALF, Measure, gap, grown, merged

Cells = list[Sequence[Numbers]]
NAMES = {FISH: "the paper's FedFish", MENDED: "FedFish by default"}


def reading(runs: Runs, short: Runs) -> list[str]:
    """Return what becomes of the claim, and what the last uploads say about it."""
    claims: list[str | list[str]] = []
    for kind, method in product(KINDS, (FISH, MENDED)):
        claims += [
            f"**{kind.capitalize()}, {NAMES[method]}.** Minus FedAvg, at E = 1, 4, 16:"
        ]
        claims += [[_growth(runs, kind, m, method) for m in (GLOBAL, HALF, BARRIER)]]
    cells = [runs[kind, epochs, FISH] for kind, epochs in product(KINDS, EPOCHS)]
    said = who_decides(cells), merged_once(cells)
    return blocks(*claims, *said, few_rounds(runs, short), mended(runs))


def _growth(runs: Runs, kind: str, measure: Measure, method: str) -> str:
    gaps = [gap(runs, kind, epochs, measure, method) for epochs in EPOCHS]
    growth = grown(runs, kind, measure, method)
    sign = -1 if measure is BARRIER else 1
    said = verdict([sign * g for g in gaps[-1]], [sign * g for g in growth])
    return (
        f"- {measure.title}: {', '.join(measure.shown(g) for g in gaps)}. From E = 1 "
        f"to 16 it changes by {measure.shown(growth)}: {said}."
    )


def verdict(last: Sequence[float], growth: Sequence[float]) -> str:
    """Return what becomes of the claim that FedFish's lead grows with E.

    Both are FedFish's advantage: at the most local epochs, and over that at one.
    """
    if fmean(growth) < -2 * standard_error(growth):
        return "**FedFish falls back** as E grows, against the claim"
    if fmean(growth) <= 2 * standard_error(growth):
        lead = fmean(last) / standard_error(last)
        leader = AVG if lead < -2 else FISH if lead > 2 else "neither"
        return (
            "**not reproduced**, no change beyond two standard errors; at E = 16 "
            f"{leader} has a clear lead"
        )
    if fmean(last) > 2 * standard_error(last):
        return "**reproduced**, a lead that grows with E"
    return "**in part**: FedFish gains as E grows, but has no clear lead at E = 16"


def who_decides(cells: Cells) -> str:
    """Return how a client's share in FedFish's average goes with its loss."""

    def over(key: str, factor: float = 1.0) -> str:
        values = [factor * fmean(run[key] for run in cell) for cell in cells]
        digits = 0 if factor == 100 else 2
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    text = (
        "**Who decides.** Over the six cells the logarithm of a client's Fisher trace "
        "and that of its own loss have a correlation of "
        f"{over('trace-loss-correlation')}, the largest of ten Fishers has "
        f"{over('largest-trace', 100)} % of their sum, and "
        f"{over('over-half', 100)} % of the average's entries are for more than half "
        f"one client's: its entries are made of {over('effective-clients')} clients, "
        "and a mean of ten."
    )
    if all(fmean(r["trace-loss-correlation"] for r in cell) > 0.5 for cell in cells):
        text += (
            " So a client's say goes with how badly it fits its data: who fits them "
            "has small gradients, thus a small Fisher, whatever its parameters matter "
            "to its predictions. It is the empirical Fisher (with labels, of batch "
            "gradients) that vanishes so."
        )
    return text


def merged_once(cells: Cells) -> str:
    """Return how FedFish's average of the last uploads compares with their mean."""
    accuracy, barrier, _ = merged("fisher")
    plain, plain_barrier, _ = merged("mean")
    higher = sum(fmean(accuracy.of(c)) > fmean(plain.of(c)) for c in cells)
    lower = sum(fmean(barrier.of(c)) < fmean(plain_barrier.of(c)) for c in cells)
    return (
        "**The same uploads.** Without Adam and without a history, FedFish's average "
        "of the last round's uploads has a higher accuracy than their mean in "
        f"{higher} of the six cells, and a lower barrier in {lower} (table below)."
    )


def few_rounds(runs: Runs, short: Runs) -> str:
    """Return what is left of the gap with as few rounds at every E."""
    few, many = TOTAL // HIGH, TOTAL // LOW
    skew, shift = (GLOBAL.shown(grown(short, kind, GLOBAL)) for kind in KINDS)
    at_one = (
        f"{GLOBAL.shown(gap(short, kind, 1, GLOBAL))} after {few} rounds, "
        f"{GLOBAL.shown(gap(runs, kind, 1, GLOBAL))} after {many} ({kind})"
        for kind in KINDS
    )
    return (
        f"**Rounds.** With {few} rounds at every E (table below), the gap in global "
        f"accuracy changes from E = 1 to 16 by {skew} under label skew and by "
        f"{shift} in the shift. At E = 1 it is {' and '.join(at_one)}."
    )


def mended(runs: Runs) -> str:
    """Return what the two mends change, together and one by one."""
    cells = [runs[kind, epochs, MENDED] for kind, epochs in product(KINDS, EPOCHS)]
    made_of = [fmean(run["effective-clients"] for run in cell) for cell in cells]
    parts = []
    for kind in KINDS:
        by_fish = (
            GLOBAL.gap(runs[kind, HIGH, method], runs[kind, HIGH, FISH])
            for method in (BALANCED, ROOT, MENDED)
        )
        parts.append(f"{', '.join(GLOBAL.shown(g) for g in by_fish)} under {kind}")
    return (
        "**Mended.** With the sizes of the Fishers taken out (balance 1), with the "
        "square root of their entries, and with both, as by default, global accuracy "
        f"at E = {HIGH} changes beside the paper's by {'; '.join(parts)}. With both, "
        f"an average's entries are made of {min(made_of):.1f} to {max(made_of):.1f} "
        "clients."
    )


def choice_notes(found: Found) -> str:
    """Return how much hangs on learning rates that one split chose."""
    seen, same = [], []
    for kind in KINDS:
        fish, plain = (found.best[kind, HIGH, method] for method in (FISH, AVG))
        lead = 100 * (found.tried[fish]["accuracy"] - found.tried[plain]["accuracy"])
        seen.append(f"{lead:+.1f} points under {kind}")
        gaps = GLOBAL.gap(found.runs[kind, HIGH, FISH], found.alike[kind, HIGH, AVG])
        same.append(f"{GLOBAL.shown(gaps)} under {kind}")
    return (
        f"One split chose, and at E = {HIGH} its own lead of FedFish was "
        f"{' and '.join(seen)}, to compare with the seeds' above. FedAvg at FedFish's "
        f"rates makes FedFish's lead in global accuracy there {' and '.join(same)}."
    )
