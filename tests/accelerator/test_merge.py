"""What a merge on an accelerator waits for: as often for any number of iterations."""

import pytest
import torch
from devices import pretended
from nets import IMAGES
from oracles import randn, random_kronecker, relative, seeded
from test_devices import convolutions

from flwr_fisher.curvature import BlockDiagonal, Kronecker, fisher
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state

DEVICE = pretended.NAME


def clients(structure, count=3):
    found = []
    for seed in range(count):
        model, inputs = seeded(convolutions, seed), IMAGES + seed
        model(inputs)
        curvature = fisher(model, [inputs], structure)
        found.append(LocalPosterior(shared_state(model), curvature, 10 + seed))
    return found


def waits(posteriors, **options):
    with pretended.watch() as seen:
        merged = fedfisher(posteriors, device=DEVICE, **options)
    return seen, merged


SOLVERS = [("kfac", solver) for solver in ("pcg", "cg", "gd", "adam")]
SOLVERS += [("diagonal", "pcg"), ("diagonal", "closed-form")]


# What clients weigh in a layer, its solution and whether that is one.
A_LAYER = 8


@pytest.mark.parametrize(("structure", "solver"), SOLVERS)
def test_a_layer_is_read_as_often_for_any_number_of_iterations(structure, solver):
    posteriors = clients(structure)
    layers = len(posteriors[0].curvature.blocks())
    for iterations in (1, 4):
        options = {"solver": solver}
        options |= {} if solver == "closed-form" else {"iterations": iterations}
        seen, merged = waits(posteriors, **options)
        assert len(seen.waits()) <= A_LAYER * layers + 1, seen.where()
        want = fedfisher(posteriors, device="cpu", **options)
        assert merged.iterations == want.iterations
        assert merged.residuals == pytest.approx(want.residuals, rel=1e-3, abs=1e-6)
        for name, value in want.params.items():
            assert relative(merged.params[name], value) < 1e-4, name


@pytest.mark.parametrize(("solver", "most"), [("cg", None), ("gd", 100), ("adam", 100)])
def test_many_iterations_are_read_no_oftener(solver, most):
    posteriors = clients("kfac")
    seen, merged = waits(posteriors, solver=solver, iterations=most)
    assert merged.iterations > 50
    layers = len(posteriors[0].curvature.blocks())
    assert len(seen.waits()) <= A_LAYER * layers + 1, seen.where()


def test_a_score_is_read_once_in_a_hundred_steps():
    posteriors, scored = clients("kfac"), []
    layers = len(posteriors[0].curvature.blocks())

    def score(params):
        scored.append(1)
        return 0.0

    seen, _ = waits(posteriors, solver="adam", iterations=200, score=score)
    assert len(scored) == 2
    assert len(seen.waits()) <= A_LAYER * layers + 2 * len(scored) + 2, seen.where()


def test_of_a_layer_that_is_solved_the_factors_are_let_go():
    """What the next layer's wait brings as well is a solution alone."""
    peaks = []
    for count in (1, 4):
        layers = [random_kronecker(i, f"w{i}", (4, 256)) for i in range(count)]
        params = {name: randn(1, 4, 256) for each in layers for name in each.shapes}
        one = LocalPosterior(params, BlockDiagonal(layers).to(dtype=torch.float32), 1)
        pretended.settled(0)
        pretended.reset_peak()
        fedfisher([one] * 3, device=DEVICE)
        peaks.append(pretended.peak())
    assert peaks[1] < 1.1 * peaks[0], peaks


def test_it_stops_where_the_cpu_does():
    posteriors = clients("kfac")
    options = {"solver": "cg", "iterations": 40, "tolerance": 0.3}
    _, merged = waits(posteriors, **options)
    want = fedfisher(posteriors, device="cpu", **options)
    assert merged.iterations == want.iterations < 40
    assert merged.residuals == pytest.approx(want.residuals, rel=1e-3)


def test_a_layer_without_curvature_stays_at_the_mean_and_is_named():
    posteriors = [
        LocalPosterior(
            {"w": torch.full((2, 3), float(i))},
            Kronecker("w", (2, 3), torch.zeros(1, 3, 3), torch.zeros(1, 2, 2), None),
            1,
        )
        for i in range(3)
    ]
    _, merged = waits(posteriors)
    want = fedfisher(posteriors, device="cpu")
    assert merged.unsolved == want.unsolved
    assert torch.equal(merged.params["w"], want.params["w"])


def test_curvatures_that_float32_does_not_hold_are_merged_as_on_the_cpu():
    posteriors = [
        LocalPosterior(each.params, each.curvature.scaled(1e-30), each.num_examples)
        for each in clients("kfac")
    ]
    _, merged = waits(posteriors)
    for name, value in fedfisher(posteriors, device="cpu").params.items():
        assert relative(merged.params[name], value) < 1e-4, name


def test_uploads_that_are_on_the_accelerator_stay_there():
    here = clients("kfac")
    posteriors = [
        LocalPosterior(
            {name: value.to(DEVICE) for name, value in each.params.items()},
            each.curvature.to(DEVICE),
            each.num_examples,
        )
        for each in here
    ]
    merged = fedfisher(posteriors).params
    for name, value in fedfisher(here).params.items():
        assert merged[name].device.type == DEVICE
        assert relative(merged[name].cpu(), value) < 1e-4, name
