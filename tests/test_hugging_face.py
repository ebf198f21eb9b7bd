"""transformers' models as they are, on their collator's batches, with PEFT or without.

The oracle takes each example by itself and without padding, in float64.
"""

import pytest
import torch
from flwr.app import ArrayRecord
from virtual import app_by_partition, close, start

from flwr_fisher.client import FisherClient, LocalSGD, cross_entropy
from flwr_fisher.client.training import score
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFisherOneShot


class Later:
    """A package that the first test imports: not each process that finds the tests."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, key):
        if key.startswith("_"):  # what pytest looks for in all that it collects
            raise AttributeError(key)
        return getattr(pytest.importorskip(self.name), key)


T, peft = Later("transformers"), Later("peft")
# Of transformers, when PEFT asks for a name that it has changed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

WORDS, CLASSES = 20, 3
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"hidden_size": 8, "intermediate_size": 12}
OF_BERT = SMALL | {"vocab_size": WORDS, "max_position_embeddings": 16}
OF_T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
OF_GPT = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}
ENDS = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
TEXT = {
    "bert": lambda: T.BertForSequenceClassification(
        T.BertConfig(**OF_BERT, num_labels=CLASSES)
    )
}
CAUSAL = {
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(**OF_GPT, **ENDS, vocab_size=WORDS))
}
SEQUENCES = {
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(**OF_T5, vocab_size=WORDS, decoder_start_token_id=0)
    )
}
IMAGES = {
    "vit": lambda: T.ViTForImageClassification(
        T.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=CLASSES)
    )
}
TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "vit": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
}
MAKE = TEXT | CAUSAL | SEQUENCES | IMAGES
HEADS = {"bert": ["classifier"], "vit": ["classifier"]}
MODELS = {name: (name, False) for name in MAKE}
MODELS |= {f"{name}-lora": (name, True) for name in MAKE}


def make(name, lora, seed=0):
    torch.manual_seed(seed)
    model = MAKE[name]()
    if lora:
        config = peft.LoraConfig(
            r=2,
            target_modules=TARGETS[name],
            modules_to_save=HEADS.get(name),
            fan_in_fan_out=name == "gpt2",
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config)
    return model


def rows_of(name, n=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    if name in IMAGES:
        return [
            {"pixel_values": torch.randn(3, 8, 8, generator=g), "labels": i % CLASSES}
            for i in range(n)
        ]
    made = []
    for i in range(n):
        ids = torch.randint(1, WORDS, (3 + 2 * (i % 3),), generator=g)
        made.append({"input_ids": ids, "labels": i % CLASSES})
        if name in CAUSAL:
            made[-1]["labels"] = ids.masked_fill(torch.arange(len(ids)) < 1, -100)
        if name in SEQUENCES:
            made[-1]["labels"] = torch.randint(1, WORDS, (2 + i % 3,), generator=g)
    return made


def collate(rows):
    """Pad, as DataCollatorWithPadding, and for language modelling, does."""
    if "pixel_values" in rows[0]:
        columns = {"pixel_values": torch.stack([r["pixel_values"] for r in rows])}
        return columns | {"labels": torch.tensor([r["labels"] for r in rows])}
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
    }
    if isinstance(rows[0]["labels"], int):
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}
    labels = pad([r["labels"] for r in rows], batch_first=True, padding_value=-100)
    return batch | {"labels": labels}


def batches(name, size=4, **options):
    rows = rows_of(name, **options)
    return [collate(rows[k : k + size]) for k in range(0, len(rows), size)]


def own_loss(model, row):
    """The model's own loss of one example, and how many labels it is the mean of."""
    (labels,) = collate([row])["labels"].unsqueeze(0)
    # In those of a causal model, the first one is -100.
    count = int((labels != -100).sum()) if labels.dim() > 1 else 1
    one = collate([row])
    if "pixel_values" in one:
        one["pixel_values"] = one["pixel_values"].double()
    return model(**one).loss, count


@pytest.mark.parametrize(("name", "lora"), MODELS.values(), ids=MODELS)
def test_the_empirical_fisher_is_that_of_each_example(name, lora):
    model = make(name, lora).double().eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want = {n: torch.zeros_like(p) for n, p in trained.items()}
    rows = rows_of(name)
    for row in rows:
        loss, count = own_loss(model, row)
        grads = torch.autograd.grad(count * loss, list(trained.values()))
        for total, g in zip(want.values(), grads, strict=True):
            total += g.square() / len(rows)
    data = batches(name)
    for batch in data:
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].double()
    empirical = FisherOptions.full(expectation="empirical")
    got = fisher(model, data, "diagonal", options=empirical)
    assert got.diagonal().keys() == want.keys()
    for n, value in got.diagonal().items():
        wrong = (value - want[n]).norm()  # transformers' own loss is in float32
        assert wrong <= 1e-5 * want[n].norm() + 1e-12, n


@pytest.mark.parametrize(("name", "lora"), MODELS.values(), ids=MODELS)
def test_losses_are_the_models_own(name, lora):
    model, rows = make(name, lora).eval(), rows_of(name)
    with torch.no_grad():
        losses = [own_loss(model.double(), row) for row in rows]
    want = sum(float(k * loss) for loss, k in losses) / sum(k for _, k in losses)
    loss, accuracy, n = score(
        model.float(), batches(name), torch.device("cpu"), cross_entropy
    )
    assert loss == pytest.approx(want, rel=1e-4)
    assert n == len(rows)
    assert 0 <= accuracy <= 1


ROUNDS = ("bert-lora", "gpt2", "vit")


@pytest.mark.parametrize(("name", "lora"), [MODELS[r] for r in ROUNDS], ids=ROUNDS)
def test_a_round_of_ones_own_loop_is_that_of_local_sgd(name, lora):
    def own_loop(model, loader, device, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        return {}

    results = []
    for train_fn in (own_loop, LocalSGD(lr=0.1)):

        def client_of(partition, train_fn=train_fn):
            model = make(name, lora)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            data = batches(name, seed=partition)
            return FisherClient(model, data, data, train_fn=train_fn, device="cpu")

        arrays = ArrayRecord(shared_state(make(name, lora)))
        app = app_by_partition(client_of)
        results.append(start(FedFisherOneShot(), app, clients=2, arrays=arrays))
    one, other = results
    assert close(one.arrays, other.arrays, 1e-4)
    assert 0 <= one.evaluate_metrics_clientapp[1]["accuracy"] <= 1


def test_pefts_stripped_keys_are_named():
    model = make("bert", lora=True)
    stripped = ArrayRecord(peft.get_peft_model_state_dict(model))
    app = FisherClient(model, batches("bert"), device="cpu").as_client_app()
    with pytest.raises(FlwrFisherError, match=r"no such entry: start from shared"):
        start(FedFisherOneShot(), app, clients=2, arrays=stripped)
