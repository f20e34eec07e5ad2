"""The tree of classes whose names are paths, such as Animalia/Mammalia/Felidae.

    p(node)   sum of the probabilities of the classes at or under it
    path      from the root to the most probable child, and on, unless the class of the node itself
              is more probable
    answer    the deepest node of the path whose probability reaches a threshold; the root, which
              has no name, if none does
    distance  edges between two nodes

A class with others under it is another kind of what they are. Needs no torch.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEPARATOR = "/"
ROOT = ""
TARGET = 0.95
"""Share of the answers that has to be right."""
COLUMNS = ("answer", "answer_score")
"""Of a row: a node and its probability."""
Path = Sequence[tuple[str, float]]
"""Nodes and their probabilities, from the first level on."""


class ClassTree:
    """The tree of `classes`.

    Attributes:
        nodes: All nodes but the root, each before those under it.
        children: Node -> places of its children in `nodes`.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        order = sorted(range(len(classes)), key=lambda place: classes[place].split(SEPARATOR))
        ends: dict[str, list[int]] = {}
        for place, index in enumerate(order):
            for node in ancestors(classes[index]):
                ends.setdefault(node, [place, place])[1] = place + 1
        self.nodes = tuple(ends)
        self.children: dict[str, list[int]] = {node: [] for node in (ROOT, *ends)}
        for place, node in enumerate(self.nodes):
            self.children[parent(node)].append(place)
        self._order, self._ends = np.array(order), np.array([*ends.values()])
        self._class = {name: index for index, name in enumerate(classes)}

    def node_probabilities(self, probabilities: NDArray[Any]) -> NDArray[Any]:
        """Probabilities of the nodes, (..., nodes), by those of the classes, (..., classes)."""
        ordered = probabilities[..., self._order]
        closed = np.concatenate([ordered, np.zeros_like(ordered[..., :1])], axis=-1)
        sums: NDArray[Any] = np.add.reduceat(closed, self._ends.ravel(), axis=-1)[..., ::2]
        return sums

    def paths(self, probabilities: NDArray[Any]) -> list[Path]:
        """The path of each image, by (images, classes)."""
        table = self.node_probabilities(probabilities)
        return [self._path(*rows) for rows in zip(table, probabilities, strict=True)]

    def _path(self, nodes: NDArray[Any], classes: NDArray[Any]) -> Path:
        found: list[tuple[str, float]] = []
        node = ROOT
        while children := self.children[node]:
            best = max(children, key=nodes.__getitem__)
            if node in self._class and classes[self._class[node]] > nodes[best]:
                break
            node = self.nodes[best]
            found.append((node, float(nodes[best])))
        return found

    def level(self, number: int) -> list[int]:
        """Places of the nodes of a level, from 1."""
        return [place for place, node in enumerate(self.nodes) if depth(node) == number]

    def known(self, label: str) -> str:
        """The deepest node at or above `label`, which may be no class."""
        return next((node for node in reversed(ancestors(label)) if node in self.children), ROOT)


def answer_of(path: Path, threshold: float) -> tuple[str, float]:
    """The deepest node of `path` from the root on that reaches `threshold`, and its probability."""
    return ([(ROOT, 1.0), *takewhile(lambda one: one[1] >= threshold, path)])[-1]


def wrong_from(path: Path, label: str) -> float:
    """The highest threshold at which the answer is wrong for an image of `label`; -1: none is."""
    lowest = 1.0
    for node, probability in path:
        lowest = min(lowest, probability)
        if not is_at_or_above(node, label):
            return lowest
    return -1.0


def ancestors(label: str) -> list[str]:
    """The nodes from the first level to `label` itself; none of the root."""
    parts = label.split(SEPARATOR) if label else []
    return [SEPARATOR.join(parts[:end]) for end in range(1, len(parts) + 1)]


def last_name(node: str) -> str:
    """The name of a node without those above."""
    return node.rpartition(SEPARATOR)[2]


def parent(node: str) -> str:
    """The node above."""
    return node.rpartition(SEPARATOR)[0]


def depth(node: str) -> int:
    """The level of a node; 0 of the root."""
    return node.count(SEPARATOR) + 1 if node else 0


def is_at_or_above(node: str, label: str) -> bool:
    """Whether `node` is `label` or one of its ancestors, so that it is a right answer."""
    return node == ROOT or f"{label}{SEPARATOR}".startswith(f"{node}{SEPARATOR}")


def distance(one: str, other: str) -> int:
    """Edges between two nodes."""
    shared = len({*ancestors(one)} & {*ancestors(other)})
    return depth(one) + depth(other) - 2 * shared


def by_last_name(classes: Iterable[str]) -> dict[str, str]:
    """Last part of a path -> the path, where only one ends in it."""
    found: dict[str, str] = {}
    for name in classes:
        last = last_name(name)
        found[last] = ROOT if last in found else name
    return {last: name for last, name in found.items() if name}
