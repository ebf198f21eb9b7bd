"""Draw the pictures in results/ anew, from the numbers beside them.

    python benchmarks/redraw.py

Nothing is measured. The images of inversion.py are not among the numbers, and those of
codec.py are of version 0.3.
"""

import fedfish
import merge_size
import merges
import refinement
import rounds
import tct
import theory
from harness.page import RESULTS, command_line, numbers_of


def main() -> None:
    """Draw all pictures."""
    command_line(__doc__).parse_args()
    for page in (merge_size.PAGE, rounds.PAGE, tct.PAGE):
        page.draw()
    theory.plot(numbers_of("theory"))
    runs = fedfish.found_in(numbers_of("fedfish")).runs
    fedfish.tables.plot(runs, RESULTS / "fedfish.png")
    for name in merges.PROBLEMS:
        merges.draw(name, merges.results_in(numbers_of(f"rivals_{name}"), name))
        scores = refinement.by_alpha(name, numbers_of(f"refinement_{name}"))
        refinement.draw(name, scores)
    refinement.draw("unseen", numbers_of("refinement_unseen"))


if __name__ == "__main__":
    main()
