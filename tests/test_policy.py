"""What limits a client's influence: more never counts for less."""

import math

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord

from flwr_fisher.rounds import scaffold_control, scaffold_step
from flwr_fisher.server.exchange import Upload
from flwr_fisher.server.policy import Sizes, remembered
from flwr_fisher.strategies import Policy
from flwr_fisher.wire import Additive

POLICIES = {"default": Policy(), "strict": Policy.strict()}
LIMITS = ("weights", "distances", "curvatures")


def drawn(seed, count):
    """Sizes over six decades, some of them equal, or next to nothing."""
    generator = np.random.default_rng(seed)
    values = 10 ** generator.uniform(-3, 3, count)
    values[generator.random(count) < 0.2] = 1.0
    values[generator.random(count) < 0.1] = 1e-12
    return values.tolist()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("what", LIMITS)
def test_more_never_counts_for_less(name, what):
    limit = getattr(POLICIES[name], what)
    for seed in range(200):
        values = drawn(seed, 3 + seed % 9)
        limited = limit(values)
        assert all(
            after <= before for after, before in zip(limited, values, strict=True)
        )
        assert all(np.diff(np.array(limited)[np.argsort(values, kind="stable")]) >= 0)
        for place in range(len(values)):
            for factor in (1.01, 3.0, 40.0, 1e6, 1e12):
                more = values.copy()
                more[place] *= factor
                assert limit(more)[place] >= limited[place]


@pytest.mark.parametrize("count", [3, 5, 10, 100])
def test_sizes_of_three_decades_are_left_as_they_are(count):
    """Zipf's law from 10 to 10 000 examples, and one client that has nearly all."""
    sizes = [max(10_000 / rank, 10.0) for rank in range(1, count + 1)]
    for values in (sizes, [10.0] * (count - 1) + [10_000.0]):
        for what in LIMITS:
            assert getattr(Policy(), what)(values) == values


@pytest.mark.parametrize("name", POLICIES)
def test_one_client_has_at_most_the_share_that_the_docstring_says(name):
    policy = POLICIES[name]
    k = policy.max_weight
    for seed in range(200):
        values = drawn(seed, 3 + seed % 9)
        for place in range(len(values)):
            weights = policy.weights([*values[:place], 1e30, *values[place + 1 :]])
            share = weights[place] / math.fsum(weights)
            assert share <= k / (k + math.ceil(len(values) / 2) - 1) + 1e-9


@pytest.mark.parametrize("name", POLICIES)
def test_what_one_client_adds_to_a_kept_part_is_bounded(name):
    """By 14 max_distance times the sum of the medians, whatever it says."""
    policy, generator = POLICIES[name], np.random.default_rng(0)
    known, added, medians = {}, 0.0, 0.0
    for server_round in range(300):
        honest = (generator.uniform(0.5, 2, 4) * 0.9**server_round).tolist()
        sizes = [Sizes({"control": length}, {}) for length in [*honest, 1e12]]
        references = policy.references(sizes, known, "control")
        known = remembered(references, known, "control")
        lengths = [own.step_norms["control"] for own in sizes]
        added += policy.distances(lengths, references["control"])[-1]
        medians += sorted(lengths)[2]
    assert added <= 14 * policy.max_distance * medians
    assert known["control"] > 0.9**server_round  # it waits for who is late


@pytest.mark.parametrize("name", POLICIES)
def test_who_moves_the_model_far_goes_no_further_for_it(name):
    """Honest steps are as long as the model is far, and so would its own be."""
    policy, known, far = POLICIES[name], {}, 1.0
    longest = policy.max_distance**2 * 0.01
    for _ in range(100):
        lengths = [0.01 * far] * 4 + [1e12 * far]
        sizes = [Sizes({"parameters": length}, {}) for length in lengths]
        references = policy.references(sizes, known)
        known = remembered(references, known)
        limited = policy.distances(lengths, references["parameters"])
        assert limited[:-1] == lengths[:-1]
        assert limited[-1] <= max(longest, lengths[0])
        far += limited[-1] / 5
    assert far < 2 + 100 * longest / 5


def test_a_first_round_in_which_nothing_moves_limits_no_later_one():
    still, moving = ([Sizes({"parameters": n}, {})] * 3 for n in (0.0, 1.0))
    known = remembered(Policy().references(still, {}), {})
    assert Policy().references(moving, known) == {"parameters": 1.0}


def test_what_most_clients_lack_is_not_cut_to_nothing():
    """The gradient of a feature that two of five clients have, for example."""
    lengths = [0.0, 0.0, 0.0, 4.0, 5.0]
    sizes = [Sizes({"hvp": length}, {}) for length in lengths]
    references = Policy().references(sizes, {})
    assert remembered(references, {}) == {}
    assert Policy().distances(lengths, references.get("hvp")) == lengths
    assert Policy(max_curvature=2).curvatures(lengths) == lengths
    # Three show what is usual, and a strict policy takes zeros at their word.
    assert Policy(max_distance=2).distances([0, 0, 0, 0, 1, 1, 9]) == [0] * 4 + [
        1,
        1,
        2,
    ]
    assert not any(Policy.strict().distances(lengths, 0.0))


@pytest.mark.parametrize("ids", [10**6, -1])
def test_one_client_changes_no_index(ids):
    """Out of range in the mean, it ended every client's training."""
    like = {"ids": torch.arange(4), "mask": torch.ones(3, dtype=torch.bool)}
    spoiled = {"ids": torch.full((4,), ids), "mask": torch.zeros_like(like["mask"])}
    payloads = [Additive({"params": own}) for own in (like, like, like, spoiled)]
    uploads = [
        Upload(i, f"{i}", 1.0, payload, MetricRecord(), num_bytes=0)
        for i, payload in enumerate(payloads)
    ]
    sizes, policy = [Sizes.of(own, like) for own in payloads], Policy.strict()
    *_, last = policy.limit(uploads, sizes, like, policy.references(sizes, {}))
    for name, value in like.items():
        assert torch.equal(last.payload.part("params")[name], value)


def limited(policy, vectors, known):
    """Vectors of one part that clients keep, cut to the policy's limit."""
    lengths = [float(vector.norm()) for vector in vectors]
    sizes = [Sizes({"part": length}, {}) for length in lengths]
    references = policy.references(sizes, known, "part")
    cut = policy.distances(lengths, references["part"])
    known |= remembered(references, known, "part")
    median = sorted(lengths)[len(lengths) // 2]
    return [v * b / a for v, a, b in zip(vectors, lengths, cut, strict=True)], median


def test_one_hostile_client_moves_scaffolds_optimum_by_no_more_than_stated():
    """By 14 times the sum of medians, over the others' number and curvature."""
    honest, lr, steps, policy = 5, 0.1, 5, Policy.strict()
    generator = torch.Generator().manual_seed(0)
    curvatures = torch.rand(honest, 3, generator=generator).double() + 0.5
    targets = torch.randn(honest, 3, generator=generator).double()
    optimum = (curvatures * targets).sum(0) / curvatures.sum(0)
    theta, c = torch.zeros(2, 3).double()
    own, medians = torch.zeros(honest, 3).double(), 0.0
    of_models, of_controls = {}, {}
    for _ in range(300):
        moved, changes = [], []
        for mine, curvature, target in zip(own, curvatures, targets, strict=True):
            w = theta
            for _ in range(steps):
                w = w - lr * (curvature * (w - target) - mine + c)
            rates = {"steps": steps, "lr": lr}
            terms = ({"w": v} for v in (mine, c, theta - w))
            changes.append(scaffold_control(*terms, **rates)["w"] - mine)
            moved.append(theta - w)
        moved, _ = limited(policy, [*moved, -1e4 * sum(moved)], of_models)
        changes, median = limited(policy, [*changes, -1e4 * sum(changes)], of_controls)
        own, medians = own + torch.stack(changes[:-1]), medians + median
        new, control = scaffold_step(
            {"w": theta},
            {"w": c},
            [{"w": v} for v in moved],
            [{"w": v} for v in changes],
            [1] * (honest + 1),
        )
        theta, c = new["w"], control["w"]
    distance = float((theta - optimum).norm())
    assert distance <= 14 * medians / (honest * float(curvatures.mean(0).min()))
