"""What a linear probe costs once the features are there: the whole sweep, five folds, the last fit.

    python benchmarks/probe.py [--images 3000] [--classes 10] [--dims 384 768] [--runs 3]

The features are drawn with as many scales as those of a network have: variances fall as 1 / rank.
scikit-learn, where it is installed, fits one strength on all images, for comparison.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor

from vit.training.finetune.linear_probe import fit_probe, knn_accuracy


def draw(images: int, dim: int, classes: int) -> tuple[Tensor, Tensor]:
    """Overlapping classes in an ill-conditioned space."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (images,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator) * 0.15
    noise = torch.randn(images, dim, generator=generator)
    turned, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
    scale = torch.arange(1, dim + 1).rsqrt()
    return (centres[labels] + noise) * scale @ turned.T, labels


def scikit_seconds(features: Tensor, labels: Tensor, strength: float) -> float | None:
    """Seconds of one fit by scikit-learn at the same strength, or None."""
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return None
    scaled = ((features - features.mean(0)) / features.std(0)).double().numpy()
    other = LogisticRegression(C=1 / (strength * len(labels)), max_iter=5000)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.fit(scaled, labels.numpy())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-sklearn", action="store_true")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.device}")
    for dim in args.dims:
        features, labels = draw(args.images, dim, args.classes)
        taken, near = [], []
        for _ in range(args.runs):
            began = time.perf_counter()
            probe = fit_probe(features, labels, args.classes, seed=0, device=args.device)
            taken.append(time.perf_counter() - began)
            began = time.perf_counter()
            val, own = features[:600], labels[:600]
            knn_accuracy(features[600:], labels[600:], val, own, device=args.device)
            near.append(time.perf_counter() - began)
        theirs = None if args.no_sklearn else scikit_seconds(features, labels, probe.strength)
        print(
            f"{args.images} x {dim}, {args.classes} classes: probe {statistics.median(taken):.2f}"
            f" s, {len(probe.accuracy_by_strength)} strengths, {probe.folds} folds, chosen "
            f"{probe.strength:.2g}, {probe.cv_accuracy:.1%}; k-NN {statistics.median(near):.2f} s"
            + ("" if theirs is None else f"; scikit-learn, one fit {theirs:.2f} s")
        )
        for note in probe.notes:
            print(f"    {note}")


if __name__ == "__main__":
    main()
