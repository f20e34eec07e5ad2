"""What a ViT costs on a CPU by each path, beside timm in float32, and what int8 costs in accuracy.

    python benchmarks/cpu_inference.py speed [--batch-size 1 8] [--threads 1] [--rounds 15]
    python benchmarks/cpu_inference.py accuracy RUN TRAIN VAL [--samples 100]

Speed: ViT-S/16 of random weights at 224 px. Networks take turns within a round, so what else the
machine does meets all of them alike; a ratio is the median over rounds of timm's time by that of
the path in the same round. One thread is measured by the processor's time, several by the clock.
Graphs take bytes and normalise them, torch is given floats.

Accuracy: RUN on the images of VAL (folders of classes), quantised with images of TRAIN.
"""

import argparse
import importlib.metadata
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

import vit
from vit.data.image_io import read_image
from vit.export.onnx_graph import Part, decomposed_attention, to_onnx
from vit.export.quantization import quantize
from vit.exported import openvino_session
from vit.exported.onnx_session import OnnxSession
from vit.weights.saved_model import load_run

NAME = "vit_small_patch16_224"
Path_ = Callable[[], object]


class Answer(nn.Module):
    """Bytes (batch, height, width, 3) -> probabilities, as `vit export` has it."""

    def __init__(self, model: vit.VisionTransformer, normalise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.normalise = model, normalise

    def forward(self, images: Tensor) -> tuple[Tensor]:
        floats = self.normalise(images.permute(0, 3, 1, 2))
        encoded = self.model.encode(floats, attention_fn=decomposed_attention)
        return (self.model.head(self.model.pool(*encoded)).softmax(dim=1),)


def graph_of(
    model: vit.VisionTransformer, normalise: Callable[[Tensor], Tensor], size: tuple[int, int]
) -> bytes:
    """The float32 ONNX graph of what comes after the resize."""
    part = Part(
        name="classifier",
        module=Answer(model, normalise).eval(),
        inputs={"images": {0: "batch"}},
        outputs={"probabilities": {0: "batch"}},
        examples=[(torch.randint(256, (2, *size, 3)).to(torch.uint8),)],
    )
    return to_onnx(part, {"precision": "fp32"}).SerializeToString()


def of_torch(model: nn.Module, images: Tensor) -> Path_:
    def run() -> object:
        with torch.inference_mode():
            return model(images)

    return run


def paths(batch: int, threads: int) -> Iterator[tuple[str, Callable[[], Path_]]]:
    """Names, and what makes each path ready."""
    torch.manual_seed(0)
    model = vit.create_model(NAME).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    pixels = torch.randint(256, (batch, 224, 224, 3)).to(torch.uint8)

    def normalise(images: Tensor) -> Tensor:
        return images.float() / 127.5 - 1

    floats = normalise(pixels.permute(0, 3, 1, 2))
    random_images = list(np.random.default_rng(0).integers(0, 256, (16, 224, 224, 3), np.uint8))
    whole = graph_of(model, normalise, (224, 224))
    int8 = quantize(whole, random_images)
    dynamic = quantize(whole, [], dynamic=True)
    given = {"images": pixels.numpy()}

    def copy() -> vit.VisionTransformer:
        own = vit.create_model(NAME).eval()
        own.load_state_dict(model.state_dict())
        return own

    def autocast() -> Path_:
        run = of_torch(copy(), floats)

        def cast() -> object:
            with torch.autocast("cpu", torch.bfloat16):
                return run()

        return cast

    def torchao(compiled: bool) -> Path_:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        own = copy()
        quantize_(own, Int8DynamicActivationInt8WeightConfig())
        return of_torch(torch.compile(own) if compiled else own, floats)

    def of_session(session: OnnxSession | openvino_session.OpenVINOSession) -> Path_:
        return lambda: session(given)

    def of_onnxruntime(content: bytes) -> Path_:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        made = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return lambda: made.run(None, given)

    def of_openvino(content: bytes, precision: openvino_session.Precision = "fp32") -> Path_:
        return of_session(
            openvino_session.OpenVINOSession(content, threads=threads, precision=precision)
        )

    yield "timm, float32", lambda: of_torch(timm.create_model(NAME).eval(), floats)
    yield "vit, float32", lambda: of_torch(copy(), floats)
    yield "vit, bf16 weights", lambda: of_torch(copy().bfloat16(), floats.bfloat16())
    yield "vit, bf16 autocast", autocast
    yield "vit, float32, torch.compile", lambda: of_torch(torch.compile(copy()), floats)
    yield "vit, torchao int8", lambda: torchao(False)
    yield "vit, torchao int8, torch.compile", lambda: torchao(True)
    yield "onnxruntime, float32", lambda: of_onnxruntime(whole)
    yield "onnxruntime, int8 dynamic", lambda: of_onnxruntime(dynamic)
    yield "onnxruntime, int8", lambda: of_onnxruntime(int8)
    yield "OpenVINO, float32", lambda: of_openvino(whole)
    yield "OpenVINO, bf16", lambda: of_openvino(whole, "bf16")
    yield "OpenVINO, int8", lambda: of_openvino(int8)
    yield "OpenVINO, int8 and bf16", lambda: of_openvino(int8, "bf16")


def speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    print(f"{args.threads} thread(s), {args.rounds} rounds; {versions()}\n")
    print("| batch | path | ms an image | beside timm | best beside best |")
    print("|---|---|---|---|---|")
    for batch in args.batch_size:
        ready: dict[str, Path_] = {}
        for name, make in paths(batch, args.threads):
            if ready and args.only and not any(word in name for word in args.only):
                continue
            try:
                run = make()
                run()  # compiles
                run()
            except ImportError as error:
                print(f"| {batch} | {name} | {error.name} is not installed | | |")
                continue
            ready[name] = run
        taken: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(args.rounds):
            for name, run in ready.items():
                began = clock()
                run()
                taken[name].append(clock() - began)
        first = next(iter(taken.values()))
        for name, seconds in taken.items():
            ratio = statistics.median(a / b for a, b in zip(first, seconds, strict=True))
            each = 1000 * statistics.median(seconds) / batch
            best = min(first) / min(seconds)
            print(f"| {batch} | {name} | {each:.1f} | {ratio:.2f}x | {best:.2f}x |", flush=True)


def accuracy(args: argparse.Namespace) -> None:
    run = load_run(args.run)
    fit, size = run.preprocessing.resize_and_crop, run.preprocessing.image_size
    train = [path for name in run.classes for path in sorted(Path(args.train, name).iterdir())]
    random.Random(0).shuffle(train)
    calibration = [np.array(fit(read_image(str(path)))) for path in train[: args.samples]]
    labelled = [
        (path, label)
        for label, name in enumerate(run.classes)
        for path in sorted(Path(args.val, name).iterdir())
    ]
    images = np.stack([np.array(fit(read_image(str(path)))) for path, _ in labelled])
    labels = np.array([label for _, label in labelled])
    whole = graph_of(run.model, run.preprocessing.normalise, size)
    int8, dynamic = quantize(whole, calibration), quantize(whole, [], dynamic=True)

    def of_model(model: nn.Module, dtype: torch.dtype) -> np.ndarray:
        with torch.inference_mode():
            parts = [
                model.to(dtype)(run.preprocessing.normalise(part.permute(0, 3, 1, 2)).to(dtype))
                for part in torch.from_numpy(images).split(50)
            ]
        return torch.cat(parts).float().softmax(dim=1).numpy()

    def of(session: OnnxSession | openvino_session.OpenVINOSession) -> np.ndarray:
        parts = np.array_split(images, -(-len(images) // 50))
        return np.concatenate([session({"images": part})[0] for part in parts])

    wanted = of_model(run.model, torch.float32)
    found = {
        "torch, float32": wanted,
        "onnxruntime, float32": of(OnnxSession(whole)),
        "onnxruntime, int8 dynamic": of(OnnxSession(dynamic)),
        "onnxruntime, int8": of(OnnxSession(int8)),
        "OpenVINO, float32": of(openvino_session.OpenVINOSession(whole)),
        "OpenVINO, bf16": of(openvino_session.OpenVINOSession(whole, precision="bf16")),
        "OpenVINO, int8": of(openvino_session.OpenVINOSession(int8)),
        "torch, bf16 weights": of_model(run.model, torch.bfloat16),
    }
    print(f"{args.run}: {len(labels)} images, {args.samples} for calibration; {versions()}\n")
    print(
        "| path | top-1 | drop, points | same answer | mean, largest difference of a probability |"
    )
    print("|---|---|---|---|---|")
    best = (wanted.argmax(1) == labels).mean()
    for name, probabilities in found.items():
        top1 = (probabilities.argmax(1) == labels).mean()
        same = (probabilities.argmax(1) == wanted.argmax(1)).mean()
        apart = np.abs(probabilities - wanted).max(axis=1)
        print(
            f"| {name} | {top1:.2%} | {100 * (best - top1):+.2f} | {same:.2%} "
            f"| {apart.mean():.4f}, {apart.max():.4f} |"
        )


def versions() -> str:
    names = ("torch", "timm", "onnxruntime", "openvino")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    fast = commands.add_parser("speed")
    fast.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    fast.add_argument("--threads", type=int, default=1)
    fast.add_argument("--rounds", type=int, default=15)
    fast.add_argument("--only", nargs="+", help="words of the names of paths")
    fast.set_defaults(do=speed)
    right = commands.add_parser("accuracy")
    right.add_argument("run")
    right.add_argument("train")
    right.add_argument("val")
    right.add_argument("--samples", type=int, default=100)
    right.set_defaults(do=accuracy)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.do(args)


if __name__ == "__main__":
    main()
