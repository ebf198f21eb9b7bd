import math
from collections import Counter

import numpy as np
import pytest
import rivals_path  # noqa: F401
import torch
from tasks import (
    PARTITIONS,
    label_histogram,
    make_partitioner,
    partition_indices,
)

from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError

# 10 classes of unequal sizes, mixed.
SIZES = [80 + 10 * c for c in range(10)]
TARGETS = torch.cat([torch.full((n,), c) for c, n in enumerate(SIZES)])
TARGETS = TARGETS[torch.randperm(len(TARGETS), generator=torch.manual_seed(3))]


def split(name, seed=0, **arguments):
    arguments = {"num_partitions": 10, "alpha": 0.5, **arguments}
    return partition_indices(TARGETS, name, seed=seed, **arguments)


@pytest.mark.parametrize("name", PARTITIONS)
def test_no_example_goes_to_two_clients(name):
    parts = split(name)
    assert len(parts) == 10
    counts = Counter(index for part in parts for index in part)
    assert set(counts.values()) == {1}
    assert set(counts) <= set(range(len(TARGETS)))
    # 1250 examples: the 20 shards of 62 leave 10 over.
    assert len(counts) == (1240 if name == "shards" else 1250)


@pytest.mark.parametrize("name", PARTITIONS)
def test_only_the_seed_decides(name):
    first = split(name)
    np.random.seed(5)  # noqa: NPY002 - the global state must not matter
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert split(name) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert split(name, seed=1) != first


def test_iid_parts_are_equal_and_mixed():
    sorted_targets = TARGETS.sort().values
    parts = partition_indices(sorted_targets, "iid", num_partitions=10)
    assert {len(part) for part in parts} == {125}
    assert (label_histogram(sorted_targets, parts, 10) > 0).all()


def test_each_client_has_its_number_of_classes():
    counts = label_histogram(TARGETS, split("classes-per-client"), 10)
    assert ((counts > 0).sum(dim=1) == 2).all()
    three = split("classes-per-client", classes_per_client=3)
    assert ((label_histogram(TARGETS, three, 10) > 0).sum(dim=1) == 3).all()


def test_shards_are_runs_of_equal_labels():
    parts = split("shards", shards_per_client=2)
    assert {len(part) for part in parts} == {124}
    # A run of 62 sorted labels touches two classes at most, as each has at least 80.
    assert ((label_histogram(TARGETS, parts, 10) > 0).sum(dim=1) <= 4).all()
    assert {len(part) for part in split("shards", shards_per_client=5)} == {125}


def test_dirichlet_class_gives_small_clients_no_second_try():
    from flwr_datasets.partitioner import DirichletPartitioner

    arguments = {"num_partitions": 10, "partition_by": "label", "alpha": 0.3}
    from datasets import Dataset

    theirs = DirichletPartitioner(**arguments, min_partition_size=0, seed=4)
    theirs.dataset = Dataset.from_dict(
        {"label": TARGETS.tolist(), "index": range(len(TARGETS))}
    )
    expected = [theirs.load_partition(i)["index"][:] for i in range(10)]
    assert split("dirichlet-class", alpha=0.3, seed=4) == expected


# --- dirichlet-client


def slow_shares(clients, classes, alpha, rng):
    """The definition, with numpy's own Dirichlet draws."""
    q = np.array([rng.dirichlet([alpha] * classes) for _ in range(clients)])
    return np.array(
        [[q[i, c] / q[:, c].sum() for c in range(classes)] for i in range(clients)]
    )


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0])
def test_shares_are_distributed_as_the_definition_says(alpha):
    from tasks.partitioners import client_shares

    draws = 1500
    ours = np.stack(
        [client_shares(4, 3, alpha, np.random.default_rng(s)) for s in range(draws)]
    )
    twin = np.stack(
        [slow_shares(4, 3, alpha, np.random.default_rng(s)) for s in range(draws)]
    )
    np.testing.assert_allclose(ours.sum(axis=1), 1)
    # Moments of one share, of two clients' and of two classes' shares; the bound is
    # five standard errors of a mean of [0, 1] variables with variance below 1/4.
    bound = 5 * math.sqrt(2 / 4 / draws)
    pairs = (
        (ours, twin),
        (ours**2, twin**2),
        (ours[:, 0] * ours[:, 1], twin[:, 0] * twin[:, 1]),
        (ours[..., 0] * ours[..., 1], twin[..., 0] * twin[..., 1]),
    )
    for a, b in pairs:
        np.testing.assert_allclose(a.mean(axis=0), b.mean(axis=0), atol=bound)
    # The spread tells one alpha from another: 0.5 and 2 differ by far more than this.
    assert abs(ours.std() - twin.std()) < 0.02


def test_shares_stay_finite_where_proportions_underflow():
    from tasks.partitioners import client_shares

    shares = client_shares(5, 10, 1e-4, np.random.default_rng(0))
    np.testing.assert_allclose(shares.sum(axis=0), 1)
    # So concentrated that one client takes nearly all of each class.
    assert (shares.max(axis=0) > 0.99).all()


def test_counts_follow_the_drawn_shares():
    from tasks.partitioners import client_shares

    parts = split("dirichlet-client", num_partitions=5, seed=7)
    counts = label_histogram(TARGETS, parts, 10)
    assert counts.sum(dim=0).tolist() == SIZES
    shares = client_shares(5, 10, 0.5, np.random.default_rng(7))
    # Both ends of a piece are rounded down.
    assert (np.abs(counts.numpy() - shares * np.array(SIZES)) < 1).all()


def test_a_client_s_examples_are_mixed():
    part = split("dirichlet-client", num_partitions=2, alpha=5)[0]
    labels = TARGETS[part]
    # In order of class they would change nine times.
    assert int((labels[1:] != labels[:-1]).sum()) > 100


@pytest.mark.parametrize("name", ["dirichlet-client", "by-document"])
def test_labels_are_read_without_the_images(name):
    from datasets import Dataset, Features, Image, Value

    broken = {"bytes": b"no image", "path": None}
    rows = {"image": [broken] * 60, "label": [0, 1, 2] * 20}
    features = Features({"image": Image(), "label": Value("int64")})
    partitioner = make_partitioner(name, num_partitions=2, alpha=5.0)
    partitioner.dataset = Dataset.from_dict(rows, features)
    with pytest.raises(Exception, match="image"):
        partitioner.dataset[0]
    assert sum(len(partitioner.load_partition(i)) for i in range(2)) == 60


# --- errors


def test_an_unknown_name_lists_the_known():
    with pytest.raises(UnknownNameError, match="dirichlet-client, dirichlet-class"):
        make_partitioner("dirichlet", num_partitions=2)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_partitions", 0),
        ("classes_per_client", 0),
        ("shards_per_client", -1),
        ("alpha", 0.0),
        ("alpha", math.inf),
        ("alpha", math.nan),
        ("seed", -1),
    ],
)
def test_a_number_out_of_range_is_named(argument, value):
    with pytest.raises(ConfigurationError, match=f"{argument} must be"):
        make_partitioner("iid", **{"num_partitions": 2, argument: value})


def test_more_classes_a_client_than_there_are():
    with pytest.raises(ConfigurationError, match=r"classes_per_client must be ≤ 10"):
        split("classes-per-client", classes_per_client=11)


@pytest.mark.parametrize("name", ["dirichlet-client", "dirichlet-class"])
def test_a_client_with_too_few_examples_is_named_with_the_way_out(name):
    with pytest.raises(DataError) as caught:
        split(name, num_partitions=300, alpha=0.1, seed=2)
    message = str(caught.value)
    for part in (repr(name), "alpha 0.1", "seed 2", "larger alpha", "fewer clients"):
        assert part in message
    assert "client " in message


@pytest.mark.parametrize("name", PARTITIONS)
def test_more_clients_than_pairs_of_examples(name):
    few = r"5 examples for 3 clients.* at least 2: use fewer clients, or more examples$"
    with pytest.raises(DataError, match=few):
        partition_indices(torch.arange(5) % 2, name, num_partitions=3)


def test_a_partitioner_s_own_refusal_becomes_ours():
    # Three clients need the class of one example.
    targets = torch.tensor([0] * 20 + [1])
    with pytest.raises(DataError, match=r"classes-per-client.*Label: 1"):
        partition_indices(targets, "classes-per-client", num_partitions=3)


def test_classes_that_no_client_holds_are_warned_of():
    with pytest.warns(UserWarning, match="no client holds the classes") as caught:
        parts = split("classes-per-client", num_partitions=2)
    assert len(caught) == 1
    missing = (label_histogram(TARGETS, parts, 10).sum(dim=0) == 0).nonzero().flatten()
    assert f"classes {', '.join(map(str, missing.tolist()))};" in str(caught[0].message)


def test_histogram_counts_as_a_loop_would():
    parts = split("dirichlet-client")
    counts = label_histogram(TARGETS, parts, 12)
    assert counts.shape == (10, 12)
    for part, row in zip(parts, counts.tolist(), strict=True):
        assert row == [sum(int(TARGETS[i]) == c for i in part) for c in range(12)]
    assert label_histogram(TARGETS, [[]], 2).tolist() == [[0, 0]]
