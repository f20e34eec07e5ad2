"""Do suggested labels save labels? Accuracy with n suggested labels beside n random ones.

    python benchmarks/suggestions.py DATA --weights SOURCE [-n 50 100 200 400] [--seeds 5]
    python benchmarks/suggestions.py DATA --weights SOURCE --train 5m --out FOLDER

DATA has class folders in train/ and val/: the labels of train/ are what an annotator would answer.
A linear probe (logistic regression, penalty 1/n) and the class of the nearest labelled image by
features are measured on all of val/; with --train, a training of `vit train --labels` too, of so
long a time for each n, order and seed. Orders:

    random      images drawn at random
    typical     `vit suggest --order typical`
    both        half typical, then half uncertain by the labels of these: `vit suggest --labels`

The last column is how many random labels give the same accuracy, by interpolation between the
numbers of labels, divided by n: what suggestions save. Near duplicates are not left out here.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor

import vit
from vit.data.dataset_types import Splits
from vit.data.image_archives import relative
from vit.data.sources.open_dataset import open_splits
from vit.inference.predictor import Predictor
from vit.inference.suggest import (
    class_margins,
    neighbour_shares,
    order_by_typicality,
    order_by_uncertainty,
    unit_directions,
)
from vit.output.prediction_results import write_review_list

ORDERS = ("random", "typical", "both")


def extract(predictor: Predictor, paths: Sequence[str]) -> Tensor:
    """Features of readable images, (images, dim)."""
    rows = [output.embedding for batch in predictor.batches([*paths]) for output in batch]
    return torch.stack([row for row in rows if row is not None])


def choose(order: str, features: Tensor, labels: Tensor, number: int, seed: int) -> list[int]:
    """`number` images in an order; `labels` are looked at where an annotator has given them."""
    labelled = torch.zeros(len(features), dtype=torch.bool)
    if order == "random":
        draw = torch.Generator().manual_seed(seed)
        return torch.randperm(len(features), generator=draw)[:number].tolist()
    first = number if order == "typical" else number // 2
    chosen = [*islice(order_by_typicality(features, first, labelled, seed=seed), first)]
    if len(chosen) < number:
        labelled[chosen] = True
        targets = torch.nn.functional.one_hot(labels[chosen])
        shares = neighbour_shares(features, torch.tensor(chosen), targets)
        margins = class_margins(shares) if shares.shape[1] > 1 else torch.zeros(len(features))
        rest = number - first
        more = order_by_uncertainty(features, margins, rest, labelled, seed=seed)
        chosen += [*islice(more, rest)]
    return chosen


def probe_accuracy(train: Tensor, labels: Tensor, val: Tensor, truth: Tensor) -> float:
    """Top-1 of multinomial logistic regression with weight decay, by L-BFGS."""
    classes = int(truth.max()) + 1
    weight = torch.zeros(train.shape[1] + 1, classes, requires_grad=True)
    train, val = (torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in (train, val))
    scale = train.shape[1] ** 0.5  # unit features: inputs of about 1
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scale * train @ weight, labels)
        loss = loss + weight.square().sum() / (2 * len(train))
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return float(((val @ weight).argmax(dim=1) == truth).double().mean())


def nearest_accuracy(train: Tensor, labels: Tensor, val: Tensor, truth: Tensor) -> float:
    """Top-1 of the class of the most similar labelled image."""
    return float((labels[(val @ train.T).argmax(dim=1)] == truth).double().mean())


def random_labels_needed(accuracy: float, numbers: Sequence[int], random: Sequence[float]) -> str:
    """How many random labels give `accuracy`, linear between `numbers`."""
    points = [*zip(numbers, random, strict=True)]
    if accuracy < points[0][1]:
        return f"below {points[0][0]}"
    for (n, low), (more, high) in pairwise(points):
        if low <= accuracy <= high and high > low:
            return f"{n + (more - n) * (accuracy - low) / (high - low):.0f}"
    return f"over {points[-1][0]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--weights", required=True)
    parser.add_argument("-n", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--device")
    parser.add_argument("--train", metavar="TIME", help="train on the labels too, for so long")
    parser.add_argument("--out", type=Path, help="folder of the runs of --train")
    args = parser.parse_args()
    if (args.train is None) != (args.out is None):
        parser.error("--train and --out go together")
    splits = open_splits(args.data, val_share=0.2, seed=0, compare=False)
    if splits.made:
        parser.error("DATA needs train/ and val/")
    predictor = Predictor(args.weights, device=args.device, embeddings=True)
    labels, truth = (
        torch.tensor([one.label for one in part]) for part in (splits.train, splits.val)
    )
    every = extract(predictor, [one.path for one in [*splits.train, *splits.val]])
    if len(every) < len(labels) + len(truth):
        parser.error("some images cannot be read: vit check names them")
    features, val = unit_directions(every).split([len(labels), len(truth)])
    numbers = sorted({n for n in args.n if n <= len(features)})
    ways = ["probe", "nearest"] + (["train"] if args.train else [])
    found: dict[tuple[str, int, str], list[float]] = {}
    covered: dict[tuple[int, str], list[int]] = {}
    for seed in range(args.seeds):
        for n in numbers:
            for order in args.orders:
                places = choose(order, features, labels, n, seed)
                part = features[places], labels[places], val, truth
                covered.setdefault((n, order), []).append(len(labels[places].unique()))
                found.setdefault(("probe", n, order), []).append(probe_accuracy(*part))
                found.setdefault(("nearest", n, order), []).append(nearest_accuracy(*part))
                if args.train:
                    found.setdefault(("train", n, order), []).append(
                        trained_accuracy(args, splits, places, f"{order}_{n}_{seed}", seed)
                    )
    print(f"{args.data}, features of {args.weights}, {len(truth):,} images measured on,")
    print(f"mean (smallest to largest) of {args.seeds} seeds\n")
    print("| by | labels | order | classes | top-1 | random labels for it | saved |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:
        for n in numbers:
            for order in args.orders:
                row = found[way, n, order]
                mean, needed, saved = statistics.mean(row), "", ""
                if order != "random" and "random" in args.orders:
                    random = [statistics.mean(found[way, one, "random"]) for one in numbers]
                    needed = random_labels_needed(mean, numbers, random)
                    saved = f"{float(needed) / n:.2f}x" if needed.isdecimal() else ""
                classes = statistics.mean(covered[n, order])
                spread = f"{mean:.1%} ({min(row):.1%} to {max(row):.1%})"
                print(f"| {way} | {n} | {order} | {classes:.1f} | {spread} | {needed} | {saved} |")


def trained_accuracy(
    args: argparse.Namespace, splits: Splits, places: Sequence[int], name: str, seed: int
) -> float:
    """Top-1 of a training on the labels of `places`, on the images of val/."""
    rows = [
        (relative(one.path, splits.root), splits.classes[one.label])
        for one in (splits.train[place] for place in places)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}.csv"
    write_review_list(str(path), ("image", "label"), rows)
    run = args.out / name
    settings = {"weights": args.weights, "time": args.train, "seed": seed}
    # of the labelled images some are held out: val/ is for the measurement alone
    vit.train(args.data, run, labels=str(path), overwrite=True, **settings)
    return float(vit.evaluate(run, str(splits.root / "val"), device=args.device)["top1"])


if __name__ == "__main__":
    main()
