"""
Hugging Face's models, as they are
==================================

A client's model may be any model of ``transformers``, and its loader may give the
batches that its collator makes: mappings with ``input_ids``, ``attention_mask`` and
``labels``, or ``pixel_values`` and ``labels``. There is nothing to wrap. The library
passes the entries by name, takes the outputs' ``logits``, leaves padding and labels of
-100 out, and shifts the labels of a language model as the model itself does.

This page tunes a DistilBERT to classify texts, a GPT-2 to write, and a ViT to read
digits. Each is tuned twice: all parameters, and the adapters of ``peft`` (LoRA, Hu et
al., ICLR 2022). Four clients train once, each on other classes than the rest, and the
server merges what they upload.

The models are small and made from a config, and the texts come with Python, so that
nothing is downloaded. ``python examples/hugging_face.py`` is this page; it needs
``pip install transformers peft`` beside the extra ``all``.

Long: it is three kinds of model, each trained in two ways.
"""

import logging
import re
import sysconfig
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr_datasets.partitioner import DirichletPartitioner
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from flwr_fisher.client import FisherClient, cross_entropy, make_client_app, score
from flwr_fisher.params import Params, shared_state, weighted_mean
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid

CPU = torch.device("cpu")
CLIENTS, WORDS, LENGTH = 4, 1000, 32
PAD, UNKNOWN, ALPHA = 0, 1, 0.3
# Files of Python's library: a model is pre-trained on the first, then tuned.
BEFORE = ("argparse", "ast", "difflib", "doctest", "mailbox", "pickletools", "shutil")
FILES = ("_pydecimal", "inspect", "ssl", "subprocess", "tarfile", "turtle", "typing")
PUBLIC, PRIVATE = slice(50), slice(50, 300)  # of the pieces of a file

# %%
# Data
# ----
#
# The texts are pieces of files of Python's library, and the classifier predicts the
# file. The images are scikit-learn's digits. A data set is a list of rows, as
# ``datasets`` gives them.

Row = dict[str, Any]


@cache
def words(name: str) -> list[str]:
    """Return a file's words and signs."""
    path = Path(sysconfig.get_path("stdlib"), f"{name}.py")
    return re.findall(r"[A-Za-z]+|[^\sA-Za-z]", path.read_text(encoding="utf-8"))


@cache
def vocabulary() -> dict[str, int]:
    """Return numbers for the most frequent words."""
    counts = Counter(word for name in BEFORE + FILES for word in words(name))
    return {word: 2 + i for i, (word, _) in enumerate(counts.most_common(WORDS - 2))}


def pieces(names: tuple[str, ...], few: slice = slice(300)) -> list[Row]:
    """Return pieces of 20 to 32 words, and the number of the file each is from."""
    numbers, rows = vocabulary(), []
    for label, name in enumerate(names):
        ids = [numbers.get(word, UNKNOWN) for word in words(name)]
        for i in range(len(ids) // LENGTH)[few]:
            piece = ids[LENGTH * i : LENGTH * (i + 1) - i % 12]
            rows.append({"input_ids": torch.tensor(piece), "labels": label})
    return rows


def digits(few: slice) -> list[Row]:
    """Return images of digits, of one channel."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    rows = zip(images[few], found.target[few], strict=True)
    return [{"pixel_values": image, "labels": int(label)} for image, label in rows]


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Pad, as ``DataCollatorWithPadding`` does."""
    labels = torch.tensor([row["labels"] for row in rows])
    if "pixel_values" in rows[0]:
        images = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": images, "labels": labels}
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": labels,
    }


def collate_causal(rows: list[Row]) -> dict[str, Tensor]:
    """Pad, as ``DataCollatorForLanguageModeling(mlm=False)`` does."""
    batch = collate(rows)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"labels": labels}


# %%
# Models
# ------
#
# In your own app, call ``from_pretrained`` in these lines.

SMALL: dict[str, Any] = {"vocab_size": WORDS, "num_labels": len(FILES)}


def bert() -> nn.Module:
    """Return a BERT of two layers."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    config = BertConfig(
        **SMALL, **sizes, num_hidden_layers=2, max_position_embeddings=LENGTH
    )
    return BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    """Return a DistilBERT of two layers."""
    sizes = {"dim": 48, "hidden_dim": 96, "n_heads": 4, "n_layers": 2}
    config = DistilBertConfig(**SMALL, **sizes, max_position_embeddings=LENGTH)
    return DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    """Return a GPT-2 of two layers, whose head is its embedding."""
    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": LENGTH}
    ends = {"bos_token_id": PAD, "eos_token_id": PAD, "pad_token_id": PAD}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **ends))


def vit() -> nn.Module:
    """Return a ViT of two layers for images of 8 x 8."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, **sizes, **images))


# %%
# LoRA
# ----
#
# An adapter adds a product BA to a weight. The mean of the clients' products is not the
# product of their means, so two trained factors cannot be merged one by one. **Freeze
# A**, the same for all clients, and train B (FFA-LoRA, Sun et al., ICLR 2024). Then the
# product is linear in B, which is merged.


def with_adapters(model: nn.Module, layers: list[str], head: list[str]) -> nn.Module:
    """Return the model with adapters of rank 8, of which B is trained."""
    torch.manual_seed(0)  # A is everyone's
    of_gpt = isinstance(model, GPT2LMHeadModel)  # whose layers are Conv1D
    config = LoraConfig(
        r=8, target_modules=layers, modules_to_save=head, fan_in_fan_out=of_gpt
    )
    adapted: nn.Module = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return adapted


# %%
# Tasks
# -----


@dataclass(frozen=True)
class Task:
    """A model, where its adapters are, its data before and after, and its batches."""

    make: Callable[[], nn.Module]
    layers: tuple[str, ...]
    head: tuple[str, ...]
    before: Callable[[], list[Row]]
    after: Callable[[], list[Row]]
    collate: Callable[[list[Row]], dict[str, Tensor]] = collate

    def loader(self, rows: Any, *, shuffle: bool = True) -> DataLoader[Any]:
        """Return batches of 16."""
        return DataLoader(rows, 16, shuffle=shuffle, collate_fn=self.collate)


LINEAR, HEAD = ("q_lin", "v_lin", "lin1", "lin2"), ("pre_classifier", "classifier")
TASKS = {
    "BERT": Task(
        bert,
        ("query", "value", "dense"),
        ("classifier",),
        lambda: pieces(FILES, PUBLIC),
        lambda: pieces(FILES, PRIVATE),
    ),
    "DistilBERT": Task(
        distilbert,
        LINEAR,
        HEAD,
        lambda: pieces(FILES, PUBLIC),
        lambda: pieces(FILES, PRIVATE),
    ),
    "GPT-2": Task(
        gpt2,
        ("c_attn", "c_fc", "c_proj"),
        (),
        lambda: pieces(BEFORE),
        lambda: pieces(FILES),
        collate_causal,
    ),
    "ViT": Task(
        vit,
        ("q_proj", "v_proj", "fc1", "fc2"),
        ("classifier",),
        lambda: digits(slice(200)),
        lambda: digits(slice(200, None)),
    ),
}


# %%
# A client, and one shot
# ----------------------
#
# The training loop is the usual one for Hugging Face's models: the model computes its
# own loss. The loop is the client's ``train_fn``, unchanged. ``LocalSGD`` works, too.


def train(
    model: nn.Module, loader: Any, device: torch.device, config: Any
) -> dict[str, float]:
    """Train for the epochs that the server's config names."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(config["lr"]))
    model.train()
    for _ in range(int(config["epochs"])):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**{k: v.to(device) for k, v in batch.items()}).loss
            loss.backward()
            optimizer.step()
    return {"train_loss": loss.item()}


@cache
def pretrained(task: Task, seed: int, most: int) -> dict[str, Tensor]:
    """Return the parameters after training on `most` rows of public data."""
    torch.manual_seed(seed)
    model, rows = task.make(), task.before()
    some = rows[:: -(-len(rows) // most)]  # of every file
    train(model, task.loader(some), CPU, {"lr": 1e-3, "epochs": 10})
    return model.state_dict()


def parts(rows: list[Row], seed: int, most: int) -> tuple[list[Any], list[Row]]:
    """Return the clients' rows, of very unlike classes, and a fifth to test on."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    shuffled = [rows[i] for i in order[:most]]
    fifth = len(shuffled) // 5
    test, rest = shuffled[:fifth], shuffled[fifth:]
    labels = [int(row["labels"]) for row in rest]
    partitioner = DirichletPartitioner(
        CLIENTS, "label", alpha=ALPHA, min_partition_size=2, seed=seed
    )
    partitioner.dataset = Dataset.from_dict({"label": labels, "row": range(len(rest))})
    shares = (partitioner.load_partition(i)[:]["row"] for i in range(CLIENTS))
    return [[rest[i] for i in share] for share in shares], test


def run(
    name: str, *, lora: bool, seed: int, lr: float, epochs: int, most: int = 10_000
) -> dict[str, Any]:
    """Return each model's test loss and accuracy: clients', their mean, the merged."""
    task = TASKS[name]
    base = pretrained(task, seed, most)
    mine, test = parts(task.after(), seed, most)
    tuned: dict[int, Params] = {}

    def make() -> nn.Module:
        model = task.make()
        model.load_state_dict(base)
        return with_adapters(model, [*task.layers], [*task.head]) if lora else model

    def client_fn(context: Context) -> FisherClient:
        client = int(context.node_config["partition-id"])

        def note(model: nn.Module, *rest: Any) -> dict[str, float]:
            metrics = train(model, *rest)
            tuned[client] = {k: v.clone() for k, v in shared_state(model).items()}
            return metrics

        return FisherClient(make(), task.loader(mine[client]), train_fn=note)

    grid = LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)
    result = FedFisherOneShot(seed=seed).start(
        grid,
        ArrayRecord(shared_state(make())),
        train_config=ConfigRecord({"lr": lr, "epochs": epochs}),
    )
    sizes = [len(mine[client]) for client in range(CLIENTS)]
    found = {"start": shared_state(make())}
    found |= {f"client {client}": tuned[client] for client in range(CLIENTS)}
    found["FedAvg"] = weighted_mean([tuned[k] for k in range(CLIENTS)], sizes)
    found["FedFisher"] = result.arrays.to_torch_state_dict()
    model, scores = make(), {}
    for each, params in found.items():
        model.load_state_dict(dict(params), strict=False)
        loss, accuracy, _ = score(
            model, task.loader(test, shuffle=False), CPU, cross_entropy
        )
        scores[each] = {"loss": loss, "accuracy": accuracy}
    return scores


# %%
# FedAvg is the mean of the clients' parameters, weighted by examples. All merges are of
# the same uploads.


def show(name: str, lora: bool, scores: dict[str, Any]) -> None:
    """Print a row: the start, the best client, FedAvg and FedFisher."""
    by = "loss" if name == "GPT-2" else "accuracy"
    best = min if by == "loss" else max
    clients = best(s[by] for each, s in scores.items() if each.startswith("client"))
    cells = [scores["start"][by], clients, scores["FedAvg"][by]]
    cells.append(scores["FedFisher"][by])
    row = " ".join(f"{value:10.3f}" for value in cells)
    print(f"{name:10} {'LoRA' if lora else 'all':5} {by:8} {row}")


def main() -> None:
    """Print the table."""
    parser = ArgumentParser(description="transformers' models, merged in one shot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    # Flower logs every step of a round, which the table has no need of; nor has it of
    # what transformers says to PEFT.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    columns = ("start", "best alone", "FedAvg", "FedFisher")
    print(f"{'model':10} {'train':5} {'':8}", *(f"{name:>10}" for name in columns))
    for name in ("DistilBERT", "GPT-2", "ViT"):
        for lora in (False, True):
            lr = 3e-3 if lora else 1e-3
            given = {"seed": options.seed, "epochs": options.epochs, "most": 400}
            show(name, lora, run(name, lora=lora, lr=lr, **given))


if __name__ == "__main__":
    main()

# %%
# Higher accuracy is better, and lower loss is better. One seed proves little: try more.
#
# In your own app
# ---------------
#
# You have a model, data and a training loop, which takes the model, the client's
# loader, the device and the server's config. Add these lines to ``client_app.py``::
#
#     from flwr_fisher.client import FisherClient, make_client_app
#
#     def client_fn(context):
#         trainloader, testloader = load_data(context.node_config["partition-id"])
#         return FisherClient(get_model(), trainloader, testloader, train_fn=train)
#
#     app = make_client_app(client_fn)
#
# If your ``client_app.py`` has train and evaluate functions, keep them::
#
#     from flwr_fisher.client import ClientApp, check_fisher, fisher_arrays
#
#     app = ClientApp()
#
#     @app.train()
#     def fit(message, context):
#         model, (trainloader, _) = get_model(), load_data(...)
#         check_fisher(message, context, model, trainloader)  # loads the arrays
#         train(model, trainloader, ...)
#         arrays = fisher_arrays(message, context, model, trainloader)
#         ...
#
# To evaluate, load with ``strict=False``. The client has four changed lines, and
# ``server_app.py`` has three::
#
#     from flwr_fisher.strategies import FedFisherOneShot, shared_state
#
#     strategy = FedFisherOneShot()
#     arrays = ArrayRecord(shared_state(model))
#
# They replace ``FedAvg`` and the model's ``state_dict``. ``shared_state`` has the
# trained parameters, under the model's own names. Do not use
# ``get_peft_model_state_dict``: it renames them, and an error refuses them. LoRA needs
# two more lines where the model is made: A's seed, and A frozen.
#
# What to know
# ------------
#
# - A batch's labels are its entry ``labels``, and the rest goes to the model by name.
#   For any other meaning, pass ``FisherClient(batch_fn=...)``. Wrap a model whose
#   outputs are not named ``logits``.
# - The server skips a client that has another pre-trained model than most. It notices
#   this before the client trains, or, if the app has its own functions, by the upload:
#   see :doc:`/frozen-layers`.
# - ``from_pretrained`` may give bfloat16, which Flower's arrays do not have: pass
#   ``dtype=torch.float32``. ``LocalSGD(autocast=torch.bfloat16)`` trains in it all the
#   same.
# - By default, a client takes its Fisher of a quarter of its examples beyond 300, at
#   least 64 and at most 1000. To change the number, pass
#   ``FedFisherOneShot(fisher=FisherOptions(examples=200))``.
# - For parameters that are not those of a plain layer, such as GPT-2's ``Conv1D`` and
#   its tied embedding, the curvature is an exact diagonal, computed example by example.
#   This takes longer. A client's log says which layers have which form.
# - To save merged adapters, load the result with ``strict=False`` into a model that was
#   made by the same seed, then call ``save_pretrained``.
