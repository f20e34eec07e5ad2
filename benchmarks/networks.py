"""Networks beside those of the peers: forward passes, training steps, exported files, variants."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vit
from benchmarks.timing import Comparison, Run
from vit.config.inference_config import InferenceConfig
from vit.config.presets import count_flops, preset
from vit.config.setting_layers import make_config
from vit.data.dataset import Batch
from vit.data.preprocessing import Preprocessing
from vit.inference.torch_engine import TorchEngine
from vit.precision import Precision
from vit.process_resources import keep_freed_memory
from vit.training.distributed.devices import make_accelerator
from vit.training.setup import make_training
from vit.training.training_loop import train_one_step
from vit.weights.saved_model import LoadedRun

CLASSES = 1000
NEVER = 10**9  # steps, so that the learning rate stays as it is
# the plan's smallest networks (vit/training/plan_rules.py), with the plan's optimiser
PLANNED = {
    "pooling": "mean", "class_token": False, "position": "sinusoidal_2d", "stem": "conv",
    "optimizer": "muon", "lr": 1.85e-3, "fallback_lr": 4e-3, "weight_decay": 0.02,
    "dim": 128, "depth": 4, "num_heads": 4, "stem_depth": 4, "stem_width": 16,
}  # fmt: skip
TINY = {"image_size": 32, "patch_size": 8, "hidden_dim": 256, "stem_stride": 1}
SMALL: dict[str, dict[str, Any]] = {
    "32 px, patches of 8": {**PLANNED, **TINY},
    "64 px, patches of 16": {**PLANNED, "image_size": 64, "patch_size": 16},
}


def autocast(device: str, *, bf16: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16)


def timm_model(name: str, device: str, *, fused: bool = True, **settings: Any) -> nn.Module:
    """timm's network; with `fused` off, its attention by separate products."""
    import timm
    from timm.layers import set_fused_attn

    import vit.weights.formats.timm_conv_stem  # noqa: F401  registers vit_conv_stem

    set_fused_attn(fused)
    try:
        model: nn.Module = timm.create_model(name, **settings)
    finally:
        set_fused_attn(True)
    return model.to(device)


def peer_model(library: str, sizes: Mapping[str, int], device: str) -> nn.Module:
    """The network of a preset in another library, with random weights."""
    dim, side, patch = sizes["dim"], sizes["image_size"], sizes["patch_size"]
    depth, heads = sizes["depth"], sizes["num_heads"]
    model: nn.Module
    if library == "transformers":
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads,
            intermediate_size=4 * dim, image_size=side, patch_size=patch, num_labels=CLASSES,
        )  # fmt: skip
        model = ViTForImageClassification(config)
    elif library == "torchvision":
        from torchvision.models import VisionTransformer

        model = VisionTransformer(side, patch, depth, heads, dim, 4 * dim)
    else:
        import vit_pytorch

        model = vit_pytorch.ViT(
            image_size=side, patch_size=patch, num_classes=CLASSES, dim=dim, depth=depth,
            heads=heads, dim_head=dim // heads, mlp_dim=4 * dim,
        )  # fmt: skip
    return model.to(device)


PEERS = ("transformers", "torchvision", "vit-pytorch")


def passes(
    model: nn.Module, images: Tensor, device: str, *, bf16: bool = False, compiled: bool = False
) -> Run:
    """Forward passes of a network in evaluation mode."""
    model = model.eval()
    call = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def run() -> None:
        with autocast(device, bf16=bf16):
            call(images)

    return run


def predictions(
    name: str, images: Tensor, device: str, precision: Precision, *, compiled: bool = False
) -> Run:
    """As `vit predict` computes a batch: from bytes to probabilities."""
    keep_freed_memory()
    model = vit.create_model(name).to(device).eval()
    side = images.shape[-1]
    run = LoadedRun(
        model,
        tuple(map(str, range(model.num_classes))),
        Preprocessing(image_size=(side, side)),
        make_config({"data": "digits", "model": name}).model,
    )
    config = InferenceConfig(device=device, precision=precision, compile=compiled)
    engine = TorchEngine(run, config, print)
    return lambda: engine.compute([*images], precision)


def forward(options: argparse.Namespace) -> Iterator[Comparison]:
    """Forward passes of a ViT-S/16."""
    name, device = options.model or "vit_small_patch16_224", options.device
    sizes = preset(name)
    side = sizes["image_size"]
    for batch in options.batch_size or ((1, 8) if device == "cpu" else (128,)):
        floats = torch.randn(batch, 3, side, side, device=device)
        pixels = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8)

        def ours(precision: Precision, pixels: Tensor = pixels, compiled: bool = False) -> Run:
            return predictions(name, pixels, device, precision, compiled=compiled)

        def of_timm(floats: Tensor = floats, fused: bool = True, **how: bool) -> Run:
            return passes(timm_model(name, device, fused=fused), floats, device, **how)

        def of_peer(library: str, floats: Tensor = floats) -> Run:
            return passes(peer_model(library, sizes, device), floats, device)

        ways: dict[str, Callable[[], Run]] = {
            "timm, float32": of_timm,
            "timm, bf16": partial(of_timm, bf16=True),
            "timm, bf16, fused attention off": partial(of_timm, fused=False, bf16=True),
            **{f"{library}, float32": partial(of_peer, library) for library in PEERS},
            "vit, float32": partial(ours, "fp32"),
            "vit, bf16": partial(ours, "bf16"),
        }
        if options.compile:
            ways["timm, bf16, compiled"] = partial(of_timm, bf16=True, compiled=True)
            ways["vit, bf16, compiled"] = partial(ours, "bf16", compiled=True)
        yield Comparison(
            title=f"Forward, {name}, batch {batch}",
            ways=ways,
            count=batch,
            flops=float(batch * count_flops(sizes)),
            repeats=5,
            own_processes=True,
        )


def steps(
    model: nn.Module,
    images: Tensor,
    device: str,
    *,
    bf16: bool = False,
    muon: bool = False,
    compiled: bool = False,
) -> Run:
    """Training steps as in timm's train.py: forward, loss, backward, optimiser."""
    model = model.train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if muon:
        from timm.optim import create_optimizer_v2

        optimizer = create_optimizer_v2(model, opt="muon", lr=1e-4)
    labels = torch.arange(len(images), device=device) % 10
    call = torch.compile(model) if compiled else model

    def run() -> float | None:
        with autocast(device, bf16=bf16):
            found = call(images)
            loss = F.cross_entropy(getattr(found, "logits", found), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as each of them prints it
        return None

    return run


def our_steps(settings: Mapping[str, Any], images: Tensor, device: str) -> Run:
    """Training steps of `vit train`, from bytes to updated weights and average."""
    keep_freed_memory()
    batch, side = len(images), images.shape[-1]
    config = make_config(
        {
            "data": "digits",
            "batch_size": batch,
            "device": device,
            "image_size": side,
            "num_classes": CLASSES,
            **settings,
        }
    )
    run = make_training(config, make_accelerator(config.run), NEVER, epoch_steps=100)
    run.model.train()
    order = torch.arange(batch)
    if device.startswith("cuda"):
        images = images.pin_memory()  # as loaders do
    one = Batch(images, order % 10, order, order, [])

    def step() -> None:
        train_one_step(run, [one], 0)

    return step


def step(options: argparse.Namespace) -> Iterator[Comparison]:
    """Training steps of a ViT-Ti/16 with AdamW and with Muon."""
    name, device = options.model or "vit_tiny_patch16_224", options.device
    sizes = preset(name)
    side = sizes["image_size"]
    for batch in options.batch_size or ((16,) if device == "cpu" else (128,)):
        floats = torch.randn(batch, 3, side, side, device=device)
        pixels = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8)

        def of_timm(floats: Tensor = floats, fused: bool = True, **how: bool) -> Run:
            return steps(timm_model(name, device, fused=fused), floats, device, **how)

        def of_peer(library: str, floats: Tensor = floats) -> Run:
            return steps(peer_model(library, sizes, device), floats, device, bf16=True)

        def ours(pixels: Tensor = pixels, **settings: Any) -> Run:
            return our_steps({**sizes, **settings}, pixels, device)

        ways: dict[str, Callable[[], Run]] = {
            "timm, float32": of_timm,
            "timm, bf16": partial(of_timm, bf16=True),
            "timm, bf16, fused attention off": partial(of_timm, fused=False, bf16=True),
            "timm, float32, Muon": partial(of_timm, muon=True),
            "timm, bf16, Muon": partial(of_timm, bf16=True, muon=True),
            "timm, bf16, fused attention off, Muon": partial(
                of_timm, fused=False, bf16=True, muon=True
            ),
            **{f"{library}, bf16": partial(of_peer, library) for library in PEERS},
            "vit, default": ours,
            "vit, float32": partial(ours, precision="fp32"),
            "vit, bf16": partial(ours, precision="bf16"),
            "vit, default, Muon": partial(ours, optimizer="muon"),
        }
        if options.compile:
            ways |= {
                "timm, bf16, compiled": partial(of_timm, bf16=True, compiled=True),
                "vit, bf16, compiled": partial(ours, precision="bf16", compile=True),
            }
        yield Comparison(
            title=f"Training step, {name}, batch {batch}",
            ways=ways,
            count=batch,
            flops=3.0 * batch * count_flops(sizes),
            own_processes=True,
        )


def small(options: argparse.Namespace) -> Iterator[Comparison]:
    """Training steps of the plan's smallest networks."""
    device = options.device
    for title, settings in SMALL.items():
        for batch in options.batch_size or (64,):
            side = settings["image_size"]
            pixels = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8)
            floats = torch.randn(batch, 3, side, side, device=device)

            def of_timm(
                settings: Mapping[str, Any] = settings, floats: Tensor = floats,
                fused: bool = True, **how: bool,
            ) -> Run:  # fmt: skip
                ratio = settings.get("hidden_dim", 4 * settings["dim"]) / settings["dim"]
                model = timm_model(
                    "vit_conv_stem", device, fused=fused,
                    img_size=settings["image_size"], patch_size=settings["patch_size"],
                    embed_dim=settings["dim"], depth=settings["depth"], mlp_ratio=ratio,
                    num_heads=settings["num_heads"], stem_depth=settings["stem_depth"],
                    stem_width=settings["stem_width"], global_pool="avg", class_token=False,
                    stem_stride=settings.get("stem_stride", 2),
                )  # fmt: skip
                return steps(model, floats, device, **how)

            def ours(
                settings: Mapping[str, Any] = settings, pixels: Tensor = pixels, **changes: Any
            ) -> Run:
                return our_steps({**settings, **changes}, pixels, device)

            yield Comparison(
                title=f"Training step, {title}, batch {batch}",
                ways={
                    "timm, float32, AdamW": of_timm,
                    "timm, bf16, AdamW": partial(of_timm, bf16=True),
                    "timm, bf16, fused attention off, AdamW": partial(
                        of_timm, fused=False, bf16=True
                    ),
                    "timm, float32, Muon": partial(of_timm, muon=True),
                    "timm, bf16, Muon": partial(of_timm, bf16=True, muon=True),
                    "timm, bf16, fused attention off, Muon": partial(
                        of_timm, fused=False, bf16=True, muon=True
                    ),
                    "vit, float32, AdamW": partial(
                        ours, precision="fp32", optimizer="adamw", fallback_lr=None
                    ),
                    "vit, bf16, AdamW": partial(
                        ours, precision="bf16", optimizer="adamw", fallback_lr=None
                    ),
                    "vit, float32, Muon": partial(ours, precision="fp32"),
                    "vit, bf16, Muon": partial(ours, precision="bf16"),
                    "vit, bf16, Muon, ema": partial(ours, precision="bf16", ema=0.99),
                },
                count=batch,
                repeats=10,
                own_processes=True,
            )


class Graph(nn.Module):
    """Bytes (batch, height, width, 3) -> probabilities, as `vit export` has it."""

    def __init__(self, model: vit.VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor]:
        from vit.export.onnx_tracing import decomposed_attention

        floats = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        tokens, context = self.model.encode(floats, attention_fn=decomposed_attention)
        return (self.model.forward_head(tokens, context).softmax(dim=1),)


def exported(options: argparse.Namespace) -> Iterator[Comparison]:
    """Exported files on a CPU, without the resize, beside timm in float32."""
    from vit.export.export_request import OPSET
    from vit.export.onnx_tracing import Part, trace_module
    from vit.export.quantization import quantize
    from vit.exported.onnx_session import OnnxSession

    name = options.model or "vit_small_patch16_224"
    side, threads = preset(name)["image_size"], torch.get_num_threads()
    network = vit.create_model(name).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    part = Part(
        name="classifier", module=Graph(network).eval(), inputs={"images": {0: "batch"}},
        outputs={"probabilities": {0: "batch"}},
        examples=[(torch.randint(256, (2, side, side, 3)).to(torch.uint8),)],
    )  # fmt: skip
    whole = trace_module(part, OPSET).SerializeToString()
    noise = list(np.random.default_rng(0).integers(0, 256, (16, side, side, 3), np.uint8))
    int8, static = quantize(whole, noise), quantize(whole, noise, static=True)
    for batch in options.batch_size or (1, 8):
        given = {"images": np.random.default_rng(1).integers(0, 256, (batch, side, side, 3))}
        given = {"images": given["images"].astype(np.uint8)}
        floats = torch.randn(batch, 3, side, side)

        def of_timm(floats: Tensor = floats) -> Run:
            return passes(timm_model(name, "cpu"), floats, "cpu")

        def onnx(content: bytes, given: dict[str, Any] = given) -> Run:
            session = OnnxSession(content)
            return lambda: session(given)

        def openvino(content: bytes, given: dict[str, Any] = given) -> Run:
            from vit.exported.openvino_session import OpenVINOSession

            session = OpenVINOSession(content, threads=threads)
            return lambda: session(given)

        yield Comparison(
            title=f"Exported {name}, batch {batch}",
            ways={
                "timm, float32": of_timm,
                "onnxruntime, float32": partial(onnx, whole),
                "onnxruntime, int8": partial(onnx, int8),
                "onnxruntime, int8 static": partial(onnx, static),
                "OpenVINO, float32": partial(openvino, whole),
                "OpenVINO, int8": partial(openvino, int8),
                "OpenVINO, int8 static": partial(openvino, static),
            },
            count=batch,
        )


def variants(options: argparse.Namespace) -> Iterator[Comparison]:
    """Options of the network beside the plain one: training steps, and forward passes."""
    device, batch = options.device, (options.batch_size or [8])[0]
    name = options.model or "vit_tiny_patch16_224"
    sizes = preset(name)
    pixels = torch.randint(256, (batch, 3, 224, 224), dtype=torch.uint8)
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "experts, 8 in every second block": {"feedforward": "moe"},
        "rotary positions": {"position": "rotary"},
        "relative positions": {"position": "relative"},
        "RMSNorm": {"norm": "rmsnorm"},
        "SwiGLU, 2/3 wide": {"feedforward": "swiglu", "hidden_dim": 512},
        "one key and value head": {"num_kv_heads": 1},
        "a quarter of the patches dropped": {"patch_dropout": 0.25},
        "13 tokens merged in each block": {"merge_tokens": 13},
        "activations recomputed": {"checkpoint_activations": True},
    }
    yield Comparison(
        title=f"Training step of {name}, batch {batch}, by option",
        ways={
            way: partial(our_steps, {**sizes, **changed}, pixels, device)
            for way, changed in changes.items()
        },
        count=batch,
    )
    aspects = ((224, 224), (160, 304), (304, 160), (192, 256), (256, 192), (112, 448), (208, 240))
    images = [torch.randn(3, *size, device=device) for size in aspects]

    def packed() -> Run:
        model = vit.create_model(name).to(device).eval()
        return torch.inference_mode()(lambda: model.forward_packed(images))

    def one_by_one() -> Run:
        model = vit.create_model(name).to(device).eval()
        return torch.inference_mode()(lambda: [model(image[None]) for image in images])

    yield Comparison(
        title=f"Images of {len(aspects)} aspects through {name}",
        ways={"one by one": one_by_one, "packed in one sequence": packed},
        count=len(images),
    )


def attention(options: argparse.Namespace) -> Iterator[Comparison]:
    """Forward and backward of one attention layer as its sequence grows; use --memory."""
    from vit.config import ModelConfig
    from vit.model.attention import (
        AttentionContext,
        SelfAttention,
        dot_product_attention,
        explicit_attention,
    )

    batch, device = (options.batch_size or [4])[0], options.device

    def made(kind: Any, tokens: int, dtype: torch.dtype) -> Run:
        layer = SelfAttention(ModelConfig(dim=192, num_heads=3)).to(device)
        x = torch.randn(batch, tokens, 192, device=device, requires_grad=True)
        context = AttentionContext(attention_fn=kind)

        def run() -> None:
            with autocast(device, bf16=dtype == torch.bfloat16):
                found = layer(x, context)
            found.float().sum().backward()

        return run

    def fused(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    for tokens in (64, 196, 576, 1024, 2304):
        for dtype in (torch.float32, torch.bfloat16):
            kinds = {"fused": fused, "explicit": explicit_attention, "vit": dot_product_attention}
            yield Comparison(
                title=f"Attention, {tokens:,} tokens, {str(dtype).removeprefix('torch.')}",
                ways={way: partial(made, kind, tokens, dtype) for way, kind in kinds.items()},
                count=batch,
            )
