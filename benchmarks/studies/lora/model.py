"""A small vision transformer, and low-rank adapters of its linear layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.params import Params

PATCH, WIDTH, HEADS, BLOCKS, CLASSES = 7, 48, 4, 2, 10
TOKENS = (28 // PATCH) ** 2
LAYERS = ("qkv", "out", "up", "down")  # of a block, which have adapters


class Block(nn.Module):
    """Attention, then a perceptron, each behind a norm and added to what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, tokens, width]`` to the same shape."""
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y


class Transformer(nn.Module):
    """Classes of grey images of 28 × 28, of which a token is a patch of 7 × 7."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, 1, 28, 28]`` to logits."""
        cut = F.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
        x = self.patches(cut) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank term, peft's ``lora_A`` and ``lora_B``."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Linear(layer.in_features, rank, bias=False)
        self.B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output and the adapter's."""
        y: Tensor = self.layer(x) + self.B(self.A(x))
        return y


def base_model(base: Params) -> Transformer:
    """Return the pre-trained model, of which nothing is trained."""
    model = Transformer()
    model.load_state_dict(dict(base))
    model.requires_grad_(False)
    return model


def adapted(base: Params, rank: int, seed: int, *, freeze: bool) -> Transformer:
    """Return it with adapters; `freeze`: of which the first factors are not trained."""
    model = base_model(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in model.blocks:
            for name in LAYERS:
                adapter = LoRA(getattr(block, name), rank)
                adapter.A.requires_grad_(not freeze)
                setattr(block, name, adapter)
    return model


def added(state: Params) -> dict[str, Tensor]:
    """Return what adapters add to each layer's weight, by the weight's name."""
    ends = ".A.weight"
    layers = [key.removesuffix(ends) for key in state if key.endswith(ends)]
    return {
        f"{layer}.weight": state[f"{layer}.B.weight"] @ state[f"{layer}.A.weight"]
        for layer in layers
    }
