"""What data are like, without any of them: shape, classes, normalisation."""

import re
from dataclasses import dataclass

from flwr_fisher.errors import ConfigurationError, UnknownNameError

Channels = tuple[float, ...]


@dataclass(frozen=True)
class Kind:
    """What all nodes of a federation must agree on.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Channels, height and width of an image.
    class_names : tuple[str, ...]
        One name a class; the position is the label.
    mean, std : tuple[float, ...]
        Of each channel, on the scale 0…1.
    """

    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _grey(side: int, classes: int, mean: float = 0.5, std: float = 0.5) -> Kind:
    return Kind((1, side, side), _numbered(classes), (mean,), (std,))


def _rgb(names: tuple[str, ...], mean: Channels, std: Channels) -> Kind:
    return Kind((3, 32, 32), names, mean, std)


_HALF = (0.5, 0.5, 0.5)
_CIFAR10_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
# The published mean and standard deviation of each channel; those of digits are of its
# training split. EMNIST's letters are labelled from 0 here.
KINDS: dict[str, Kind] = {
    "digits": _grey(8, 10, 0.3054, 0.3761),
    "mnist": _grey(28, 10, 0.1307, 0.3081),
    "fashionmnist": _grey(28, 10, 0.2860, 0.3530),
    "emnist": _grey(28, 47),
    "emnist-balanced": _grey(28, 47),
    "emnist-digits": _grey(28, 10),
    "emnist-letters": _grey(28, 26),
    "svhn": _rgb(_numbered(10), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "cifar10": _rgb(_CIFAR10_NAMES, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _rgb(
        _numbered(100), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
    "gtsrb": _rgb(_numbered(43), _HALF, _HALF),
}
"""Of the data sets that are known without reading them."""

_OWN = re.compile(r"own:(\d+)x(\d+)x(\d+):(.+)")


def kind_of(dataset: str) -> Kind:
    """Return what a data set is like.

    Parameters
    ----------
    dataset : str
        A key of :data:`KINDS`, or for data that only the nodes have
        ``own:<C>x<H>x<W>:<classes>``: the images' shape, and how many classes there
        are, or their names with commas between. Such images are normalised by 0.5.

    Raises
    ------
    ConfigurationError
        If it is neither, or a number is 0.

    Examples
    --------
    >>> kind_of("own:3x32x32:benign,malignant").class_names
    ('benign', 'malignant')
    >>> kind_of("own:1x28x28:4").class_names
    ('0', '1', '2', '3')
    """
    if dataset in KINDS:
        return KINDS[dataset]
    if (match := _OWN.fullmatch(dataset)) is None:
        known = [*KINDS, "own:<C>x<H>x<W>:<classes>"]
        raise UnknownNameError(
            "dataset of nodes with data of their own", dataset, known
        )
    channels, height, width = (int(size) for size in match.groups()[:3])
    classes = match[4]
    names = _numbered(int(classes)) if classes.isdecimal() else _names(classes)
    if 0 in (channels, height, width, len(names)):
        raise ConfigurationError(
            f"dataset '{dataset}': sizes and classes are at least 1"
        )
    half = (0.5,) * channels
    return Kind((channels, height, width), names, half, half)


def _names(classes: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in classes.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"classes '{classes}': a name is empty, or there twice"
        )
    return names
