"""What a mixture of experts costs: a training step beside that of a dense network of equal FLOPs.

    python benchmarks/moe.py [--pairs 10] [--batch-size 16] [--device cpu] [--autocast] [--compile]

ViT-Ti/16 at 224 pixels with 8 experts in every second block, of which each token visits 2, and the
same network whose every second block has an MLP twice as wide: per token that is as many products.
A step is forward, both losses of the router, backward and AdamW. The two take turns, so that a busy
machine disturbs both alike; each pair gives one ratio. `forward, backward` leaves out AdamW,
which has 8 times the weights of an MLP to move. `--processor` counts the processor's seconds in
place of the clock's: on a machine that others load too, the work without the waiting for turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vit
from vit.model.mlp import MLP
from vit.model.moe import balance_loss, collect_routing, z_loss

DIM, WIDER = 192, 2 * 4 * 192
MODEL = {"name": "vit_tiny_patch16_224", "num_classes": 1000}


def networks(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The two networks, by name."""
    torch.manual_seed(0)
    settings = {"num_experts": args.experts, "top_k": 2, "capacity_factor": args.capacity}
    experts = vit.create_model(**MODEL, feedforward="moe", **settings)
    dense = vit.create_model(**MODEL)
    for number in range(1, len(dense.blocks), 2):
        dense.blocks[number].mlp = MLP(DIM, WIDER)
    return {"experts": experts, "dense": dense}


def router_losses(network: nn.Module) -> Tensor:
    """The usual sum of both losses over all blocks with experts; 0 where there are none."""
    total = torch.zeros((), device=next(network.parameters()).device)
    for routing in collect_routing(network):
        counts, probabilities, tokens, z, *_ = routing
        total = total + 0.01 * balance_loss(counts, probabilities, tokens, 2)
        total = total + 0.001 * z_loss(z, tokens)
    return total


def stepper(network: nn.Module, args: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """A function that makes one step, and tells its seconds without and with AdamW."""
    device = torch.device(args.device)
    network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = time.process_time if args.processor else time.perf_counter
    if args.compile:
        network.compile(fullgraph=True)

    def step() -> tuple[float, float]:
        wait()
        began = clock()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            logits = network(images)
        (F.cross_entropy(logits.float(), labels) + router_losses(network)).backward()
        wait()
        computed = clock() - began
        optimizer.step()
        optimizer.zero_grad()
        wait()
        return computed, clock() - began

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processor", action="store_true", help="count the processor's seconds")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--capacity", type=float, default=0.0)
    args = parser.parse_args()
    both = networks(args)
    for name, network in both.items():
        print(f"{name}: {sum(p.numel() for p in network.parameters()) / 1e6:.1f} M parameters")
    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    steps = {name: stepper(network, args) for name, network in both.items()}
    for step in steps.values():
        for _ in range(2):
            step()
    ratios = []
    for pair in range(args.pairs):
        order = ("experts", "dense") if pair % 2 else ("dense", "experts")
        found = {name: steps[name]() for name in order}
        (computed, whole), (computed_dense, whole_dense) = found["experts"], found["dense"]
        ratios.append((computed / computed_dense, whole / whole_dense))
        print(
            f"experts {whole * 1e3:.1f} ms  dense {whole_dense * 1e3:.1f} ms  {ratios[-1][1]:.3f}"
        )
    without, ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
    counts = [routing.counts for routing in collect_routing(both["experts"])]
    fullest = max((load.max() * len(load) / load.sum()).item() for load in counts)
    print(f"the fullest expert has {fullest:.2f} times its share")
    print(f"median ratio {ratio:.3f} of {args.pairs} pairs; forward, backward {without:.3f}")


if __name__ == "__main__":
    main()
