"""Metrics of answers that are nodes of a tree of classes.

level k    share of the images whose most probable node of level k is right
precision  share of the answers that are the class of the image or above it, but not the root
distance   mean number of edges between answer and class, over all images
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vit.class_tree import (
    ROOT,
    ClassTree,
    ancestors,
    answer_of,
    depth,
    distance,
    is_at_or_above,
    last_name,
)
from vit.evaluation.intervals import share_interval


class NodeOutcomes:
    """What an evaluation keeps of each image: its class, the answer, and the best of each level.

    Args:
        threshold: Least probability of a node that is an answer.
    """

    def __init__(self, tree: ClassTree, threshold: float) -> None:
        self.tree, self.threshold = tree, threshold
        self.levels = [tree.level(k) for k in range(1, 1 + max(map(depth, tree.nodes)))]
        self.labels: list[str] = []
        self.answers: list[str] = []
        self.best: list[list[str]] = []
        self.classes: list[str] = []
        """The most probable class of each image."""

    def add(self, probabilities: Tensor, labels: Sequence[str]) -> None:
        """Add images with the probabilities of their classes, (images, classes)."""
        rows = probabilities.double().numpy()
        table, tree = self.tree.node_probabilities(rows), self.tree
        self.labels += labels
        self.answers += [answer_of(path, self.threshold)[0] for path in tree.paths(rows)]
        self.classes += [tree.classes[best] for best in rows.argmax(1).tolist()]
        best = [[tree.nodes[level[n]] for n in table[:, level].argmax(1)] for level in self.levels]
        self.best += map(list, zip(*best, strict=True))

    def scores(self, groups: Tensor | None = None) -> dict[str, Any]:
        """`levels` and `answers` as JSON values, of at least one image."""
        return {"levels": self.level_scores(groups), "answers": self.answer_scores(groups)}

    def level_scores(self, groups: Tensor | None = None) -> list[dict[str, Any]]:
        """Accuracy of each level, of the images whose class has a node of it in the tree."""
        rows = []
        true = [ancestors(self.tree.known(label)) for label in self.labels]
        for place, level in enumerate(self.levels):
            there = torch.tensor([len(nodes) > place for nodes in true])
            pairs = zip(true, self.best, strict=True)
            hits = torch.tensor([n[place] == b[place] for n, b in pairs if len(n) > place])
            row: dict[str, Any] = {"level": place + 1, "nodes": len(level), "count": len(hits)}
            if len(hits):
                row["accuracy"] = float(hits.double().mean())
                row["interval"] = share_interval(hits, None if groups is None else groups[there])
            rows.append(row)
        return rows

    def answer_scores(self, groups: Tensor | None = None) -> dict[str, Any]:
        """Precision of the answers and its interval, their kinds, and distances in the tree."""
        pairs = [*zip(self.answers, self.labels, strict=True)]
        given = torch.tensor([answer != ROOT for answer in self.answers])
        right = torch.tensor([is_at_or_above(*pair) for pair in pairs])
        leaves = sum(not self.tree.children[answer] for answer in self.answers)
        count, answered = len(pairs), int(given.sum())
        apart = [distance(*pair) for pair in pairs]
        flat = [distance(*pair) for pair in zip(self.classes, self.labels, strict=True)]
        wrong = [edges for edges, hit in zip(apart, right.tolist(), strict=True) if not hit]
        interval = None
        if answered:
            interval = share_interval(right[given], None if groups is None else groups[given])
        return {
            "threshold": self.threshold,
            "precision": float(right[given].double().mean()) if answered else None,
            "precision_interval": interval,
            "leaves": leaves / count,
            "higher_nodes": (answered - leaves) / count,
            "unknown": 1 - answered / count,
            "distance": sum(apart) / count,
            "mistake_distance": sum(wrong) / count,
            "class_distance": sum(flat) / count,
        }

    def node_rows(self) -> list[dict[str, Any]]:
        """For each node its images, the share of them whose most probable node of its level it is,
        and the share whose answer is it or under it."""
        rows = []
        for node in self.tree.nodes:
            level = depth(node)
            places = [n for n, label in enumerate(self.labels) if is_at_or_above(node, label)]
            right = sum(self.best[n][level - 1] == node for n in places)
            answered = sum(is_at_or_above(node, self.answers[n]) for n in places)
            shares = [part / len(places) if places else None for part in (right, answered)]
            row = {"name": last_name(node), "level": level, "images": len(places)}
            rows.append({**row, "right": shares[0], "answered": shares[1]})
        return rows
