"""A tiny saved model and tiny images, for all tests that predict or evaluate."""

import contextlib
import dataclasses
import gc
import os
import shutil
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.processor import sitecustomize as processor
from vit import precision
from vit.config import Config, ModelConfig, TrainingConfig
from vit.data.preprocessing import Preprocessing
from vit.inference.calibrate import calibrate
from vit.model.build import build_classifier
from vit.model.feature_distance import DistanceFeatures, FeatureDistance, encode_with_features
from vit.process_resources import usable_cores
from vit.score_calibration import COVERAGES, ScoreCalibration
from vit.weights.saved_model import (
    CALIBRATION,
    load_run,
    save_model,
    store_calibration,
    update_run,
)

# Tensors are tiny here: a second thread waits more than it works, six times as long where cores are
# shared. Commands that tests start read the variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Collecting makes millions of objects that stay, which the collector would pass over many times.
gc.disable()
# Else each process that tests start compiles the package's sources anew, for a second and more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

PROCESSOR = Path(processor.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--auto-precision",
        choices=["fp32", "bf16"],
        help="pretend a CPU on which `--precision auto` is this; else the machine decides",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Replace the processor in this process, and in all that it starts; hide GPUs from most tests.

    They compare numbers to the last bit, which a GPU computes in another order each time.
    """
    marked = config.getoption("markexpr")
    if "gpu" in marked.split() and marked != "gpu":
        raise pytest.UsageError(f"-m '{marked}': tests that need a GPU run alone: -m gpu")
    if marked != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    kind = config.getoption("--auto-precision")
    os.environ[processor.KIND] = kind or ""
    places = [str(PROCESSOR), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    processor.replace_processor(precision)
    if kind and precision.resolve_precision("auto", "cpu") != kind:
        raise pytest.UsageError(f"--auto-precision {kind}: this build of torch has no oneDNN")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` unless they alone are run, where torch sees a GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU: `make gpu` runs this where there is one")


@pytest.fixture
def gpu_wait_is_an_error() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which an operation that waits for the GPU raises."""

    @contextlib.contextmanager
    def raising() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch does not see all of them
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return raising


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests: a look at all of them takes 1.5 s."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than cores, since tests wait for servers, signals and other processes."""
    return usable_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Neighbouring tests to one worker, whose module and session fixtures they share."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_report_header() -> str:
    kind = "pretended" if os.environ[processor.KIND] else "of this machine"
    return f"auto precision on the CPU: {precision.resolve_precision('auto', 'cpu')}, {kind}"


@pytest.fixture(scope="session")
def processor_asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that is there once this process, or one that it started, looks at the processor."""
    path = tmp_path_factory.mktemp("processor") / "asked"
    os.environ[processor.ASKED] = str(path)
    return path


@pytest.fixture(autouse=True)
def processor_marked(request: pytest.FixtureRequest, processor_asked: Path) -> Iterator[None]:
    """Fail a test whose results may depend on the processor, unless it runs with both kinds."""
    yield
    asked = processor_asked.exists()
    processor_asked.unlink(missing_ok=True)
    if asked and request.node.get_closest_marker("auto_precision") is None:
        pytest.fail(
            "the precision `auto` is resolved: name a precision where the test is about something "
            "else, or mark it auto_precision, so that CI runs it with fp32 and with bf16"
        )


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A speed of this machine, which each plan measures for seconds."""
    from vit.training.plan_rules import TimedNetwork

    monkeypatch.setattr("vit.training.plan.measure_speed", lambda *_: TimedNetwork(1.0, 80e9))


@pytest.fixture
def flops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of a network without its memory, for which a step is traced."""
    monkeypatch.setattr("vit.evaluation.model_summary.step_memory", lambda *_: (0, 0))


CLASSES = ("apple", "class10", "class2")
IMAGES = 9  # of each class
Change = Callable[[nn.Linear], None]


def save_untrained(folder: Path, classes: Iterable[str], task: str, change: Change) -> Path:
    """A run folder of a network with random weights; `change` initialises its head."""
    names = tuple(classes)
    settings = ModelConfig(
        image_size=16, patch_size=8, dim=32, depth=2, num_heads=2, num_classes=len(names)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_classifier(settings).eval()
        change(model.head)
    folder.mkdir()
    save_model(
        folder,
        model,
        config=Config(model=settings, training=TrainingConfig(task=task)),
        classes=names,
        preprocessing=Preprocessing(image_size=(16, 16)),
    )
    return folder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of an untrained network that answers differently for different images."""

    def change(head: nn.Linear) -> None:
        nn.init.normal_(head.weight, std=3.0)

    return save_untrained(tmp_path_factory.mktemp("runs") / "tiny", CLASSES, "classify", change)


@pytest.fixture(scope="session")
def traced_once() -> Iterator[None]:
    """From now on the same network is exported from one graph: torch takes seconds for each."""
    import onnx

    from vit.export import export_onnx, onnx_tracing

    graphs: dict[tuple[object, ...], bytes] = {}

    def trace(part: onnx_tracing.Part, opset: int) -> onnx.ModelProto:
        with torch.no_grad():
            answer, *_ = part.module(*part.examples[0])
        key = (answer.numpy().tobytes(), opset, *part.outputs)
        if key not in graphs:
            graphs[key] = onnx_tracing.trace_module(part, opset).SerializeToString()
        return onnx.load_from_string(graphs[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_onnx, "trace_module", trace)
        yield


@pytest.fixture(scope="session")
def calibrated_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network with a calibration; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "calibrated"
    shutil.copytree(tiny_run, folder)
    calibration = ScoreCalibration(
        temperature=3.0,
        images=99,
        exponent=1.2,
        target_precision=0.9,
        threshold=0.7,
        answered=0.5,
        set_levels=tuple(coverage - 0.1 for coverage in COVERAGES),
    )
    update_run(folder, {CALIBRATION: calibration.to_dict()})
    return folder


@pytest.fixture(scope="session")
def distance_run(calibrated_run: Path, tiny_data: Path, tmp_path_factory) -> Path:
    """The same with the distance from half of the images of `tiny_data`; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "distance"
    shutil.copytree(calibrated_run, folder)
    run = load_run(folder)
    assert run.calibration is not None
    paths = sorted((tiny_data / "val").rglob("*.*"))
    images = [run.preprocessing(Image.open(path).convert("RGB")) for path in paths]
    with torch.inference_mode():
        batch = run.preprocessing.normalise(torch.stack(images))
        features = encode_with_features(run.model, batch)[2]
        distance = FeatureDistance.fit(DistanceFeatures(*(part[::2] for part in features)))
        distance.standardise(distance.parts(features))
        farthest = float(distance(features).sort().values[-6:-4].mean())
    calibration = dataclasses.replace(run.calibration, farthest=farthest)
    store_calibration(folder, calibration, distance)
    return folder


@pytest.fixture
def twenty_images_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations of 20 images, and distances that reject one in ten of them."""
    for module in ("evaluation.temperature_scaling", "inference.calibrate"):
        monkeypatch.setattr(f"vit.{module}.MIN_IMAGES", 20)
    monkeypatch.setattr("vit.evaluation.fit_calibration.FALSE_ALARMS", 0.1)


@pytest.fixture
def reference_run(
    distance_run: Path, tiny_data: Path, tmp_path: Path, twenty_images_calibrate: None
) -> Path:
    """A copy of `distance_run` that `vit calibrate` measured on `tiny_data`."""
    run = Path(shutil.copytree(distance_run, tmp_path / "run"))
    calibrate(run, str(tiny_data), device="cpu", precision="fp32")
    return run


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `val` with nine noisy images of each class; not to be written to."""
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in CLASSES:
        (root / "val" / name).mkdir(parents=True)
        for number in range(IMAGES):
            colour = random.integers(0, 255, size=3)
            pixels = np.clip(colour + random.integers(-90, 90, size=(20, 24, 3)), 0, 255)
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(root / "val" / name / f"{number}.{'jpg' if number % 2 else 'png'}")
    return root


@pytest.fixture
def bad_images(tmp_path: Path) -> list[str]:
    """Every kind of file that is called an image and is none, by path."""
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("this is no image")
    noise = np.random.default_rng(0).integers(0, 255, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "cut.jpg")
    whole = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "bomb.png").write_bytes(png_bomb(30_000))
    (folder / "folder.jpg").mkdir()
    names = ["empty.jpg", "text.jpg", "cut.jpg", "bomb.png", "folder.jpg", "missing.jpg"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.jpg")
        names.append("pipe.jpg")
    return [str(folder / name) for name in names]


@cache
def png_bomb(side: int) -> bytes:
    """A small, valid PNG of side x side black pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    packer = zlib.compressobj(1)
    row = bytes(1 + (side + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


COLOURS = {"blue": (30, 40, 200), "green": (40, 190, 50), "red": (200, 40, 30)}
SEVERAL = 32  # images, of 0 to 3 colours each


@pytest.fixture(scope="session")
def several_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """list.csv of images with bars of any of three colours, or of none; not to be written to."""
    root, random = tmp_path_factory.mktemp("multilabel"), np.random.default_rng(0)
    rows = ["image,labels"]
    for number in range(SEVERAL):
        pixels = np.full((18, 18, 3), 120)
        names = [name for place, name in enumerate(COLOURS) if number >> place & 1]
        for place, name in enumerate(COLOURS):
            if name in names:
                pixels[:, 6 * place : 6 * place + 6] = COLOURS[name]
        # on the bars too: the scores of equal images tie, or differ by their last bit
        pixels += random.integers(-20, 20, size=(18, 18, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number:02d}.png")
        rows.append(f"{number:02d}.png,{'|'.join(names)}")
    (root / "list.csv").write_text("\n".join(rows) + "\n")
    return root / "list.csv"


@pytest.fixture(scope="session")
def several_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of an untrained network whose images may have several classes."""

    def change(head: nn.Linear) -> None:
        nn.init.normal_(head.weight, std=0.2)
        nn.init.constant_(head.bias, 0.5)

    folder = tmp_path_factory.mktemp("runs") / "multilabel"
    save_untrained(folder, COLOURS, "multilabel", change)
    update_run(folder, {"thresholds": [0.3, 0.5, 0.7]})
    return folder
