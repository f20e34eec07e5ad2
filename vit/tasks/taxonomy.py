"""Taxonomies: classes whose names are paths in a tree, such as Animalia/Mammalia/Felidae.

    loss       cross-entropy over all classes; a node has the sum of the probabilities under it
    answer     the deepest node whose calibrated probability reaches the threshold
    level k    share of the images whose most probable node of level k is right
    precision  share of the answers that are the class of the image or above it, but not the root
    distance   mean number of edges between answer and class, over all images

benchmarks/taxonomy.py has this loss beside a softmax at each node.

Source: Bertinetto et al., "Making Better Mistakes", section 3, arXiv:1912.09393, which has both.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.class_tree import (
    ROOT,
    TARGET,
    ClassTree,
    ancestors,
    answer_of,
    depth,
    distance,
    is_at_or_above,
    last_name,
)
from vit.config import Config
from vit.data.dataset_types import NO_LABEL, Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError
from vit.evaluation.intervals import share_interval
from vit.evaluation.temperature_scaling import scale_logits
from vit.output.prediction_results import ImageOutput
from vit.score_calibration import node_threshold
from vit.tasks.classification import ClassEvaluation, Classification, ClassTally
from vit.tasks.finished_run import FinishedRun
from vit.tasks.task import Event, Task, TrainingRun
from vit.text import Notify


class Taxonomy(Classification):
    """Single-label classification whose classes are the nodes of a tree."""

    tree: ClassTree | None = None

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Images with classes that are paths."""
        return replace(super().dataset_spec(config), nested=True)

    def check_data(self, config: Config, splits: Splits, notify: Notify) -> tuple[Config, Splits]:
        """Refuse several classes an image, and classes without a tree."""
        Task.check_data(self, config, splits, notify)
        if all(depth(name) == 1 for name in splits.classes):
            raise ConfigError(
                "task=taxonomy: no class is under another, such as Animalia/Felidae; give nested "
                "folders, a list of paths, or the tree with --taxonomy TREE"
            )
        return config, splits

    def with_data(self, config: Config, splits: Splits | None) -> "Taxonomy":
        task = super().with_data(config, splits)
        assert isinstance(task, Taxonomy)
        task.tree = None if splits is None else ClassTree(splits.classes)
        return task

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The number of images, and the size of the tree."""
        tree = ClassTree(splits.classes)
        levels = max(map(depth, tree.nodes))
        return [*super().summary(config, splits), f"tree: {len(tree.nodes)} nodes, {levels} levels"]

    def format_scores(self, event: Event) -> str:
        """Accuracy of classes and of the first level, and the mean distance of the best class."""
        return (
            f"{super().format_scores(event)}  level 1 {event['val_level1']:.2%}  "
            f"distance {event['val_distance']:.3g}"
        )

    def calibration_settings(self, classes: Sequence[str]) -> dict[str, Any]:
        """The tree, and the precision of its answers."""
        return {"tree": ClassTree(classes), "target_precision": TARGET}

    def eval_spec(self, spec: DatasetSpec, outputs: Sequence[str]) -> DatasetSpec:
        return replace(spec, nested=True)

    def check_samples(self, samples: Sequence[Sample], where: str) -> None:
        """Refuse multi-label images."""
        super().check_samples([one for one in samples if not one.node], where)

    def evaluation(self, model: Any, samples: Sequence[Sample], notify: Notify) -> "NodeEvaluation":
        return NodeEvaluation(samples, model.classes, node_threshold(model.calibration))

    def node_rows(self, run: FinishedRun) -> list[dict[str, Any]]:
        """Images, accuracy and answers of each node, of calibrated scores."""
        found, calibration, classes = (
            run.validation_logits,
            run.loaded.calibration,
            run.splits.classes,
        )
        logits = found.logits.double()
        if calibration is not None:
            logits = scale_logits(logits, calibration.temperature, calibration.exponent)
        nodes = NodeOutcomes(ClassTree(classes), node_threshold(calibration))
        nodes.add(logits.softmax(dim=1), [classes[label] for label in found.labels.tolist()])
        return nodes.node_rows()

    def tally(self, samples: Sequence[Sample]) -> "NodeTally":
        assert self.tree is not None
        return NodeTally(self.tree)


class NodeEvaluation(ClassEvaluation):
    """Scores of classes, and those of nodes, which images of unknown classes have too."""

    def __init__(self, samples: Sequence[Sample], classes: Sequence[str], threshold: float) -> None:
        super().__init__(samples, classes)
        self.nodes = NodeOutcomes(ClassTree(classes), threshold)
        self.placed: list[int] = []

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        super().add(outputs, first)
        samples = self.samples[first : first + len(outputs)]
        rows = [
            (place, sample.node or self.classes[sample.label], output.probabilities)
            for place, (output, sample) in enumerate(zip(outputs, samples, strict=True), first)
            if output.probabilities is not None and (sample.node or sample.label != NO_LABEL)
        ]
        if rows:
            places, names, probabilities = zip(*rows, strict=True)
            self.placed += places
            self.nodes.add(torch.from_numpy(np.stack(probabilities)), names)

    def scores(self) -> dict[str, Any]:
        """The metrics of classes, with those of the levels and of the answers."""
        scores = super().scores()
        if self.brief or not self.placed:
            return scores
        found = self.nodes.scores(self.groups_at(self.placed))
        return {**(scores or {"count": 0, "top1": None}), **found}


class NodeTally(ClassTally):
    """The scores of classes, the accuracy of the first level, and distances in the tree."""

    extra = 2

    def __init__(self, tree: ClassTree) -> None:
        super().__init__(len(tree.classes))
        self.tree = tree
        tops = [tree.nodes[place] for place in tree.level(1)]
        self.top = torch.tensor([tops.index(ancestors(name)[0]) for name in tree.classes])

    def row(self, logits: Tensor, labels: Tensor) -> Tensor:
        names, answers = self.tree.classes, logits.argmax(dim=1)
        pairs = zip(labels.tolist(), answers.tolist(), strict=True)
        apart = sum(distance(names[label], names[answer]) for label, answer in pairs)
        tops = logits.new_zeros(len(logits), 1 + int(self.top.max()))
        found = tops.index_add(1, self.top, logits.softmax(dim=1)).argmax(dim=1)
        first = torch.tensor([apart, int((found == self.top[labels]).sum())]).double()
        return torch.cat([first, super().row(logits, labels)])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Those of classes, which rank epochs, and those of the tree."""
        apart, found, *rest = totals
        scores = super().scores(run, rest)
        return {**scores, "val_level1": found / totals[-1], "val_distance": apart / totals[-1]}


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
