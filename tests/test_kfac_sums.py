"""K-FAC merged from sums over clients: the same iterations as from the parts."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracles import randn, random_kronecker, relative

from flwr_fisher.curvature import BlockDiagonal, Diagonal, Kronecker, WeightedSum
from flwr_fisher.curvature.operators.base import Iterate
from flwr_fisher.curvature.operators.factors import DenseFactor
from flwr_fisher.merge import (
    LocalPosterior,
    MergeOptions,
    balanced,
    fedavg,
    fedfisher,
    partial_traces,
)
from flwr_fisher.merge.sums_solver import (
    advanced,
    begin,
    begun_again,
    from_groups,
    merged,
    step_of_product,
    to_groups,
)
from flwr_fisher.params import (
    flatten,
    norm,
    scale,
    select,
    shares_of,
    subtract,
    weighted_mean,
)
from flwr_fisher.wire.additive import GradientUpload, LayerTraces


def grouped(seed):
    """A convolution's of two groups, and a norm's diagonal beside it."""
    A, G = (
        DenseFactor((m := randn(seed + side, 2, n, n, dtype=torch.float64)) @ m.mT)
        for side, n in ((0, 5), (50, 3))
    )
    scale = randn(seed + 99, 6, dtype=torch.float64).square()
    return BlockDiagonal(
        [Kronecker("w", torch.Size([6, 4]), A, G, "b"), Diagonal({"norm": scale})]
    )


def layers(seed):
    """Two layers, one of which has a bias; of quite unlike sizes."""
    first = random_kronecker(seed, bias="b")
    second = random_kronecker(seed + 40)
    wide = [f.to(dtype=torch.float64) for f in (first, second.scaled(1e-4))]
    renamed = Kronecker("v", wide[1].weight_shape, wide[1].A, wide[1].G, None)
    return BlockDiagonal([wide[0], renamed])


CASES = {"layers": layers, "grouped": grouped}


def clients(name, count=4):
    made = []
    for seed in range(count):
        curvature = CASES[name](10 * seed + 1).scaled(10.0**-seed)
        params = {
            k: randn(7 * seed + i, *shape, dtype=torch.float64)
            for i, (k, shape) in enumerate(curvature.shapes.items())
        }
        made.append(LocalPosterior(params, curvature, 5.0 + 3 * seed))
    return made


def from_sums(posteriors, options, left=None):
    """Merge as clients and a server would who see sums alone; from step 2 some left."""
    weights = [p.num_examples for p in posteriors]
    settings = {k: getattr(options, k) for k in ("shrink", "damping", "balance")}
    own = [balanced(p.curvature, **settings) for p in posteriors]
    mean = fedavg(posteriors)

    def pull(point):
        pulls = [
            F.matvec(subtract(select(p.params, F.shapes), select(point, F.shapes)))
            for F, p in zip(own, posteriors, strict=False)
        ]
        return weighted_mean(pulls, weights)

    traces = summed([partial_traces(F) for F in own], weights)
    layers = begin(traces, pull(mean), options.anchor)
    for iteration in range(options.iterations):
        layers = from_groups(to_groups(layers), traces)  # as between exchanges
        if iteration == 2 and left:
            own, weights = own[:left], weights[:left]
            point = merged(mean, layers).params
            layers = begun_again(traces, layers, pull(point), options.anchor)
            layers = from_groups(to_groups(layers), traces)
        direction = {k: v for layer in layers for k, v in layer.direction.items()}
        products = [F.matvec(direction) for F in own]
        layers = advanced(traces, layers, weighted_mean(products, weights), options)
    return merged(mean, layers).params


def options_of(**options):
    return MergeOptions(**options).filled()


def summed(curvatures, weights):
    shares = shares_of(weights)
    blocks = []
    for parts in zip(*(F.blocks() for F in curvatures), strict=True):
        first = parts[0]
        if isinstance(first, Kronecker):
            A, G = (
                sum(
                    s * getattr(part, name)
                    for s, part in zip(shares, parts, strict=True)
                )
                for name in "AG"
            )
            blocks.append(Kronecker(first.weight, first.weight_shape, A, G, first.bias))
        else:
            blocks.append(Diagonal(WeightedSum(parts, shares).diagonal()))
    return BlockDiagonal(blocks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"shrink": 0.3, "damping": 0.2},
        {"anchor": 1.0},
        {"anchor": 0.0},
        {"shrink": 0.1, "balance": 1.0},  # which is by layer, and a client's own
    ],
    ids=str,
)
def test_iterations_from_sums_are_those_from_parts(name, iterations, own):
    options = {"shrink": 0.0, "robust": 0.0, "max_share": 1.0, **own}
    options["iterations"] = iterations
    made = clients(name)
    expected = fedfisher(made, **options).params
    got = from_sums(made, options_of(**options))
    for key, value in expected.items():
        assert relative(got[key], value) <= 1e-5, key


@pytest.mark.parametrize("left", [3, 2])
def test_many_iterations_solve_the_dense_system(left):
    """That of the clients that are left; the ridge stays that of all."""
    made = clients("layers", 3)
    options = options_of(
        shrink=0.0, balance=0.0, robust=0.0, anchor=0.05, iterations=60, tolerance=0
    )
    got, mean = from_sums(made, options, left), fedavg(made)
    weights = [p.num_examples for p in made]
    for names in (["w", "b"], ["v"]):
        blocks = [
            next(b for b in p.curvature.blocks() if names[0] in b.shapes) for p in made
        ]
        dense = [block.to_dense() for block in blocks]
        trace = sum(
            s * F for s, F in zip(shares_of(weights), dense, strict=True)
        ).trace()
        shares, dense = shares_of(weights[:left]), dense[:left]
        total = sum(s * F for s, F in zip(shares, dense, strict=True))
        order = list(blocks[0].shapes)
        away = [
            flatten({k: p.params[k] - mean[k] for k in order}).unsqueeze(1)
            for p in made[:left]
        ]
        pull = sum(s * F @ d for s, F, d in zip(shares, dense, away, strict=True))
        ridge = 0.05 * trace / len(total)
        step = torch.linalg.solve(total + ridge * torch.eye(len(total)).to(total), pull)
        moved = flatten({k: got[k] - mean[k] for k in order})
        assert relative(moved, step.squeeze(1)) <= 1e-5


def test_identical_clients_give_their_model():
    one = clients("grouped", 1)[0]
    got = from_sums([one, one, one], options_of(iterations=2))
    for key, value in one.params.items():
        assert relative(got[key], value) <= 1e-12


def test_a_layer_without_curvature_stays_at_the_mean():
    made = [
        LocalPosterior(p.params, p.curvature.scaled(0.0), p.num_examples)
        for p in clients("grouped")
    ]
    got, mean = from_sums(made, options_of(iterations=2)), fedavg(made)
    assert all(torch.equal(got[key], mean[key]) for key in mean)


def at(name, value, norms):
    """A layer's state of one number, with the norms of its residuals."""
    solution = {name: torch.tensor([value], dtype=torch.float64)}
    state = Iterate.start(solution)
    numbers = [torch.tensor(norm, dtype=torch.float64) for norm in norms]
    steps = torch.tensor(len(norms) - 1.0).double()
    return replace(state, solution=solution, norms=numbers, steps=steps)


def test_a_block_that_is_not_solved_stays_at_the_mean():
    mean = {k: torch.ones(1) for k in "abcd"}
    found = {"a": 1.0, "b": math.nan, "c": 0.0, "d": 1e300}
    norms = [[4.0, 2.0, 1.0], [2.0, 1.0], [3.0], [2.0, 0.0]]
    got = merged(mean, [at(k, v, n) for (k, v), n in zip(found.items(), norms)])  # noqa: B905
    assert got.unsolved == ["b", "c", "d"]
    assert float(got.params["a"]) == 2.0
    assert all(torch.equal(got.params[k], mean[k]) for k in "bcd")
    assert got.params["a"].dtype == torch.float32
    assert got.iterations == 2
    first = math.hypot(4, 2, 3, 2)
    later = math.hypot(2, 1, 3) / first, math.hypot(1, 1, 3) / first
    assert got.residuals == pytest.approx([1, *later])
    assert all(torch.equal(got.mean[k], mean[k]) for k in mean)


@pytest.mark.parametrize(("norms", "unsolved"), [([0.0], []), ([1.0, math.inf], ["a"])])
def test_where_there_is_nothing_to_solve_nothing_is_unsolved(norms, unsolved):
    assert merged({"a": torch.ones(1)}, [at("a", 0.0, norms)]).unsolved == unsolved


# How far one client's pull leads


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("anchor", [0.0, 0.1, 1.0])
def test_no_honest_pull_leads_further_than_its_client_went(name, anchor):
    for client in clients(name):
        F, away = client.curvature, client.params
        step = step_of_product(partial_traces(F), F.matvec(away), anchor)
        assert float(norm(step)) <= float(norm(away))


def test_numbers_that_are_no_product_of_a_fisher_lead_far():
    """As far as the merge goes for them: it divides by what the Fisher has there."""
    one = torch.zeros(1, 8, 8, dtype=torch.float64)
    one[0, 0, 0] = 1.0  # the only input that the client has ever seen
    G = torch.eye(4, dtype=torch.float64).unsqueeze(0)
    F = Kronecker("w", torch.Size([4, 8]), one, G)
    away = {"w": randn(1, 4, 8, dtype=torch.float64)}
    pull = F.matvec(away)
    numbers = {"w": randn(2, 4, 8, dtype=torch.float64)}
    numbers = scale(numbers, float(norm(pull)) / float(norm(numbers)))
    step_of = partial(step_of_product, partial_traces(F), anchor=1e-3)
    honest, invented = (float(norm(step_of(each))) for each in (pull, numbers))
    assert honest < float(norm(away))
    assert invented > 10 * honest


def test_of_two_limits_of_a_product_the_lower_one_counts():
    """Not both: then a longer product would count for less."""
    F = random_kronecker(0)
    product = {name: torch.ones(shape) for name, shape in F.shapes.items()}
    upload = LayerTraces.of(product, partial_traces(F))
    for cut in ([0.5, 0.25], [0.25, 0.5]):
        factors = dict(zip(("step of the product", "product"), cut, strict=True))
        left = upload.scaled(factors, product).part("product")
        assert all(torch.equal(v, torch.full_like(v, 0.25)) for v in left.values())


@pytest.mark.parametrize("kind", [LayerTraces, GradientUpload])
def test_whatever_a_policy_measures_it_can_cut(kind):
    F = random_kronecker(0)
    vector = {name: torch.ones(shape) for name, shape in F.shapes.items()}
    parts = (vector, F) if kind == LayerTraces else (vector, torch.ones(()), F)
    upload = kind.of(*parts)

    def sizes(upload):
        return {**upload.step_norms(vector), **upload.curvature_norms()}

    for name, size in sizes(upload).items():
        assert sizes(upload.scaled({name: 0.5}, vector))[name] < size
