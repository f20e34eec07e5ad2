"""What token merging costs in accuracy and gains in speed, on a trained network.

    python benchmarks/merging.py RUN DATA [--merge 0 2 4 8] [--rounds 15] [--batch-size 16]
    python benchmarks/merging.py --preset vit_small_patch16_224 [--merge 0 8 13]     (speed alone)

On one thread of the CPU, by the processor's time. Networks take turns within a round, so what else
the machine does meets all of them alike; a ratio is the median over rounds of a network's speed by
that of the first in the same round.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

import vit


def network(args: argparse.Namespace, count: int) -> vit.VisionTransformer:
    """The weights of the run, or random ones, in a network that merges `count` tokens a block."""
    if args.preset is not None:
        return vit.create_model(args.preset, merge_tokens=count).eval()
    return vit.from_pretrained(args.run, merge_tokens=count, notify=None)


@torch.inference_mode()
def seconds(model: vit.VisionTransformer, images: Tensor) -> float:
    """Of the processor, for one pass."""
    began = time.process_time()
    model(images)
    return time.process_time() - began


@torch.inference_mode()
def tokens_left(model: vit.VisionTransformer, images: Tensor) -> int:
    """Tokens of an image after the last block."""
    return model.forward_features(images[:1]).shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?")
    parser.add_argument("data", nargs="?")
    parser.add_argument("--split", default="val")
    parser.add_argument("--preset")
    parser.add_argument("--merge", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {count: network(args, count) for count in args.merge}
    first = args.merge[0]
    sides = (224, 224)  # those of the presets
    if args.preset is None:
        sides = vit.Predictor(args.run).preprocessing.image_size
    images = torch.randn(args.batch_size, 3, *sides)
    taken: dict[int, list[float]] = {count: [] for count in models}
    for model in models.values():
        seconds(model, images)  # warm
    for _ in range(args.rounds):
        for count, model in models.items():
            taken[count].append(seconds(model, images))
    print(f"one thread, torch {torch.__version__}, batch {len(images)}, {sides[0]} px\n")
    print("| r | tokens after the last block | images/s | speed | top-1 | 95 % interval |")
    print("|---|---|---|---|---|---|")
    for count, model in models.items():
        ratios = [a / b for a, b in zip(taken[first], taken[count], strict=True)]
        top1 = interval = "-"
        if args.data is not None:
            scores = vit.evaluate(
                args.run, args.data, split=args.split, merge_tokens=count, precision="fp32"
            )
            low, high = scores["top1_interval"]
            top1, interval = f"{scores['top1']:.2%}", f"{low:.1%} to {high:.1%}"
        rate = len(images) / statistics.median(taken[count])
        left = tokens_left(model, images)
        print(
            f"| {count} | {left} | {rate:.0f} | {statistics.median(ratios):.2f}x | {top1} "
            f"| {interval} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
