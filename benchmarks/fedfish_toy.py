"""FedFish's toy regression, over seeds: the barrier of one merge, beside FedAvg's.

    python benchmarks/fedfish_toy.py

Two clients fit one curve, each on inputs of its own, which overlap in full, in part or
not at all (FedFish's figure 2); setting, network and picture are those of
``examples/fedfish_toy.py``, by whose docstring the paper leaves both to the reader.
*Barrier*: the merged model's mean squared error minus the client's own, on its data;
means over both clients, ± standard deviation over 20 seeds. *Momentum* is that of local
SGD: without it, the example's.
"""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from harness.page import blocks, command_line, opening, write_page
from harness.size import sized
from harness.stats import paired, spread, with_error
from harness.tables import head, row

TOY = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "fedfish_toy.py"))
SEEDS, MOMENTA = sized((range(20), (0.0, 0.9)), (range(2), (0.0,)))
Barriers = Mapping[str, Sequence[float]]  # a mean over clients a seed, by method


def barriers(support: str, momentum: float) -> Barriers:
    """Return both methods' barriers, one a seed."""
    runs = [TOY["one_round"](support, seed, momentum) for seed in SEEDS]
    return {m: [mean(run.barriers[m]) for run in runs] for m in TOY["METHODS"]}


def table(found: Mapping[str, Mapping[str, Barriers]]) -> list[str]:
    """Return the table's lines."""
    lines = head("", "inputs", *TOY["METHODS"], "FedFish minus FedAvg ± s.e.", "lower")
    for momentum, supports in found.items():
        for support, own in supports.items():
            avg, fish = own["FedAvg"], own["FedFish"]
            gains = paired(fish, avg)
            cells = (spread(values, 3) for values in (avg, fish))
            lower = f"{sum(gain < 0 for gain in gains)} of {len(gains)}"
            lines.append(
                row(
                    f"momentum {momentum}", support, *cells, with_error(gains, 3), lower
                )
            )
    return lines


def main() -> None:
    """Write the page."""
    command_line(__doc__).parse_args()
    found = {
        f"{momentum:g}": {s: barriers(s, momentum) for s in TOY["SUPPORTS"]}
        for momentum in MOMENTA
    }
    page = blocks(opening("FedFish's toy regression", __doc__), table(found))
    write_page("fedfish_toy", page, found)


if __name__ == "__main__":
    main()
