"""The tables of ``attacks.py``: accuracies by attack, and who fails where."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from harness.page import blocks
from harness.stats import spread
from harness.tables import head, row

from studies.attacks.uploads import ATTACKS, BACKDOORS

HONEST = "no attacker"
DEFAULT, ROBUST = "FedFisher", "FedFisher, robust"
STRICT, BOTH = "FedFisher, strict policy", "FedFisher, strict and robust"
ORACLE = "left out by hand"
OURS = (DEFAULT, ROBUST, STRICT, BOTH)
RIVALS = ("FedAvg", "Krum", "MultiKrum", "trimmed mean", "median")
KEPT = 0.9
Scores = dict[str, dict[str, float]]  # a split's, by cell, then by method
Results = Mapping[float, list[Scores]]  # of the splits of each α


def cell(attack: str, attackers: int) -> str:
    """Return the name of a cell's accuracies."""
    return f"{attackers}: {attack}"


def success(attack: str, attackers: int) -> str:
    """Return the name of how often a cell's backdoor works."""
    return f"{cell(attack, attackers)}, triggered"


def of(splits: Sequence[Scores], name: str, method: str) -> list[float]:
    """Return a method's numbers in a cell, one a split."""
    return [split[name][method] for split in splits]


def keeps(splits: Sequence[Scores], name: str, method: str) -> bool:
    """Return whether a method keeps its honest accuracy in a cell."""
    honest = fmean(of(splits, cell(HONEST, 0), method))
    return fmean(of(splits, name, method)) >= KEPT * honest


def table(splits: Sequence[Scores], attackers: int) -> list[str]:
    """Return the accuracies by attack and method."""
    methods = (*OURS, *RIVALS)
    lines = head("test accuracy, %", *methods)
    honest = (spread(of(splits, cell(HONEST, 0), method)) for method in methods)
    lines.append(row(HONEST, *honest))
    for attack in ATTACKS:
        name = cell(attack, attackers)
        cells = (
            marked(spread(of(splits, name, m)), keeps(splits, name, m)) for m in methods
        )
        lines.append(row(attack, *cells))
    return lines


def marked(shown: str, bold: bool) -> str:
    """Return a cell, in bold if it is to be."""
    return f"**{shown}**" if bold else shown


def backdoor_table(splits: Sequence[Scores]) -> list[str]:
    """Return how often the backdoors work."""
    methods = (*OURS, *RIVALS)
    lines = head("triggered images that are taken for a 0, %", *methods)
    cells = [(HONEST, 0)] + [(a, k) for a in BACKDOORS for k in (1, 2)]
    for attack, attackers in cells:
        name = success(attack, attackers)
        title = attack if not attackers else f"{attack}, {attackers} of 10"
        lines.append(
            row(title, *(spread(of(splits, name, method)) for method in methods))
        )
    return lines


def failures(results: Results, attackers: int) -> list[str]:
    """Return for each method the attacks under which it does not keep its accuracy."""
    lines = []
    for method in (*OURS, *RIVALS):
        lost = []
        for attack in ATTACKS:
            at = [
                a
                for a in results
                if not keeps(results[a], cell(attack, attackers), method)
            ]
            if at:
                where = "" if len(at) == len(results) else f" (α = {at[0]})"
                lost.append(f"{attack}{where}")
        lines.append(f"- {method}: {'; '.join(lost) or 'none'}.")
    return lines


def beaten(results: Results, attackers: int) -> list[str]:
    """Return where another keeps its accuracy and robust merging does not."""
    behind, nobody = [], []
    for alpha in results:
        for attack in ATTACKS:
            name, splits = cell(attack, attackers), results[alpha]
            if keeps(splits, name, ROBUST):
                continue
            able = [m for m in (*OURS, *RIVALS) if keeps(splits, name, m)]
            (behind if able else nobody).append(
                f"{attack} at α = {alpha}"
                + (f" ({', '.join(able)} can)" if able else "")
            )
    robust = "- Robust merging does not keep 90 %, and another method does: "
    return [
        f"{robust}{'; '.join(behind) or 'nowhere'}.",
        f"- No method keeps 90 %: {'; '.join(nobody) or 'nowhere'}.",
    ]


def cost(results: Results) -> list[str]:
    """Return what each method gives without attackers."""
    lines = head(
        "no attacker, test accuracy, %",
        *(f"α = {a}" for a in results),
        "minus FedFisher",
    )
    honest = cell(HONEST, 0)
    base = [of(results[a], honest, DEFAULT) for a in results]
    for method in (*OURS, *RIVALS):
        values = [of(results[a], honest, method) for a in results]
        away = [
            x - y
            for v, b in zip(values, base, strict=True)
            for x, y in zip(v, b, strict=True)
        ]
        lines.append(row(method, *map(spread, values), f"{fmean(away):+.2f}"))
    return lines


def page(opening: list[str], results: Results) -> list[str]:
    """Return the page's lines."""
    parts: list[str | list[str]] = [
        opening,
        "## What each defence costs without attackers",
        cost(results),
        "## Which attacks each fails under, at less than 90 % of its honest accuracy",
    ]
    for attackers in (1, 2):
        parts += [
            f"{attackers} of 10:",
            failures(results, attackers) + beaten(results, attackers),
        ]
    for alpha in results:
        for attackers in (1, 2):
            alone = of(results[alpha], cell(ORACLE, attackers), ORACLE)
            parts += [
                f"## α = {alpha}, {attackers} of 10 clients hostile",
                table(results[alpha], attackers),
                f"FedFisher with the attackers left out by hand: {spread(alone)}.",
            ]
        parts += [f"## α = {alpha}, backdoors", backdoor_table(results[alpha])]
    return blocks(*parts, NOTES.strip())


NOTES = """\
## Reading

**Robust merging**, by the default policy, costs nothing here without attackers, and
with one attacker of ten keeps 90 % of its accuracy in every row at both α; its worst
row at α = 0.1 is 85 %, where leaving the attacker out by hand gives 88 %. Models far
out (scaled, random, most sign flips) are left out; a lied n is worth at most 1.5 times
the median client's. Flipped labels and backdoors look to a merge of unlike clients like
what they are, models of other data, and are not left out: they are outvoted. With two
attackers of ten at α = 0.1 that no longer suffices: label flips, with or without a lied
n, leave 69 and 67 %, where leaving those two out by hand gives 86 %. No rival has more
there; Krum keeps 90 % of its own accuracy, which is 28 %.

**The default policy alone** is for honest clients. One scaled model, one sign flip
times ten or one lied n is enough. A Fisher a million times as large gains an attacker
nothing: a merge takes its root (`balance`), and little of one who is far out by it
(`robust`).

**The strict policy** costs 1.3 points without attackers (2.5 at α = 0.1), since honest
clients with more than the median's examples, or longer steps, count for less. With one
attacker it keeps 90 % in all rows but one, a sign flip times ten at α = 0.1, which is
cut to the median's length and is still too much in the wrong direction. With two it
fails at α = 0.1 under label and sign flips. **Both** have the highest accuracy in their
hardest row: two that flip labels leave 70 and 69 %, two points more than robust merging
alone; under two that flip signs at α = 0.1 they are up to 11 points behind it.

**FedAvg** fails under every step times ten or more and every lied n. **MultiKrum**
leaves out large steps and random models, weights by n whom it keeps, and so fails under
a lied n beside plausible parameters; at α = 0.1 it fails under label and sign flips.
**Trimmed mean and median** take neither n nor F, and hold at α = 0.3 with one attacker;
at α = 0.1 label and sign flips are too much, for the median random models, too, and
they start from 55 and 42 %. **Krum** is the model of a single client, honest or not:
where it picks the attacker, the backdoor works every time.
"""
