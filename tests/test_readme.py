"""The README's example is a complete app in 20 lines, and all examples run."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import jobs
from flwr_fisher.curvature import fisher
from flwr_fisher.errors import ParamsError
from flwr_fisher.merge import LocalPosterior, MergeOptions, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.tangent import TCTModel
from flwr_fisher.testing import LocalGrid

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
SHORTER = {  # than a page's runs
    "fedfish.md": {"num_rounds=20": "num_rounds=2", "[20]": "[2]"},
    "fagh.md": {"num_rounds=10": "num_rounds=2"},
    "watching.md": {"num_rounds=50": "num_rounds=4"},
    "tct.md": {"stage1_rounds=20": "stage1_rounds=3", "num_rounds=51": "num_rounds=9"},
}
# Whose blocks need nothing.
ALONE = ("differential-privacy", "hostile-clients", "secure-sums", "waiting")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


CLIENT, SERVER = blocks(README)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def load_data(partition):
    generator = torch.Generator().manual_seed(partition)
    x, y = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    data = TensorDataset(x + 2 * nn.functional.one_hot(y, 4), y)
    return DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)


@pytest.fixture
def my_app(monkeypatch):
    module = ModuleType("my_app")
    module.Net, module.load_data = Net, load_data
    monkeypatch.setitem(sys.modules, "my_app", module)
    Path.home().mkdir(parents=True)
    return module


def ran(page, at=0, *, clients=3, **training):
    """What a page's block leaves, with the README's clients, who may train shorter."""
    own = ", ".join(f"{key}={value}" for key, value in training.items())
    client = {}
    exec(CLIENT.replace("epochs=30", own or "epochs=30"), client)
    namespace = {"grid": LocalGrid(client["app"], num_supernodes=clients)}
    block = blocks(DOCS / page)[at]
    for long, short in SHORTER.get(page, {}).items():
        assert long in block
        block = block.replace(long, short)
    exec(block, namespace)
    return namespace


def accuracy(model):
    x, y = next(iter(load_data(0)[1]))
    return (model(x).argmax(1) == y).float().mean()


def test_client_and_server_run_and_are_short(my_app):
    client, server = {}, {}
    exec(CLIENT, client)
    exec(SERVER, server)
    lines = [line for line in (CLIENT + SERVER).splitlines() if line.strip()]
    assert len(lines) <= 20
    assert len(README.read_text().splitlines()) <= 120
    grid = LocalGrid(client["app"], num_supernodes=3)
    server["app"](grid, Context(1, 1, {}, RecordDict(), {}))
    model = Net()
    model.load_state_dict(torch.load(Path.home() / "model.pt"))
    assert accuracy(model) > 0.6


def test_the_app_of_the_first_ten_minutes_runs(my_app, monkeypatch, capsys):
    page = (DOCS / "start.md").read_text()
    own, client, server = blocks(DOCS / "start.md")
    assert client == CLIENT
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    components = tomllib.loads(project)["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "server_app:app", "clientapp": "client_app:app"}
    exec(own, my_app.__dict__)
    clients, served = {}, {}
    exec(client.replace("epochs=30", "epochs=10"), clients)
    exec(server, served)
    served["app"](LocalGrid(clients["app"], 5), Context(1, 1, {}, RecordDict(), {}))
    scores = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert scores["FedFisher"] > scores["FedAvg"] + 0.1
    assert (Path.home() / "model.pt").exists()


def test_the_test_examples_run(my_app, monkeypatch):
    for name, code in {"client_app": CLIENT, "server_app": SERVER}.items():
        module = ModuleType(name)
        exec(code, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    namespace = {}
    first, second, _ = blocks(DOCS / "testing.md")
    exec(first, namespace)
    assert set(namespace["result"].arrays) == set(shared_state(Net()))
    exec(second, namespace)
    assert (Path.home() / "model.pt").exists()


def test_the_tests_of_a_strategy_of_ones_own_find_what_is_lost(
    tmp_path, monkeypatch, capsys
):
    """The file that the page has, on the tutorial's strategy, and on a spoiled one."""
    tutorial = (ROOT / "examples" / "own_method.py").read_text()
    strategy = tutorial.partition("# %%\n# A run\n")[0]
    spoiled = strategy.replace('(params, {"velocity": velocity})', "(params)")
    packed = (
        "from flwr_fisher.strategies import FedFisherOneShot\n\n\n"
        "class HeavyBall(FedFisherOneShot):\n"
        "    def __init__(self, *, beta, **options):\n"
        "        super().__init__(**options)\n"
    )
    texts = {"right": strategy, "spoiled": spoiled, "packed": packed}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_strategy.py").write_text(text)
        tests = blocks(DOCS / "testing.md")[2]
        (tmp_path / name / "test_my_strategy.py").write_text(tests)
    # In this process: a new one's imports take longer than the tests.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(jobs._JOBS["train"], "signs", None)
    del jobs._JOBS["train"]["signs"]  # the tutorial has its own
    own = "-qs --tb=no --basetemp=inner -p no:faulthandler -p no:hypothesispytest"
    for which, outcome in {
        ("right",): "7 passed",
        ("spoiled", "-k", "by_hand"): "1 failed, 6 deselected",
        ("packed", "-k", "nan"): "1 passed, 6 deselected",
    }.items():
        pytest.main([*own.split(), *which])
        del sys.modules["my_strategy"], sys.modules["test_my_strategy"]
        assert outcome in (told := capsys.readouterr().out), told


class Normed(nn.Sequential):
    def __init__(self):
        norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(3)]
        super().__init__(nn.Linear(4, 8), norms[0], nn.Linear(8, 3), norms[1])


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """Two models in a folder, and their data, which are far apart."""
    monkeypatch.chdir(tmp_path)
    task = ModuleType("my_task")
    task.Net, task.loader_a, task.loader_b = Normed, load_data(0)[1], load_data(1)[1]
    task.loader_b.dataset.tensors[0].add_(3)
    monkeypatch.setitem(sys.modules, "my_task", task)
    files = {"a.safetensors": task.loader_a, "b.safetensors": task.loader_b}

    def make(dtype):
        for path in files:
            save_file(Normed().to(dtype).state_dict(), path)
        return files

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_on_disk_become_one_file(checkpoints, dtype):
    clients, files = [], checkpoints(dtype)
    for path, loader in files.items():
        model = Normed()
        model.load_state_dict(load_file(path))
        F = fisher(model, loader)
        clients.append(LocalPosterior(shared_state(model), F, len(loader.dataset)))
    by_hand = Normed()
    by_hand.load_state_dict(fedfisher(clients).params)
    for norm in (by_hand[1], by_hand[3]):
        norm.reset_running_stats()
        norm.momentum = None  # the mean over batches, of which there is one
    by_hand(torch.cat([loader.dataset.tensors[0] for loader in files.values()]))
    names, (first, _, second, mean) = {}, blocks(DOCS / "without-flower.md")
    exec(first, names)
    merged = load_file("merged.safetensors")
    for name, value in by_hand.state_dict().items():
        if name.endswith("running_var"):
            value = value * 47 / 48  # torch's is of a sample
        if value.is_floating_point():
            torch.testing.assert_close(merged[name], value.to(dtype))
    exec(second, names)
    alike = fedfisher(clients).params
    assert all(torch.equal(v, alike[k]) for k, v in names["merged"].items())
    exec(mean, {})
    a, b, mean = (load_file(f"{name}.safetensors") for name in ("a", "b", "mean"))
    half = (a["0.weight"].float() + b["0.weight"].float()) / 2
    assert torch.equal(mean["0.weight"], half.to(dtype))


def test_the_last_layer_of_a_merge_on_disk_is_solved_for(checkpoints, monkeypatch):
    task = sys.modules["my_task"]
    monkeypatch.setattr(task, "Net", Net)
    monkeypatch.setattr(task, "loader_b", load_data(1)[1])
    torch.manual_seed(0)
    for name in ("a", "b"):
        save_file(Net().state_dict(), f"{name}.safetensors")
    names = {}
    for block in blocks(DOCS / "without-flower.md")[:2]:
        exec(block, names)
    model, correct = Net(), {}
    for name in ("merged", "with-head"):
        model.load_state_dict(load_file(f"{name}.safetensors"))
        correct[name] = accuracy(model)
    assert correct["with-head"] > correct["merged"] + 0.2


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        (lambda state: state | {"0.bias": torch.full((8,), torch.nan)}, ": .* NaN"),
        (lambda state: {"model": state["0.bias"]}, "lacks the keys"),
    ],
)
def test_a_checkpoint_that_cannot_be_merged_is_named(checkpoints, spoilt, error):
    checkpoints(torch.float32)
    save_file(spoilt(load_file("b.safetensors")), "b.safetensors")
    with pytest.raises(ParamsError, match=f"b.safetensors.*{error}"):
        exec(blocks(DOCS / "without-flower.md")[0], {})


def test_the_example_with_batch_norm_runs():
    model, loader = nn.Sequential(nn.BatchNorm1d(4), Net()), load_data(0)[0]
    (block,) = blocks(DOCS / "pretrained.md")
    exec(block, {"model": model, "loader": loader})
    inputs = torch.cat([x for x, _ in loader])
    assert torch.allclose(model[0].running_mean, inputs.mean(0), atol=1e-6)


def test_the_many_rounds_example_runs(my_app):
    result = ran("fedfish.md", clients=5, epochs=2)["result"]
    assert result.evaluate_metrics_clientapp[2]["accuracy"] > 0


def test_methods_compare_as_the_readme_says(my_app):
    found = ran("fagh.md", clients=4, epochs=1)
    assert (Path.home() / "rounds.png").exists()
    assert found["runs"]["FAGH"][2]["loss"] < found["runs"]["FAGH"][1]["loss"]


def test_the_one_shot_example_tells_the_clients_shares(my_app):
    found = ran("fedfisher.md", epochs=1)
    assert sum(found["result"].details.shares) == pytest.approx(1)


def test_both_examples_of_a_head_in_closed_form_find_the_same(my_app):
    namespace = ran("afl.md")
    namespace["loaders"] = [load_data(partition)[0] for partition in range(3)]
    for example in blocks(DOCS / "afl.md")[1:]:
        exec(example, namespace)
    head = namespace["model"][2]
    torch.testing.assert_close(namespace["weight"].float(), head.weight.detach())
    torch.testing.assert_close(namespace["bias"].float(), head.bias.detach())


def test_one_app_of_clients_answers_all_methods_of_many_rounds(my_app):
    found = ran("many-round-methods.md", epochs=1, momentum=0)
    assert found["accuracy"].keys() == found["methods"].keys()


def test_a_fisher_without_a_merge_runs():
    model, (loader, _) = Net(), load_data(0)
    vector = {k: torch.ones_like(v) for k, v in shared_state(model).items()}
    names = {"model": model, "loader": loader, "vector": vector}
    (block,) = blocks(DOCS / "curvature.md")
    exec(block, names)
    assert names["F"].shapes == {k: v.shape for k, v in vector.items()}


def test_the_other_merges_run():
    (merges,) = blocks(DOCS / "merges.md")
    model, (loader, test_loader) = Net(), load_data(0)
    trained = [(model, loader), *((Net(), load_data(i)[0]) for i in (1, 2))]
    namespace = {"trained": trained, "test_loader": test_loader}
    exec(merges, namespace)
    for params in namespace["merged"].values():
        model.load_state_dict(params)


def test_the_two_stages_example_runs_and_leaves_a_model(my_app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ran("tct.md", epochs=1)
    x, _ = next(iter(load_data(0)[1]))
    model = TCTModel.load(tmp_path / "tct.safetensors", Net())
    assert torch.equal(model(x), found["model"](x))
    assert accuracy(model) > 0.6


def test_the_watched_run_leaves_the_best_model(my_app):
    ran("watching.md", epochs=1)
    Net().load_state_dict(load_file(Path.home() / "run" / "best.safetensors"))


def more_exchanges():
    names = {}
    for block in blocks(DOCS / "adding-a-method.md"):
        exec(block, names)
    return names


def test_a_shipped_strategy_takes_one_more_exchange():
    *_, last = more_exchanges()["WithHead"]().exchanges(1)
    assert last.name == "head"


def test_a_step_of_ones_own_follows_the_last_round_alone(my_app):
    clients = {}
    exec(CLIENT.replace("epochs=30", "epochs=1"), clients)
    strategy = more_exchanges()["WithStep"](refine=None, fraction_evaluate=0.0)
    start = ArrayRecord(shared_state(Net()))
    result = strategy.start(LocalGrid(clients["app"], 3), start, num_rounds=2)
    before, after = Net(), result.arrays.to_torch_state_dict()
    before.load_state_dict(result.unrefined.to_torch_state_dict())
    pairs = [load_data(partition)[0].dataset.tensors for partition in range(3)]
    x, y = (torch.cat(each) for each in zip(*pairs, strict=True))
    nn.functional.cross_entropy(before(x), y).backward()
    for name, value in before.named_parameters():
        torch.testing.assert_close(after[name], value.detach() - 0.1 * value.grad)
    metrics = result.train_metrics_clientapp
    assert ["descended" in metrics[n] for n in (1, 2)] == [False, True]


@pytest.mark.parametrize("name", ALONE)
def test_blocks_that_need_nothing_run(name, capsys):
    found = blocks(DOCS / f"{name}.md")
    assert found
    for block in found:
        exec(compile(block, name, "exec"), {})


def test_the_table_of_options_has_the_merges_defaults():
    page = (DOCS / "options.md").read_text()
    table = page.split("`FedFisherOneShot` takes")[1].split("`FedFish` takes")[0]
    shown = {}
    for names, values in re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE):
        shown |= zip(re.findall(r"`(\w+)`", names), values.split(", "), strict=False)
    options = MergeOptions().filled()
    for name in ("anchor", "shrink", "damping", "balance", "robust", "iterations"):
        assert float(shown[name]) == getattr(options, name)
    assert shown["solver"] == f'`"{options.solver}"`'


def test_every_promise_about_crashes_and_waiting_has_a_test_of_its_name():
    page = (DOCS / "crashes.md").read_text()
    section = page.split("Each line has a test of that name:")[1].split("\n\n")[1]
    promises = [line.removeprefix("- ") for line in section.splitlines()]
    assert len(promises) > 20
    sources = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    names = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    for promise in promises:
        assert f"test_{promise.lower().replace(' ', '_')}" in names, promise
