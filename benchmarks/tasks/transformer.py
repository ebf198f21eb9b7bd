"""A small decoder-only transformer, from layers with an exact curvature."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError


class Transformer(nn.Module):
    """A decoder-only transformer: it predicts each token from those before it.

    It has token and position embeddings; then blocks of causal self-attention and a
    GELU perceptron four times as wide, each after a layer norm and with a residual
    connection (Radford et al., 2019); then a last norm, and a head that is not tied to
    the embedding. Every projection, also in the attention, is an ``nn.Linear`` that is
    called once, with one row for each example. So each has a Kronecker form, and
    embeddings and norms have their exact diagonal. There is no dropout: the model that
    is trained is the model that is merged.

    Parameters
    ----------
    vocabulary : int
        The number of different tokens, V.
    length : int
        The longest sequence.
    width : int
        Numbers that represent a token, a multiple of `heads`.
    layers : int
        The number of blocks.
    heads : int
        Attention heads a block.

    Raises
    ------
    ConfigurationError
        If a number is below one, or `heads` does not divide `width`.

    Examples
    --------
    >>> model = Transformer(vocabulary=7, length=5, width=8, layers=1, heads=2)
    >>> model(torch.zeros(3, 5, dtype=torch.int64)).shape
    torch.Size([3, 5, 7])
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if min(vocabulary, length, width, layers, heads) < 1 or width % heads:
            raise ConfigurationError(
                "a transformer needs sizes of at least 1 and a width divisible by its "
                f"heads, not vocabulary {vocabulary}, length {length}, width {width}, "
                f"{layers} layers, {heads} heads"
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        # Unit variance, torch's default, would hide what the blocks add.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of every next token.

        Parameters
        ----------
        tokens : Tensor
            Int64 ``[b, T]``, with T at most the model's length.

        Returns
        -------
        Tensor
            Logits ``[b, T, V]``. Those at position t depend only on tokens up to t.
        """
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    """A block: attention, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        # queries, keys and values together: one matrix product, one Kronecker block
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, T, width]`` to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        # [b, T, 3 · width] to three of [b, heads, T, width / heads].
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return y
