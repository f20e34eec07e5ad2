"""Does a map know what matters? Its deletion score beside those of other maps and of chance.

    python benchmarks/deletion.py RUN PICTURES [--count 100] [--seed 0]

One line a map: the mean score of the best class (less is better) over a sample of the images,
and for how many of them it is better than all random orders. `another image's` is the relevance
of the image before, of its own best class: what it gains is not about the image.
"""

import argparse
import random
import statistics

import torch
from torch import Tensor

from vit.data.sources.open_dataset import list_images
from vit.inference.attribution import Deletion, deletions, relevance
from vit.inference.predictor import Predictor, ranked_classes
from vit.model.attention import record_attention

BEGINNING = "another image's"


def rolled(predictor: Predictor, image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Rollout where the pooling reads, (rows, cols)."""
    model = predictor.model
    with torch.inference_mode():
        seen = record_attention(model, image[None])
        rows = torch.eye(seen.maps[0].shape[-1])[None]
        for weights in seen.maps:  # rollout, arXiv:2005.00928: half of a token comes by the skip
            rows = (rows + weights.mean(dim=1) @ rows) / 2
        read: Tensor = model.attn_pool(rows, seen.context)
    parts = read.reshape(1, -1, rows.shape[-1])[..., model.num_prefix_tokens :]
    return parts.mean(dim=1).view(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("images")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    predictor = Predictor(args.run, precision="fp32")
    paths = list_images([args.images])
    paths = random.Random(args.seed).sample(paths, min(args.count, len(paths)))
    found: dict[str, list[Deletion]] = {}
    before: Tensor | None = None
    number = 0
    for answers in predictor.batches(paths):
        for answer in answers:
            if answer.probabilities is None or answer.pixels is None:
                continue
            number += 1
            image = predictor.preprocessing.normalise(answer.pixels.to(predictor.device))
            best, second = ranked_classes(answer.probabilities)[:2].tolist()
            ours, other = relevance(predictor.model, torch.stack([image] * 2), [best, second])
            maps = {
                "relevance": ours,
                "relevance of the second class": other,
                "rollout": rolled(predictor, image, ours.shape),
                BEGINNING: ours if before is None else before,
            }
            before = ours
            tested = deletions(
                predictor.model,
                image,
                torch.stack([*maps.values()]),
                [best] * len(maps),
                batch_size=predictor.batch_size,
                seed=number,
            )
            for name, one in zip(maps, tested, strict=True):
                if name != BEGINNING or number > 1:
                    found.setdefault(name, []).append(one)
    print(f"{args.run}, {number} images of {args.images}, best class, {ours.numel()} patches;")
    print("| order | mean deletion score | better than 9 random orders | below rollout |")
    print("|---|---|---|---|")
    first = found["relevance"]
    print(f"| random | {statistics.mean(one.chance for one in first):.3f} | by chance 1 in 10 | |")
    for name, multilabel in found.items():
        mean = statistics.mean(one.curve.score for one in multilabel)
        better = f"{sum(one.better for one in multilabel)} of {len(multilabel)}"
        pairs = zip(multilabel, found["rollout"][-len(multilabel) :], strict=True)
        below = sum(one.curve.score < other.curve.score for one, other in pairs)
        print(f"| {name} | {mean:.3f} | {better} | {below} of {len(multilabel)} |")
    reverse = statistics.mean(one.reverse.score for one in first)
    print(f"| relevance, reversed | {reverse:.3f} | | |")


if __name__ == "__main__":
    main()
