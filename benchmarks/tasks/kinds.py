"""The kind of a data set, known without its data: shape, classes, normalisation."""

from dataclasses import dataclass

from flwr_fisher.errors import check_known

Channels = tuple[float, ...]


@dataclass(frozen=True)
class Kind:
    """A data set's properties that must be equal on all nodes.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Channels, height and width of an image.
    class_names : tuple[str, ...]
        A name for each class; its position is the label.
    mean, std : tuple[float, ...]
        Mean and standard deviation of each channel, on the scale 0…1.
    """

    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)


def _kind(side: int, classes: int | str, mean: Channels, std: Channels) -> Kind:
    names = classes.split() if isinstance(classes, str) else map(str, range(classes))
    return Kind((len(mean), side, side), tuple(names), mean, std)


_GREY, _RGB = (0.5,), (0.5, 0.5, 0.5)
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
# The published mean and standard deviation of each channel; those of digits are of its
# training split. EMNIST's letters are labelled from 0 here.
KINDS: dict[str, Kind] = {
    "digits": _kind(8, 10, (0.3054,), (0.3761,)),
    "mnist": _kind(28, 10, (0.1307,), (0.3081,)),
    "fashionmnist": _kind(28, 10, (0.2860,), (0.3530,)),
    "emnist": _kind(28, 47, _GREY, _GREY),
    "emnist-balanced": _kind(28, 47, _GREY, _GREY),
    "emnist-digits": _kind(28, 10, _GREY, _GREY),
    "emnist-letters": _kind(28, 26, _GREY, _GREY),
    "svhn": _kind(32, 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "cifar10": _kind(32, _CIFAR10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _kind(32, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "gtsrb": _kind(32, 43, _RGB, _RGB),
}
"""Of the data sets that are known without reading them."""


def kind_of(dataset: str) -> Kind:
    """Return the kind of a data set that is known without reading it."""
    check_known("dataset", dataset, KINDS)
    return KINDS[dataset]
