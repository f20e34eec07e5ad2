"""Sample images of an export: for calibration, and for comparing the file with its run.

Validation images are used where they are known; otherwise scenes are drawn.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from vit.config.stored_config import run_folder_of, stored_config
from vit.data.dataset_types import Sample
from vit.data.intensity_range import evenly_spaced
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import list_images, open_eval_split, read_source
from vit.errors import BadImage, ConfigError, DataError, VitError
from vit.export.export_request import ExportJob
from vit.exported.onnx_session import Array
from vit.inference.evaluation_data import evaluated_spec, load_samples
from vit.tasks.task import task_of_run
from vit.text import Notify, printable
from vit.weights.saved_model import LoadedRun

SAMPLES = 200
"""Calibration images by default."""


class SampleImages(Sequence[Array]):
    """Images that are read on access, each as an exported graph takes it."""

    def __init__(self, paths: Sequence[str], preprocessing: Preprocessing) -> None:
        self.paths, self.preprocessing = paths, preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        image = self.preprocessing.read(self.paths[index])
        return self.preprocessing.to_graph_input(image)


def validation_samples(job: ExportJob) -> tuple[Sample, ...]:
    """The images of `options.measured_on` that `vit evaluate` would use; none without it."""
    data = job.options.measured_on
    if data is None:
        return ()
    spec = DatasetSpec(data, split="val")
    task = task_of_run(job.run)
    return load_samples(task, job.source, spec, job.run.classes, job.notify)


def calibration_images(job: ExportJob, validation: Sequence[Sample]) -> SampleImages:
    """Calibration images, evenly spaced over the training images of the data.

    Of data that are not divided, with nothing else to measure the accuracy on, half of the images
    at most, which are then not measured on. Images that cannot be decoded are noted, and others
    chosen.
    """
    options, preprocessing = job.options, job.run.preprocessing
    if options.calibration is None:
        return SampleImages([], preprocessing)
    excluded = {sample.path for sample in validation}
    everything = _training_paths(job, options.calibration)
    paths = [path for path in everything if path not in excluded]
    if not paths and options.validation is None:
        count = min(options.samples or SAMPLES, len(everything) // 2)
        paths = evenly_spaced(everything, count)
    while paths and len(paths) >= (options.samples or 0):
        count = min(options.samples or SAMPLES, len(paths))
        indices = np.linspace(0, len(paths) - 1, count).round().astype(int)
        chosen = [paths[index] for index in indices]
        undecodable = {path for path in chosen if not _can_be_decoded(path, job)}
        if not undecodable:
            return SampleImages(chosen, preprocessing)
        paths = [path for path in paths if path not in undecodable]
    raise DataError(
        f"{options.calibration}: {len(paths)} images can be calibrated with, beside "
        "those for validation and those that cannot be decoded, and "
        f"{options.samples or 'some'} are needed; name other data"
    )


def _can_be_decoded(path: str, job: ExportJob) -> bool:
    try:
        job.run.preprocessing.read(path)
    except BadImage as error:
        job.notify(f"left out of the calibration: {error}")
        return False
    return True


def _training_paths(job: ExportJob, data: str) -> list[str]:
    """Paths of the training images of `data`, or of all where they are not divided.

    As the training of the run read them, else with the settings of any data; labels that the
    network does not have are of no use here, and no error.
    """
    task, classes = task_of_run(job.run), job.run.classes
    spec = DatasetSpec(data, split="train")
    with suppress(ConfigError, DataError):
        found = load_samples(task, job.source, spec, classes, lambda _note: None)
        return [sample.path for sample in found]
    with suppress(ConfigError, DataError):
        return [sample.path for sample in open_eval_split(spec, split="train", classes=classes)[0]]
    if is_list(data):
        spec = evaluated_spec(task, run_folder_of(job.source), spec, classes)
        spec = replace(spec, split=None, labels=False, label_column=None, target=())
        return [record.path for record in read_source(spec).train]
    return list_images([data])


MAX_COMPARED = 50
SIZES = (
    *((20, 20), (21, 34), (40, 25), (64, 64), (90, 61), (80, 120), (160, 160), (200, 150)),
    *((224, 224), (224, 301), (333, 222), (97, 480), (480, 97), (512, 384), (384, 512)),
    *((640, 480), (500, 751), (1024, 768), (768, 1025), (1500, 1001)),
)
"""Width and height of drawn images."""


@contextmanager
def comparison_images(
    folder: Path, run: LoadedRun, images: Sequence[str] | None, notify: Notify
) -> Iterator[list[str]]:
    """Paths of images: `images` if given, else validation images of the run, else drawn ones."""
    if images is not None:
        if not images:
            raise DataError("images: not one image; leave them out for those of the training")
        yield list(images)
        return
    try:
        spec = DatasetSpec.from_config(stored_config(folder).data, split="val")
        samples = load_samples(task_of_run(run), folder, spec, run.classes, lambda _: None)
    except VitError as error:
        notify(f"no validation images ({printable(error)}): drew {len(SIZES)} of many sizes")
        with tempfile.TemporaryDirectory(prefix="vit-verify-") as drawn:
            yield draw(Path(drawn))
        return
    chosen = evenly_spaced(samples, MAX_COMPARED)
    notify(f"{len(chosen)} of {len(samples):,} validation images of {printable(spec.data)}")
    yield [sample.path for sample in chosen]


def draw(folder: Path) -> list[str]:
    """Write an image of each of SIZES, with all EXIF orientations; the same at every call."""
    paths = []
    for number, (width, height) in enumerate(SIZES):
        path = folder / f"drawn_{number:02}_{width}x{height}.png"
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 1 + number % 8
        image = Image.fromarray(scene(width, height, number))
        image.save(path, exif=exif, compress_level=1)
        paths.append(str(path))
    return paths


def scene(width: int, height: int, seed: int) -> Array:
    """Coloured discs on a gradient, with noise: uint8 (height, width, 3)."""
    random = np.random.default_rng(seed)
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)
    tilt = (x + y).astype(np.float32)[..., None]
    pixels = tilt * np.float32(random.uniform(-90, 90, 3)) + np.float32(random.uniform(0, 255, 3))
    for _ in range(6):
        centre_x, centre_y = random.uniform(0, 1, 2)
        inside = (x - centre_x) ** 2 + (y - centre_y) ** 2 < random.uniform(0.01, 0.1)
        pixels[inside] = random.uniform(0, 255, 3)
    pixels += random.integers(-30, 31, pixels.shape, dtype=np.int8)
    found: Array = pixels.clip(0, 255).astype(np.uint8)
    return found
