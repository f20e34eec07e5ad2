"""Do answers that are nodes of a tree keep their promise, and what do they cost?

    python benchmarks/taxonomy.py FOLDER synthetic [--seeds 3]
    python benchmarks/taxonomy.py FOLDER losses [--seeds 3]
    python benchmarks/taxonomy.py FOLDER make --set cifar10 --images UNPACKED
    python benchmarks/taxonomy.py FOLDER train --set cifar10 --time 10m [VIT TRAIN FLAGS]
    python benchmarks/taxonomy.py FOLDER measure --set cifar10

synthetic   300 leaves in 20 nodes in 4: Gaussian features around means, those of siblings around
            that of their parent, with a deviation for each level (--spread), and a linear softmax;
            the noise is such that about 80 % of the leaves are right
losses      the same features and few images of a leaf: cross-entropy of all leaves beside that of a
            softmax at each node
make        nested folders of the classes of CIFAR-10 or of clothing160 in FOLDER/SET, and in
            FOLDER/SET-without the same without two leaves in training; UNPACKED has train/CLASS

All held-out predictions fit the temperature, and each of 100 random halves of them the threshold of
95 %; the other half counts. A half holds the promise if the precision of its answers is 95 % or
more. Printed are means over the halves:

leaves      share of the answers, and of the images, that are leaves
distance    edges between answer and class, all images, by those between the best class and class;
            mistakes: an answer above the class costs nothing
held out    leaves that training lacks: share of their images whose answer is above them, with the
            root (unknown) and without
flat        the same promise for the best class alone: share of the images that are answered
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vit.class_tree import ROOT, ClassTree, ancestors, answer_of, distance, is_at_or_above, parent
from vit.evaluation.fit_calibration import fit_calibration
from vit.evaluation.temperature_scaling import fit_temperature, scale_logits
from vit.score_calibration import node_threshold

TREES = {
    "cifar10": (
        *("animals/bird", "animals/frog", "animals/mammals/cat", "animals/mammals/deer"),
        *("animals/mammals/dog", "animals/mammals/horse", "vehicles/airplane"),
        *("vehicles/road/automobile", "vehicles/road/truck", "vehicles/ship"),
    ),
    "clothing160": (
        *("accessories/hat", "accessories/shoes", "body/dress", "body/lower/pants"),
        *("body/lower/shorts", "body/lower/skirt", "body/upper/longsleeve", "body/upper/outwear"),
        *("body/upper/shirt", "body/upper/t-shirt"),
    ),
}
HELD_OUT = {"cifar10": ("dog", "truck"), "clothing160": ("shirt", "shorts")}
"""Leaves that the second training lacks."""
TARGET, DRAWS, HELD = 0.95, 100, 0.3
WIDTHS, PER_LEAF, FEATURES = (4, 5, 15), 60, 64
"""Children of a node of each level of the synthetic tree, its images of a leaf, its features."""


def halves(images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random halves."""
    for seed in range(DRAWS):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
        yield order[: images // 2], order[images // 2 :]


def promises(tree: ClassTree, logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Means over halves, of logits (images, classes)."""
    names, sums = [tree.classes[label] for label in labels.tolist()], []
    held, proven, flat_held = 0, 0, 0
    flat = torch.tensor(
        [
            distance(tree.classes[a], n)
            for a, n in zip(logits.argmax(1).tolist(), names, strict=True)
        ]
    ).double()
    scaling = fit_temperature(logits, labels)
    assert scaling is not None
    for seen, rest in halves(len(labels)):
        own_scaling = scaling._replace(held_out=scaling.held_out[seen])
        fitted, alone = (
            fit_calibration(
                logits[seen],
                labels[seen],
                fitted=own_scaling,
                target_precision=TARGET,
                tree=one,
            )
            for one in (tree, None)
        )
        assert fitted is not None
        assert alone is not None
        calibration = fitted.calibration
        scaled = scale_logits(logits[rest], calibration.temperature, calibration.exponent)
        probabilities = scaled.softmax(dim=1)
        threshold = node_threshold(calibration)
        answers = [answer_of(path, threshold)[0] for path in tree.paths(probabilities.numpy())]
        own = [names[place] for place in rest.tolist()]
        given = np.array([answer != ROOT for answer in answers])
        right = np.array([is_at_or_above(*pair) for pair in zip(answers, own, strict=True)])
        leaf = np.array([not tree.children[answer] for answer in answers])
        apart = np.array([distance(*pair) for pair in zip(answers, own, strict=True)])
        best = probabilities.max(dim=1)
        limit = alone.calibration.threshold
        kept = best.values >= (2.0 if limit is None else limit)
        hits = (best.indices == labels[rest])[kept].double().mean()
        precision = right[given].mean() if given.any() else 1.0
        held += bool(precision >= TARGET)
        proven += calibration.threshold is not None
        flat_held += bool(kept.sum() == 0 or hits >= TARGET)
        cost = float(flat[rest].mean())
        sums.append(
            {
                "threshold": threshold,
                "precision": precision,
                "leaves of answers": leaf.sum() / max(given.sum(), 1),
                "leaves of images": leaf.mean(),
                "higher": (given & ~leaf).mean(),
                "unknown": 1 - given.mean(),
                "distance": apart.mean() / cost,
                "distance of mistakes": (apart * ~right).mean() / cost,
                "best class": cost,
                "flat answered": float(kept.double().mean()),
            }
        )
    means = {name: float(np.mean([one[name] for one in sums])) for name in sums[0]}
    accuracy = float((logits.argmax(1) == labels).double().mean())
    counts = {"images": len(labels), "top1": accuracy, "halves that hold": held, "proven": proven}
    return {**counts, **means, "flat halves that hold": flat_held}


def above_held_out(
    tree: ClassTree, calibration: Any, logits: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Answers of images of leaves that training lacks."""
    scaled = scale_logits(logits, calibration.temperature, calibration.exponent).softmax(dim=1)
    threshold = node_threshold(calibration)
    answers = [answer_of(path, threshold)[0] for path in tree.paths(scaled.numpy())]
    pairs = [*zip(answers, names, strict=True)]
    return {
        "held-out images": len(names),
        "above or unknown": float(np.mean([is_at_or_above(*pair) for pair in pairs])),
        "parent": float(np.mean([answer == parent(name) for answer, name in pairs])),
        "held-out unknown": answers.count(ROOT) / len(answers),
    }


def synthetic_tree(
    seed: int, noise: float, spread: Sequence[float], per_leaf: int
) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor]:
    """Class names; features (images, FEATURES) and labels of training, and of 20 others a leaf."""
    source = torch.Generator().manual_seed(seed)
    means, names = torch.zeros(1, FEATURES), [""]
    for width, deviation in zip(WIDTHS, spread, strict=True):
        shift = deviation * torch.randn(len(means) * width, FEATURES, generator=source)
        means = means.repeat_interleave(width, 0) + shift
        names = [f"{name}/{n:02}".lstrip("/") for name in names for n in range(width)]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(len(means)).repeat_interleave(count)
        return means[labels] + noise * torch.randn(len(labels), FEATURES, generator=source), labels

    return tuple(names), *draw(per_leaf), *draw(20)


def node_log_probabilities(outputs: Tensor, tree: ClassTree) -> Tensor:
    """Logarithms of the probabilities of the classes, by a softmax at each node; (images, nodes)
    -> (images, classes)."""
    table = torch.empty_like(outputs)
    for node, children in tree.children.items():
        if children:
            above = table[:, [tree.nodes.index(node)]] if node else 0.0
            table[:, children] = outputs[:, children].log_softmax(dim=1) + above
    return table[:, [tree.nodes.index(name) for name in tree.classes]]


def fit_linear(
    tree: ClassTree,
    features: Tensor,
    labels: Tensor,
    *,
    nodes: bool = False,
    decays: Sequence[float] = (1e-4,),
    steps: int = 60,
) -> Any:
    """A linear classifier with the weight decay that is best for a part of the images: features ->
    log probabilities of the classes."""
    width = len(tree.nodes if nodes else tree.classes)

    def outputs(weight: Tensor, bias: Tensor, some: Tensor) -> Tensor:
        found = some @ weight + bias
        return node_log_probabilities(found, tree) if nodes else found.log_softmax(dim=1)

    def fit(decay: float, some: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.zeros(features.shape[1], width, requires_grad=True)
        bias = torch.zeros(width, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.nll_loss(outputs(weight, bias, some), own) + decay * weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return weight.detach(), bias.detach()

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[: 4 * len(order) // 5], order[4 * len(order) // 5 :]
    losses = dict.fromkeys(decays, 0.0)
    for decay in decays if len(decays) > 1 else ():
        found = fit(decay, features[train], labels[train])
        losses[decay] = float(F.nll_loss(outputs(*found, features[val]), labels[val]))
    chosen = fit(min(losses, key=losses.__getitem__), features, labels)
    return lambda some: outputs(*chosen, some).double()


def synthetic(seeds: int, noise: float, spread: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Promises of the linear classifier, and its answers for 30 leaves that another lacks."""
    for seed in range(seeds):
        names, train, labels, test, truth = synthetic_tree(seed, noise, spread, PER_LEAF)
        tree = ClassTree(names)
        model = fit_linear(tree, train, labels)
        found = {
            "set": "synthetic",
            "spread": spread,
            "seed": seed,
            **promises(tree, model(test), truth),
        }
        without = torch.tensor([n for n in range(len(names)) if n % 10 != seed % 10])
        places = torch.full((len(names),), -1)
        places[without] = torch.arange(len(without))
        fewer = ClassTree([names[n] for n in without.tolist()])
        there, known = places[labels] >= 0, places[truth] >= 0
        model = fit_linear(fewer, train[there], places[labels][there])
        logits = model(test)
        fitted = fit_calibration(
            logits[known], places[truth][known], target_precision=TARGET, tree=fewer
        )
        assert fitted is not None
        lacking = [names[n] for n in truth[~known].tolist()]
        yield {**found, **above_held_out(fewer, fitted.calibration, logits[~known], lacking)}


def losses(seeds: int, noise: float, spread: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Both losses with few and many images of a leaf."""
    for per_leaf in (5, 20):
        for seed in range(seeds):
            names, train, labels, test, truth = synthetic_tree(seed, noise, spread, per_leaf)
            tree = ClassTree(names)
            for kind in ("flat", "nodes"):
                decays = (1e-2, 1e-3, 1e-4)
                model = fit_linear(tree, train, labels, nodes=kind == "nodes", decays=decays)
                logits = model(test)
                best = logits.argmax(dim=1)
                pairs = [*zip(best.tolist(), truth.tolist(), strict=True)]
                tops = [ancestors(names[a])[0] == ancestors(names[b])[0] for a, b in pairs]
                row: dict[str, Any] = {"images of a leaf": per_leaf, "seed": seed, "loss": kind}
                row["top1"] = float((best == truth).double().mean())
                row["nll"] = float(F.nll_loss(logits, truth))
                row["level 1"] = float(np.mean(tops))
                edges = [distance(names[a], names[b]) for a, b in pairs]
                yield {**row, "edges": float(np.mean(edges))}


def make(folder: Path, name: str, images: Path) -> None:
    """Nested folders with links to the images, a share of which is held out."""
    source = random.Random(0)
    paths = {leaf.rpartition("/")[2]: leaf for leaf in TREES[name]}
    found: dict[str, list[Path]] = {leaf: [] for leaf in paths}
    for path in sorted(images.rglob("*")):
        if path.is_file() and path.parent.name in paths:
            found[path.parent.name].append(path)
    for leaf, files in found.items():
        source.shuffle(files)
        for place, path in enumerate(files):
            split = "val" if place < HELD * len(files) else "train"
            for kind in (name, f"{name}-without"):
                if kind != name and split == "train" and leaf in HELD_OUT[name]:
                    continue
                if kind != name and leaf in HELD_OUT[name]:
                    split = "unseen"
                target = folder / kind / split / paths[leaf] / f"{place}{path.suffix}"
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:
                    shutil.copy(path, target)


def predict(run: Path, data: Path, split: str) -> tuple[tuple[str, ...], Tensor, list[str]]:
    """Classes of a run, its raw logits of a split up to a constant, and the paths of the labels."""
    from vit.data.sources.dataset_spec import DatasetSpec
    from vit.inference.evaluation_data import load_samples
    from vit.inference.predictor import Predictor
    from vit.weights.saved_model import load_run

    predictor = Predictor(load_run(run).without_calibration())
    spec = DatasetSpec(str(data), split=split)
    samples = load_samples(predictor.task, None, spec, predictor.classes, print)
    rows, names = [], []
    for outputs in predictor.batches([sample.path for sample in samples]):
        rows += [output.probabilities for output in outputs]
    names = [one.node or predictor.classes[one.label] for one in samples]
    probabilities = torch.from_numpy(np.stack([row for row in rows if row is not None]))
    return predictor.classes, probabilities.clamp(min=1e-300).log(), names


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Promises of the run of a set, and answers of the other for the leaves that it lacks."""
    classes, logits, names = predict(folder / f"run-{name}", folder / name, "val")
    tree, labels = ClassTree(classes), torch.tensor([classes.index(one) for one in names])
    found = {"set": name, **promises(tree, logits, labels)}
    run, data = folder / f"run-{name}-without", folder / f"{name}-without"
    if run.is_dir():
        classes, logits, names = predict(run, data, "val")
        tree, labels = ClassTree(classes), torch.tensor([classes.index(one) for one in names])
        fitted = fit_calibration(logits, labels, target_precision=TARGET, tree=tree)
        assert fitted is not None
        _, logits, names = predict(run, data, "unseen")
        found |= above_held_out(tree, fitted.calibration, logits, names)
    return found


def train(folder: Path, name: str, length: str, flags: Sequence[str]) -> None:
    """Both runs of a set."""
    from vit.commands.main import main

    for kind in (name, f"{name}-without"):
        data, out = str(folder / kind), str(folder / f"run-{kind}")
        command = ["train", data, "--task", "taxonomy", "--time", length, "--out", out, *flags]
        if code := main(command):
            raise SystemExit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("action", choices=["synthetic", "losses", "make", "train", "measure"])
    parser.add_argument("--set", choices=[*TREES], default="cifar10")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--time", default="10m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=2.5)
    parser.add_argument("--spread", type=float, nargs=3, default=(1.0, 1.0, 1.0))
    given, more = parser.parse_known_args()
    if given.action == "make":
        make(given.folder, given.set, given.images)
    elif given.action == "train":
        train(given.folder, given.set, given.time, more)
    elif given.action == "measure":
        print(json.dumps(measure(given.folder, given.set)))
    else:
        table = synthetic if given.action == "synthetic" else losses
        for row in table(given.seeds, given.noise, given.spread):
            print(json.dumps(row), flush=True)
