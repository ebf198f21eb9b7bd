"""Colours and lines of pictures: readers with any one kind of cone missing tell them.

Colour blindness as in Machado, Oliveira & Fernandes (2009), severity 1. The difference
of two colours is their distance in CIELAB.
"""

from itertools import combinations, cycle, islice
from pathlib import Path

import numpy as np
import pytest

from flwr_fisher.report.pictures import COLORS, LINES

ENOUGH = 20
SEEN = {
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 "
    "-0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 "
    "-0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 "
    "0.004733 0.691367 0.303900",
    "full vision": "1 0 0 0 1 0 0 0 1",
}
TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]


def lab(color, kind):
    """Return the CIELAB of a colour "#rrggbb", as it is seen."""
    rgb = np.array([*bytes.fromhex(color[1:])]) / 255
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.array(SEEN[kind].split(), float).reshape(3, 3) @ rgb
    xyz = TO_XYZ @ seen.clip(0, 1)
    t = xyz / (TO_XYZ @ np.ones(3))
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", SEEN)
def test_any_two_curves_differ_in_colour_or_in_line(kind, monkeypatch):
    """Those of the benchmarks in colour."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from harness.plots import INK, RUNS

    looks = [*islice(zip(cycle(COLORS), cycle(LINES), strict=False), 12)]
    for curves in (looks, [(color, "") for color in (*RUNS, INK)]):
        for (one, line), (other, dashes) in combinations(curves, 2):
            apart = np.linalg.norm(lab(one, kind) - lab(other, kind))
            assert apart >= ENOUGH or line != dashes, (one, other)
