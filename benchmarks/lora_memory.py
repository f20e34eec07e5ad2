"""Memory that training takes: all parameters, LoRA, or the head alone.

    python benchmarks/lora_memory.py [--model vit_small_patch16_224] [--batch-size 16] [--rank 8]

Each way trains in a process of its own, with AdamW on random images, and tells the most memory
that the process ever held, so that nothing of one way is counted for another. `start` is a process
that has loaded all libraries and built the network, and trains nothing. The C library gives every
freed tensor back to the system at once (as it does not by default), so the peak is of what was
needed, without the gaps in its heap; steps are a little slower for it.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

import vit
from vit.training.finetune.freezing import count_parameters, freeze_backbone
from vit.training.finetune.lora import add_lora

WAYS = ("start", "full", "lora", "lora all", "head")
TARGETS = {"lora": ["qkv", "proj"], "lora all": ["qkv", "proj", "fc1", "fc2"]}


def train(way: str, args: argparse.Namespace) -> str:
    """Make a few steps; answers with a line of the table."""
    torch.manual_seed(0)
    network = vit.create_model(args.model, num_classes=10)
    if way in TARGETS:
        add_lora(network, rank=args.rank, alpha=2 * args.rank, targets=TARGETS[way])
    elif way == "head":
        freeze_backbone(network)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-4)
    images, labels = torch.randn(args.batch_size, 3, 224, 224), torch.arange(args.batch_size) % 10
    seconds = []
    for _ in range(0 if way == "start" else args.steps):
        began = time.perf_counter()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    # kilobytes on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    moments = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
    )
    learn, _ = count_parameters(network)
    took = f"{statistics.median(seconds):.2f}" if seconds else "-"
    return f"| {way} | {learn / 1e6:.2f} M | {moments / 2**20:.0f} | {peak:.0f} | {took} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="one of them alone, in this process")
    args = parser.parse_args()
    if args.way:
        print(train(args.way, args))
        return
    print(f"{args.model}, batch {args.batch_size}, rank {args.rank}, {args.steps} steps, AdamW")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| learns | parameters | optimiser, MiB | peak, MiB | seconds a step |\n|-|-|-|-|-|")
    for way in WAYS:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--way", way],
            check=True,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            stdout=subprocess.PIPE,
            text=True,
        )
        print(done.stdout, end="", flush=True)


if __name__ == "__main__":
    main()
