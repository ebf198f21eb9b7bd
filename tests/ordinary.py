"""Forms that batches and outputs have in ordinary code, each of the same examples."""

import torch

# Of inputs x, and labels y: for a model of `left`, from which it takes `right`, if any.
BATCHES = {
    "pair": lambda x, y: (x, y),
    "three": lambda x, y: (2 * x, x, y),
    "nested": lambda x, y: ((2 * x, x), y),
    "nested mapping": lambda x, y: ({"left": 2 * x, "right": x}, y),
    "names": lambda x, y: {"left": 2 * x, "right": x, "labels": y},
    "one name": lambda x, y: {"left": x, "target": y},
    "other name": lambda x, y: {"img": x, "label": y, "path": ["a"] * len(x)},
    "beside": lambda x, y: {"left": x, "index": torch.arange(len(x)), "y": y},
}
# What a model makes of its outputs, and the output_fn that it needs.
OUTPUTS = {
    "tensor": (lambda o: o, None),
    "mapping": (lambda o: {"logits": o, "hidden": o}, None),
    "alone in a tuple": (lambda o: (o, None), None),
    "alone in a mapping": (lambda o: {"out": o, "index": o.argmax(-1)}, None),
    "output_fn": (lambda o: (o, 2 * o), lambda returned: returned[0]),
}
