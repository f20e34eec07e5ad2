"""Memory that attention takes while its sequence grows: the fused path and the explicit one.

    python benchmarks/attention_memory.py [--batch-size 4] [--dim 192] [--heads 3] [--device cpu]

One layer of self-attention makes one step, forward and backward, in float32. Each row is a process
of its own, which tells the most memory that it ever held above what it held before the step. The C
library gives every freed tensor back at once, so that the gaps of its heap are not counted. The
exponent is the slope of log memory against log tokens, by least squares.
"""

import argparse
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from vit.model.attention import (
    AttentionContext,
    SelfAttention,
    dot_product_attention,
    explicit_attention,
)

TOKENS = (196, 256, 576, 1024, 2304, 4096)
WAYS = {"fused": dot_product_attention, "explicit": explicit_attention}


def resident() -> float:
    """MiB that this process holds now, on Linux."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def step(way: str, tokens: int, args: argparse.Namespace) -> float:
    """MiB above the start that one step takes at its peak."""
    torch.manual_seed(0)
    layer = SelfAttention(args.dim, args.heads).to(args.device)
    # A first, tiny step loads the libraries' kernels and makes the parameters' gradients.
    for length in (8, tokens):
        x = torch.randn(args.batch_size, length, args.dim, device=args.device, requires_grad=True)
        before = resident()
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() / 2**20
        layer(x, AttentionContext(attention_fn=WAYS[way])).sum().backward()
    if x.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**20 - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before


def exponent(peaks: list[float]) -> float:
    """The p of memory ~ tokens^p, by least squares."""
    x, y = [math.log(count) for count in TOKENS], [math.log(peak) for peak in peaks]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def measure(way: str, tokens: int) -> float:
    """`step` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--way", way, "--tokens", str(tokens)],
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--way", choices=WAYS, help="one of them alone, in this process")
    parser.add_argument("--tokens", type=int, help="with --way: the length of the sequence")
    args = parser.parse_args()
    if args.way:
        print(step(args.way, args.tokens, args))
        return
    print(f"dim {args.dim}, {args.heads} heads, batch {args.batch_size}, float32, {args.device}")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| tokens | fused, MiB | explicit, MiB |\n|-|-|-|")
    peaks: dict[str, list[float]] = {way: [] for way in WAYS}
    for tokens in TOKENS:
        for way, found in peaks.items():
            found.append(measure(way, tokens))
        print(
            f"| {tokens:,} | {peaks['fused'][-1]:.1f} | {peaks['explicit'][-1]:.1f} |", flush=True
        )
    print(f"| exponent | {exponent(peaks['fused']):.2f} | {exponent(peaks['explicit']):.2f} |")


if __name__ == "__main__":
    main()
