"""Images of many sizes: packed in one row, one after the other, and in one row with a dense mask.

    python benchmarks/packing.py [--model vit_tiny_patch16_224] [--rounds 7] [--device cpu]

The ways take turns, so that whatever disturbs the machine disturbs all; each way's ratio to the
packed pass of the same round is taken first, and the median of the ratios after.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import vit
from vit.model.sequence_packing import group_by_size, pack, unpack
from vit.model.vision_transformer import VisionTransformer

# (height, width): about as many patches as 224 x 224, in different aspects
SIZES = (
    (224, 224), (160, 304), (304, 160), (192, 256), (256, 192), (112, 448), (208, 240), (176, 272),
)  # fmt: skip


def one_by_one(model: VisionTransformer, images: list[Tensor]) -> Tensor:
    return torch.cat([model(image[None]) for image in images])


def dense(model: VisionTransformer, images: list[Tensor]) -> list[Tensor]:
    """The row of `forward_packed` with a block-diagonal mask, up to the tokens."""
    embedded = [
        model.embed(torch.stack([images[i] for i in group])) for group in group_by_size(images)
    ]
    row, context = pack(embedded)
    lengths = [tokens.shape[1] for tokens, _ in embedded for _ in range(len(tokens))]
    mask = torch.block_diag(*(torch.ones(n, n, device=row.device) for n in lengths)).bool()

    def masked(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return unpack(model.forward_blocks(row, context._replace(attention_fn=masked))[0], embedded)


def seconds(way: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    way()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = vit.create_model(args.model).eval().to(args.device)
    images = [torch.randn(3, *size, device=args.device) for size in SIZES]
    ways: dict[str, Callable[[], object]] = {
        "packed": partial(model.forward_packed, images),
        "one by one": partial(one_by_one, model, images),
        "dense mask": partial(dense, model, images),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            found = seconds(way, args.device)
            if number:  # the first round warms up
                took[name].append(found)
    print(f"{args.model}, {len(SIZES)} images, {torch.get_num_threads()} threads, float32\n")
    print("| way | median, s | to packed |\n|-|-|-|")
    for name, times in took.items():
        ratios = [a / b for a, b in zip(times, took["packed"], strict=True)]
        print(f"| {name} | {statistics.median(times):.3f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
