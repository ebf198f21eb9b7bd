import pytest
import rivals_path  # noqa: F401
import torch
from tasks import load_task, task_from_run_config
from tasks.task import _share_out

from flwr_fisher.errors import ConfigurationError, DataError, UnknownNameError


def digits(**changes):
    arguments = {
        "dataset": "digits",
        "model": "lenet",
        "partition": "dirichlet-client",
        "alpha": 0.5,
        "num_partitions": 4,
    }
    return load_task(**{**arguments, **changes})


def test_two_processes_would_agree():
    first = digits(validation=50, seed=3)
    _share_out.cache_clear()
    again = digits(validation=50, seed=3)
    assert first is not again
    assert first.parts == again.parts
    assert torch.equal(first.validation.data, again.validation.data)
    for p, q in zip(
        first.make_model().parameters(), again.make_model().parameters(), strict=True
    ):
        assert torch.equal(p, q)
    other = digits(validation=50, seed=4)
    assert other.parts != first.parts
    weights = [t.make_model().get_parameter("fc3.weight") for t in (first, other)]
    assert not torch.equal(*weights)


def test_clients_share_the_whole_training_set():
    whole = digits()
    assert whole.num_partitions == 4
    everyone = sorted(index for part in whole.parts for index in part)
    assert everyone == list(range(1437))
    assert whole.validation is None
    sizes = [whole.num_examples(i) for i in range(4)]
    assert whole.label_histogram().sum(dim=1).tolist() == sizes
    classes = whole.data.train.targets.bincount()
    assert torch.equal(whole.label_histogram().sum(dim=0), classes)


def test_validation_examples_are_the_training_examples_that_no_client_has():
    held = digits(validation=100)
    everyone = sorted(index for part in held.parts for index in part)
    assert len(everyone) == len(set(everyone)) == 1337
    kept = sorted(set(range(1437)) - set(everyone))
    expected = held.data.train.data[kept].flatten(1).sort(dim=0).values
    found = held.validation.data.flatten(1).sort(dim=0).values
    assert torch.equal(found, expected)
    # Uniform: it has every class.
    assert held.validation.targets.bincount(minlength=10).min() > 0


def test_train_loader_reads_a_client_s_examples_once_an_epoch():
    one = digits()
    loader = one.train_loader(1, 32)
    batches = list(loader)
    sizes = [len(y) for _, y in batches]
    assert set(sizes[:-1]) <= {32}
    assert sum(sizes) == one.num_examples(1)
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    expected, labels = one.data.train[list(one.parts[1])]
    columns = torch.cat([x.flatten(1), y[:, None]], dim=1).tolist()
    assert sorted(columns) == sorted(
        torch.cat([expected.flatten(1), labels[:, None]], dim=1).tolist()
    )


def test_train_order_comes_from_the_global_generator():
    loader = digits().train_loader(0, 32)

    def labels():
        return [int(label) for _, y in loader for label in y]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = labels(), labels()
        torch.manual_seed(0)
        assert labels() == first
    assert first != second


def test_eval_loaders_read_in_order():
    one = digits(validation=20)
    labels = torch.cat([y for _, y in one.test_loader(batch_size=100)])
    assert torch.equal(labels, one.data.test.targets)
    assert [len(y) for _, y in one.test_loader()] == [360]
    batches = list(one.eval_loader(one.validation, batch_size=8))
    assert [len(y) for _, y in batches] == [8, 8, 4]
    assert torch.equal(batches[1][0], one.validation[list(range(8, 16))][0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": "digit"}, UnknownNameError, "dataset 'digit'"),
        ({"model": "lenet6"}, UnknownNameError, "model 'lenet6'"),
        ({"partition": "none"}, UnknownNameError, "partition 'none'"),
        ({"data_dir": "here"}, ConfigurationError, "data-dir"),
        ({"validation": -1}, ConfigurationError, "validation"),
        ({"validation": 1437}, ConfigurationError, r"0…1436"),
        ({"num_partitions": 0}, ConfigurationError, "num_partitions"),
        ({"num_partitions": 400, "alpha": 0.1}, DataError, r"client \d+ has [01] "),
    ],
)
def test_errors_come_early_and_name_the_culprit(changes, error, message):
    with pytest.raises(error, match=message):
        digits(**changes)


@pytest.mark.parametrize("partition_id", [-1, 4])
def test_a_client_that_does_not_exist(partition_id):
    with pytest.raises(ConfigurationError, match=f"in 0…3, not {partition_id}"):
        digits().train_loader(partition_id, 32)


def classes_of(task):
    shared = [i for part in task.parts for i in part]
    assert len(set(shared)) == len(shared)
    return task.data.train.targets[shared].bincount(minlength=10).tolist()


def test_a_subset_has_each_class_alike_and_is_the_seeds():
    task = digits(max_examples=203)
    assert sorted(classes_of(task)) == [20] * 7 + [21] * 3
    _share_out.cache_clear()
    assert digits(max_examples=203).parts == task.parts
    assert digits(max_examples=203, seed=1).parts != task.parts
    assert len(task.data.test) == 360


def test_a_subset_is_of_what_validation_leaves_and_may_be_all():
    some = digits(max_examples=100, validation=1337)
    assert sum(classes_of(some)) == 100
    assert digits(max_examples=10**6).parts == digits().parts


@pytest.mark.parametrize("count", [-1, 0.5])
def test_a_subset_is_a_number_of_examples(count):
    with pytest.raises(ConfigurationError, match="max_examples"):
        digits(max_examples=count)


def test_a_run_config_may_have_max_examples():
    config = {"dataset": "digits", "data-dir": "", "model": "mlp", "partition": "iid"}
    config |= {"alpha": 0.1, "seed": 0}
    whole = task_from_run_config(config, 4)
    few = task_from_run_config(config | {"max-examples": 100}, 4)
    counts = [sum(map(len, task.parts)) for task in (whole, few)]
    assert counts == [1437, 100]
