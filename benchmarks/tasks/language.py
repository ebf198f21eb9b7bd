"""A text that is part of Python: the language reference behind ``help()``."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import DataError
from tasks.examples import Examples, Splits, encode


def load_language() -> Splits:
    """Load Python's language reference, one document for each topic of ``help()``.

    The standard library ships it as ``pydoc_data.topics``, under Python's own licence:
    some eighty topics of 200 to 60,000 characters. If topics share a paragraph, as
    "compound statements" and "with" do, only one of them keeps it
    (:func:`without_repeats`). The last tenth of every document is for the test.

    The text differs a little between versions of Python, so server and clients should
    run the same version. The tokens, and so the model, do not differ.

    Returns
    -------
    Splits
        Sequences of 64 tokens; each token is a character.

    Raises
    ------
    DataError
        If this Python comes without the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python lacks pydoc_data, the text of the data set 'language': use a "
            "full installation of Python, or another data set"
        ) from error
    return cut(without_repeats(topics), length=64, held=10)


def without_repeats(documents: Mapping[str, str]) -> list[tuple[str, str]]:
    r"""Return documents without repetitions: each paragraph stays in its shortest one.

    Otherwise much of the test split would also be in the training split, in another
    document. In Python's topics this is a fifth of the text.

    Parameters
    ----------
    documents : Mapping[str, str]
        Texts by name; blank lines separate paragraphs.

    Returns
    -------
    list[tuple[str, str]]
        The names and the remaining texts, in the order of the names.

    Examples
    --------
    >>> without_repeats({"all": "One.\n\nTwo.\n\nThree.", "one": "One."})
    [('all', 'Two.\n\nThree.'), ('one', 'One.')]
    """
    seen: set[str] = set()
    remaining: dict[str, str] = {}
    for name in sorted(documents, key=lambda name: (len(documents[name]), name)):
        own = []
        for paragraph in documents[name].split("\n\n"):
            words = " ".join(paragraph.split())  # with any indentation
            if words not in seen:
                seen.add(words)
                own.append(paragraph)
        remaining[name] = "\n\n".join(own)
    return sorted(remaining.items())


def cut(documents: Sequence[tuple[str, str]], length: int, held: int) -> Splits:
    """Cut documents into disjoint pieces; the last ones are for the test.

    Parameters
    ----------
    documents : Sequence[tuple[str, str]]
        Names and texts. The rest at a document's end is not used. Nor is a document of
        fewer than two pieces.
    length : int
        T, the positions of an example. A piece has one more character.
    held : int
        In each document, one piece in `held`, rounded up, is for the test. These are
        the last pieces.

    Returns
    -------
    Splits
        The pieces, with the documents in the given order.

    Raises
    ------
    DataError
        If no document is long enough.
    """
    names: list[str] = []
    train: list[tuple[Tensor, Tensor]] = []
    test: list[tuple[Tensor, Tensor]] = []
    for name, text in documents:
        count = len(text) // (length + 1)
        if count < 2:
            continue
        pieces = encode(text[: count * (length + 1)]).reshape(count, length + 1)
        document = torch.full((count,), len(names))
        names.append(name)
        end = count - -(-count // held)
        train.append((pieces[:end], document[:end]))
        test.append((pieces[end:], document[end:]))
    if not names:
        raise DataError(
            f"no document has two pieces of {length + 1} characters: choose a smaller "
            "length"
        )
    return Splits(_joined(train), _joined(test), tuple(names))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Examples:
    tokens, documents = zip(*parts, strict=True)
    return Examples(torch.cat(tokens), torch.cat(documents))
