"""What `fisher` refuses."""

import warnings
from functools import cache, partial

import pytest
import torch
from nets import VECTORS, CalledTwice
from oracles import SMALL_SHAPE, check_exact, randn, seeded, small_net
from torch import nn

from flwr_fisher import curvature
from flwr_fisher.curvature import ENGINES, EXPECTATIONS, LIKELIHOODS, STRUCTURES
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    ParamsError,
    StructureError,
    UnknownNameError,
)
from flwr_fisher.params import shared_state
from flwr_fisher.tangent import TangentFeatures

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

LINEAR = nn.Linear(3, 3)


class Sometimes(CalledTwice):
    def forward(self, x):
        if len(x) == 1:
            self.fc(x)
        return self.head(self.fc(x))


class Folds(CalledTwice):
    def forward(self, x):
        rows = x.repeat(2, 1) if len(x) == 1 else x
        return self.head(self.fc(rows))[: len(x)]


def ended(*tail):
    return nn.Sequential(nn.Linear(3, 3), *tail)


class Then(nn.Module):
    """A layer, and a function of its inputs and outputs."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(3, 3), function

    def forward(self, x):
        return self.function(x, self.layer(x))


class Keeps(nn.Module):
    """It begins each call where the former has ended."""

    def __init__(self):
        super().__init__()
        self.cells, self.state = nn.LSTM(3, 3), None

    def forward(self, x):
        y, self.state = self.cells(x.unsqueeze(0), self.state)
        return y[0]


class Remembers(nn.Module):
    """It begins where the former call has ended, if that had as many examples."""

    def __init__(self, share=1.0):
        super().__init__()
        self.cell, self.state = nn.RNNCell(3, 3), None
        self.share = share

    def forward(self, x):
        if self.state is None or len(self.state) != len(x):
            self.state = torch.zeros_like(x)
        y = self.cell(x) + self.share * self.state.detach()
        self.state = y
        return y


class Makes(nn.Module):
    """It makes its head in its first call, or a weight in each call."""

    def __init__(self, *, again):
        super().__init__()
        self.layer, self.again = nn.Linear(3, 3), again
        self.head = nn.Linear(3, 3) if again else None

    def forward(self, x):
        self.head = self.head or nn.Linear(3, 3)
        if self.again:
            self.layer.weight = nn.Parameter(self.layer.weight.clamp(-1, 1))
        return self.head(self.layer(x))


class OwnMethods(nn.Module):
    """It lists some of its parameters, as classes for older versions of torch do."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def parameters(self, recurse=True):
        return self.head.parameters(recurse)

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)

    def forward(self, x):
        return self.head((self.layer(x) * self.scale).tanh())


UNEVEN = VECTORS.split([4, 1])
ONE = [VECTORS]
Y = torch.arange(5) % 3


class Anew(list):
    """An iterator that begins anew."""

    def __next__(self):
        raise NotImplementedError


class Once(Anew):
    """An iterator of a user's own that does not."""

    def __iter__(self):
        while self:
            yield self.pop()


def of(error, culprit, model=LINEAR, loader=ONE, **options):
    return error, culprit, model, loader, options


OPTIONS = [
    *({name: 0} for name in ("num_samples", "max_passes", "max_batch_bytes")),
    *({"tolerance": -0.1}, {"tolerance": 1.5}, {"max_positions": 0}),
    {"weight_sharing": "flatten"},
    {"num_samples": 2, "expectation": "empirical"},
    {"max_passes": 2, "expectation": "sampled"},
    {"max_passes": 2, "engine": "nngeometry"},
    {"max_positions": 4, "structure": "diagonal"},
    {"max_positions": 4, "engine": "nngeometry"},
    {"max_positions": 4, "weight_sharing": "reduce"},
    {"weight_sharing": "reduce", "structure": "diagonal"},
    {"weight_sharing": "reduce", "engine": "nngeometry"},
    {"engine": "nngeometry", "expectation": "sampled"},
]
KNOWN = {
    "structure": STRUCTURES,
    "expectation": EXPECTATIONS,
    "engine": ENGINES,
    "likelihood": LIKELIHOODS,
}
SHAPE, WIDE = StructureError, [torch.ones(2, 300)]
MISTAKES = [
    *(
        of(
            UnknownNameError,
            f"{what} 'kfca'; known: {', '.join(known)}",
            **{what: "kfca"},
        )
        for what, known in KNOWN.items()
    ),
    # The first option of several is the one that is named.
    *(of(ConfigurationError, next(iter(wrong)), **wrong) for wrong in OPTIONS),
    of(ConfigurationError, "device=meta", device="meta"),
    of(
        ConfigurationError,
        "'1.weight' is on the meta device",
        ended(nn.Linear(3, 3, device="meta")),
    ),
    of(
        ConfigurationError,
        "structure='diagonal'",
        loader=[(VECTORS, Y)],
        expectation="empirical-batch",
    ),
    of(DataError, "mapping of 'x'.*batch_fn", loader=[{"x": VECTORS}]),
    of(DataError, "an empty list", loader=[[]]),
    of(DataError, "inputs are a str", loader=[("x", 1)]),
    of(DataError, "a str", loader=["text"]),
    of(DataError, "reads .*twic", loader=iter(ONE), structure="ekfac"),
    of(DataError, "read again, .* no ex", loader=Once(ONE), structure="ekfac"),
    of(SHAPE, r"\(15,\)", ended(nn.Flatten(0))),
    of(SHAPE, r"\(5, 3, 1\)", ended(nn.Unflatten(1, (3, 1)))),
    of(SHAPE, "GB", nn.Linear(300, 300), WIDE, structure="dense"),
    of(SHAPE, "GB", nn.Linear(300, 300), WIDE, structure="block"),
    of(SHAPE, r"'fc' was called .* \[1, 1\] rows", Sometimes(), iter(UNEVEN)),
    of(SHAPE, r"'fc' was called .* \[2\] rows", Folds(), iter(UNEVEN)),
]


@pytest.mark.parametrize(("error", "culprit", "model", "loader", "options"), MISTAKES)
def test_a_mistake_is_named(error, culprit, model, loader, options):
    with pytest.raises(error, match=culprit):
        fisher(model, loader, **options)


def test_ekfac_takes_an_iterator_that_begins_anew():
    got, want = (fisher(LINEAR, x, structure="ekfac") for x in (Anew(ONE), ONE))
    assert torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_refuses_the_same(structure, engine):
    how = {"structure": structure, "engine": engine}
    with pytest.raises(DataError, match="no examples"):
        fisher(LINEAR, [VECTORS[:0]], **how)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        fisher(nn.ReLU(), ONE, **how)
    if engine == "auto":
        with pytest.raises(StructureError, match=r"logits .*\(5, 1\)"):
            fisher(ended(nn.Linear(3, 1)), ONE, **how)
        labels = torch.ones(len(VECTORS), dtype=torch.long)
        with pytest.raises(StructureError, match="likelihood='bernoulli' for one"):
            fisher(ended(nn.Linear(3, 1)), [(VECTORS, labels)], **how)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is deprecated, but users have such
    SCRIPTED = nn.Sequential(torch.jit.script(nn.Linear(3, 3)))


@cache
def exported():
    """It takes seconds, which a process that only finds the tests need not wait."""
    return torch.export.export(nn.Linear(3, 3), (VECTORS,)).module()


WITHOUT_A_FISHER = {
    "joined rows": (Then(lambda x, y: y.flatten()), r"\(15,\) for 5 examples"),
    "fewer rows": (Then(lambda x, y: y[:1]), r"\(1, 3\) for 5 examples"),
    "detached": (Then(lambda x, y: y.detach()), "no trainable parameter"),
    "classes": (Then(lambda x, y: y.argmax(1)), "no trainable parameter"),
    "of the batch": (Then(lambda x, y: y - y.mean(0)), "examples of its batch"),
    "between examples": (Then(lambda x, y: y @ y.T), "examples of its batch"),
    "a state": (Keeps(), "differ from call to call"),
    "a state of a size": (Remembers(), "differ from call to call"),
    "a little of a state": (Remembers(1e-3), "keeps a tensor from call to call"),
    "made": (Makes(again=False), r"makes its parameters .'head.weight', 'head.bias'"),
    "made again": (Makes(again=True), r"makes its parameters .'layer.weight'"),
    "a script": (SCRIPTED, "layer '0' is a ScriptModule"),
    "an export": (exported, "has no eval mode"),
    "complex": (Then(abs, nn.Linear(3, 3, dtype=torch.cfloat)), "'layer.weight' has"),
}


@pytest.mark.parametrize("name", WITHOUT_A_FISHER)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_without_a_fisher_is_refused(name, structure):
    model, why = WITHOUT_A_FISHER[name]
    model = exported() if model is exported else model
    loader = [torch.cat([VECTORS, VECTORS[:2]])] if name == "a batch size" else ONE
    with pytest.raises(StructureError, match=why):
        fisher(model, loader, structure=structure)


def test_a_gradient_of_a_state_that_is_kept_is_refused():
    labels = torch.zeros(len(VECTORS), dtype=torch.long)
    with pytest.raises(StructureError, match="differ from call to call"):
        curvature.gradient(Remembers(), [(VECTORS, labels)])


class Shaken(nn.Module):
    """It adds noise of its own generator in every mode."""

    def __init__(self):
        super().__init__()
        self.layer, self.generator = nn.Linear(3, 3), torch.Generator()

    def forward(self, x):
        return self.layer(x) + torch.randn(x.shape, generator=self.generator)


def test_noise_is_no_state_that_is_kept():
    assert fisher(Shaken(), ONE).trace() > 0


def test_a_class_may_have_methods_of_its_own_for_its_parameters():
    model = seeded(OwnMethods)
    check_exact(model, VECTORS, slow={"scale"})
    assert list(shared_state(model)) == list(model.state_dict())


def test_a_lazy_layer_is_named():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    for function in (lambda: fisher(model, ONE), lambda: shared_state(model)):
        with pytest.raises(ParamsError, match=r"'0.weight' .* call the model once"):
            function()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_example_that_the_model_squeezes_counts(structure):
    layer = seeded(lambda: nn.Linear(3, 1))
    squeezed = Then(lambda x, y: y.squeeze(), layer)
    how = {"structure": structure, "likelihood": "gaussian"}
    want, got = fisher(layer, UNEVEN, **how), fisher(squeezed, UNEVEN, **how)
    for a, b in zip(want.diagonal().values(), got.diagonal().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_sparse_gradients_are_as_dense_ones():
    tokens = torch.tensor([[0, 1], [2, 1]])
    models = [
        seeded(
            lambda s=s: nn.Sequential(
                nn.Embedding(3, 2, sparse=s), nn.Flatten(), nn.Linear(4, 3)
            )
        )
        for s in (True, False)
    ]
    for structure in STRUCTURES:
        sparse, plain = (fisher(m, [tokens], structure=structure) for m in models)
        torch.testing.assert_close(sparse.tensors(), plain.tensors())
    torch.testing.assert_close(*(TangentFeatures(m, 99)(tokens) for m in models))
    assert models[0][0].sparse


def test_a_dense_fisher_takes_one_dtype():
    wide = nn.Linear(3, 3).double()
    mixed = nn.Sequential(nn.Linear(3, 3), Then(lambda x, y: y, wide))
    mixed[1].layer.register_forward_pre_hook(lambda _, args: args[0].double())
    fisher(mixed, ONE)
    with pytest.raises(StructureError, match=r"'0.weight' is in .*float32 and '1\."):
        fisher(mixed, ONE, structure="dense")


def test_a_compiled_model_has_the_fisher_of_its_module():
    model = seeded(small_net)
    x = randn(1, 5, *SMALL_SHAPE)
    want, got = fisher(model, [x]), fisher(torch.compile(model, backend="eager"), [x])
    assert [b.kind for b in got.blocks()] == [b.kind for b in want.blocks()]
    assert got.trace() == want.trace()


def test_the_models_device_may_be_named():
    for device in ("cpu", torch.device("cpu", 0)):
        fisher(LINEAR, ONE, device=device)


def test_an_empty_parameter_has_no_curvature():
    with pytest.warns(UserWarning, match="zero-element"):
        model = Then(lambda x, y: y, nn.Linear(0, 3))
    for structure in STRUCTURES:
        F = fisher(model, [torch.ones(2, 0)], structure=structure)
        assert list(F.shapes) == ["layer.bias"]
