"""Settings of the data: dataset, loading, evaluation transform, augmentation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vit.config.settings import LABEL_TASKS, ON, PRETRAINING_TASKS, Other, Section, setting
from vit.errors import ConfigError

Triple = tuple[float, float, float]


CHANNEL_SETTINGS = (
    *("channel_order", "channel_names", "axes", "value_type", "file_channels"),
    *("channel_ranges", "channel_mean", "channel_std"),
)
"""How the values of images of instruments are read."""
BY_NUMBER = "numbers"
"""Value of `order`: grades are numbers, the lowest first."""
ENDS = ("low", "high")
"""What follows the name of a target in the columns of its interval."""
CHOICE_ENDS = ("score", "set")
"""The same of the probability of its class, and of its prediction set."""
WHOLE = ("pad", "native")
"""Values of `resize` that keep the whole image."""
MEASURED: dict[str, Any] = {"named": False, "decided_by": "data", "listed": False}
"""Properties of what is measured on the training images and kept in config.yaml, without a flag."""

MIXED = ("classify", "ordinal", "taxonomy", "multilabel")
"""Tasks with labels that can be mixed."""
WEIGHED = (*MIXED, "regression", "attributes")
"""Tasks with a loss of each image."""


def check_intensity_range(values: tuple[float, float]) -> None:
    """Refuse a range whose two values are not in order."""
    if len(values) != 2 or not all(map(math.isfinite, values)) or not values[0] < values[1]:
        given = " ".join(f"{value:g}" for value in values)
        raise ConfigError(f"intensity_range={given}: must be two numbers, the first the smaller")


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """The dataset, and how it is read."""

    shared: ClassVar[Mapping[str, Any]] = {"before_plan": True}

    data: str = setting("", listed=False)
    """Image folder, list (CSV, JSON lines), tar shards, or the name of a dataset."""
    images: str | None = None
    """Folder that file names in a list are relative to; the list's own when left empty."""
    image_column: str | None = None
    """Image column of a list; found by its usual names when left empty."""
    label_column: str | None = None
    """Class column of a list; found by its usual names when left empty."""
    target: tuple[str, ...] = setting((), tasks=LABEL_TASKS)
    """Columns of a list that are asked of an image: numbers, the classes, or several of both."""
    taxonomy: str | None = setting(None, tasks=("taxonomy",))
    """Tree of the classes, whose names become paths: a table (class, parent), or nested folders."""
    caption_column: str | None = None
    """Caption column of a list or table; found by its usual names when left empty."""
    allow_outside: bool = False
    """Accept images of a list outside of its folder, or of `images`."""
    exclude: str | None = None
    """List of images that are left out, such as that of vit check --write-list."""
    corrections: str | None = None
    """List of images and classes (image, label) that replace those of the data."""
    labels: str | None = setting(None, tasks=LABEL_TASKS)
    """List of the labelled images (image, label), such as that of vit suggest; no other is used."""
    group: str | None = None
    """Column of a list, or regex over paths; equal values share a split, and count as one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name.lower() for name in self.target]
        ends = (*ENDS, *CHOICE_ENDS)
        answers = ["image", "error", *(f"{name}_{end}" for name in names for end in ends)]
        if len({*names, *answers}) < len(names) + len(answers):
            self.refuse(
                "target",
                "answers have image, error, NAME_low, _high, _score and _set; name each once",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """The dataset, its loading and batches, and the evaluation transform."""

    group: str | Literal["auto"] | None = "auto"
    """Column of a list, or regex over paths; equal values share a split, and count as one. auto:
    images of one scene, by their looks and EXIF data; FILE.csv: as in that file of vit check
    --write-groups; none: each image on its own."""
    order: tuple[str, ...] = setting((), tasks=("ordinal",), before_plan=True, alone=BY_NUMBER)
    """The grades from the lowest on, of classes that have an order; alone: they are numbers."""
    weight_column: str | None = setting(
        None,
        tasks=WEIGHED,
        read_by=({"teacher": (None,)}, {"probe_first": (None, False)}),
        unused_by=("probe",),
        before_plan=True,
    )
    """Column of a list with weights of images in the loss, 0 or more; their mean counts as 1."""
    folds: int | None = setting(None, least=2, tasks=LABEL_TASKS)
    """Number of cross-validation folds; each gets a training that validates on it."""
    fold: int | None = None
    """The fold to train, from 1; all when left empty."""
    cache: Literal["none", "ram", "disk", "device"] = "none"
    """Keep decoded training images, as large as needed; device: on the GPU, which augments them."""
    cache_folder: str | None = setting(
        None, resumable=True, read_by=({"cache": ("disk", "device")},)
    )
    """Folder of cache=disk (else the user's cache folder) and of cache=device (else memory)."""
    decode: Literal["fast", "exact"] = setting("fast", read_by=({"cache": ("none",)},))
    """Training crops: by torch from JPEGs decoded at a reduced size, or by Pillow in full size."""
    val_share: float = setting(0.2, above=0, below=1, read_by=({"folds": (None,)},))
    """Share of each class held out for validation if the data has no split."""
    on_bad_image: Literal["stop", "skip"] = setting("stop", resumable=True)
    """Unreadable images: stop the run, or skip and count them."""
    max_pixels: int = setting(100_000_000, least=1)
    """Most pixels of one image that are decoded; a larger JPEG is decoded at a part of its size."""
    workers: int | None = setting(None, "-j", least=0, resumable=True, listed=False)
    """Loader processes per device; chosen by measuring the image loading when left empty."""
    batch_size: int = setting(128, "-b", least=1, decided_by="data")
    """Images per optimiser step, over all devices; auto keeps this and chooses accumulate."""
    accumulate: int | None = setting(1, "--grad-accum-steps", least=1, resumable=True)
    """Micro-batches per optimiser step; auto: as few as the memory of a GPU allows."""
    resize: Literal["crop", "squash", "pad", "native"] = "crop"
    """Resize the short side and crop the centre, or resize to a square; pad, native: keep the whole
    image in its shape, with the mean colour around, or in as many patches as a square has."""
    crop_share: float = setting(
        0.9, "--crop-pct", above=0, most=1, read_by=({"resize": Other(WHOLE)},), off=(1.0,)
    )
    """Evaluation: share of the resized short side that the centre crop keeps."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """Interpolation of resized images."""
    mean: Triple = (0.5, 0.5, 0.5)
    """Mean of each colour channel in [0, 1], subtracted from images."""
    std: tuple[float, float, float] = setting((0.5, 0.5, 0.5), above=0)
    """Standard deviation of each colour channel in [0, 1], by which images are divided."""
    intensity_range: tuple[float, float] | None = None
    """Values of 16-bit and float images that become black and white; measured when left empty."""
    channel_order: tuple[str, ...] = setting((), "--channels", named=False, before_plan=True)
    """Channels of images of instruments that the network sees in full depth, by number from 0 or by
    name; all, of images of other than 1 or 3 channels, when left empty."""
    axes: str = setting("", before_plan=True)
    """Axes of TIFFs that are the channels, such as ZC; C, or the samples of a page, when empty."""
    channel_names: tuple[str, ...] = setting((), **MEASURED)
    """Names of `channel_order`, of the files or of the user."""
    value_type: Literal["uint8", "uint16", "float32"] | None = setting(None, **MEASURED)
    """Type of the values of `channel_order`; none: images are RGB of 8 bits."""
    file_channels: int | None = setting(None, least=1, **MEASURED)
    """Channels of a file."""
    channel_ranges: tuple[float, ...] = setting((), **MEASURED)
    """Values of each channel that become 0 and 1: low, high, low, high..."""
    channel_mean: tuple[float, ...] = setting((), **MEASURED)
    """Mean of each channel in [0, 1], subtracted from images."""
    channel_std: tuple[float, ...] = setting((), above=0, **MEASURED)
    """Standard deviation of each channel in [0, 1], by which images are divided."""

    tiles: tuple[int, ...] | None = setting(None, least=0, before_plan=True, tasks=MIXED)
    """Side of tiles in pixels of the file, and overlap of neighbours (256,32): an image is a bag of
    them, read without loading all of it."""
    tile_count: int = setting(256, named=False, least=1, read_by=({"tiles": ON},))
    """Tiles of an image in a training step, drawn anew each time; validation sees all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order != (BY_NUMBER,) and 0 < len({*self.order}) < max(2, len(self.order)):
            self.refuse("order", "give all grades, each once, or --order alone for numbers")
        if self.order and len(self.target) > 1:
            self.refuse("order", "grades are of one column; give one --target")
        if self.tiles and not (len(self.tiles) < 3 and self.tile_overlap < self.tiles[0]):
            self.refuse("tiles", "give SIZE, or SIZE,OVERLAP with an overlap below the size")
        if self.fold is not None and not 1 <= self.fold <= (self.folds or 0):
            self.refuse(
                "fold", f"must be from 1 to folds={self.folds}" if self.folds else "needs --folds N"
            )
        if self.intensity_range is not None:
            check_intensity_range(self.intensity_range)
        if self.batch_size % self.micro_batches:
            self.refuse("accumulate", f"does not divide batch_size={self.batch_size}")

    @property
    def tile_overlap(self) -> int:
        """Pixels that neighbouring tiles share."""
        return self.tiles[1] if self.tiles and len(self.tiles) > 1 else 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimiser step; 1 while `accumulate` is auto."""
        return self.accumulate or 1


RANDAUGMENT = ({"auto_augment": ("randaugment",)},)
RESIZED = {"random_crop": ("resized",)}
WITH_PAD: Mapping[str, tuple[Any, ...]] = {
    "task": Other(PRETRAINING_TASKS),
    "cache": Other(("device",)),
    "random_crop": ("resized",),
}
"""Values of other settings beside resize=pad."""
WITH_NATIVE: Mapping[str, tuple[Any, ...]] = {
    **WITH_PAD,
    "task": MIXED,
    **dict.fromkeys(("mixup", "cutmix", "merge_tokens", "compile", "teacher"), (0, None)),
    "patch_sizes": ((),),
    "feedforward": Other(("moe",)),
    "position": Other(("relative",)),
}
"""The same beside resize=native: images of several sizes are no one tensor, in which they could be
mixed, merged or compiled; a teacher has a size of its own."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Section):
    """Augmentation of training images."""

    shared: ClassVar[Mapping[str, Any]] = {"unused_by": ("probe",)}

    random_crop: Literal["resized", "simple"] = "resized"
    """Random resized crop, or a crop of the whole short side at a random position."""
    min_crop: float = setting(0.08, above=0, most=1, read_by=(RESIZED,))
    """Smallest share of the image area in a random crop; 1 switches crops off."""
    crop_ratio: float = setting(
        4 / 3, least=1, read_by=(RESIZED, {"min_crop": Other((1,)), "local_views": ON})
    )
    """Largest change of aspect ratio in a random crop."""
    hflip: float = setting(0.5, least=0, most=1)
    """Probability of a left-right flip."""
    vflip: float = setting(0.0, least=0, most=1)
    """Probability of an upside-down flip."""
    rotate: float = setting(0.0, least=0)
    """Largest random rotation, in degrees."""
    translate: float = setting(0.0, least=0, most=1)
    """Largest random shift, as a share of the image's side."""
    color_jitter: float = setting(0.0, least=0)
    """Strength of random brightness, contrast and saturation; 0 is off, with three 0.3."""
    auto_augment: Literal["none", "randaugment", "trivialaugment", "augmix", "three"] = setting(
        "none", "--aa"
    )
    """Augmentation policy; three is 3-Augment of DeiT III (arXiv:2204.07118)."""
    randaugment_layers: int = setting(2, least=1, read_by=RANDAUGMENT)
    """RandAugment: operations per image."""
    randaugment_magnitude: int = setting(9, least=0, most=30, read_by=RANDAUGMENT)
    """RandAugment: strength of each operation, from 0 to 30."""
    erase: float = setting(0.0, "--reprob", least=0, most=1)
    """Probability of erasing a random rectangle (arXiv:1708.04896)."""
    repeats: int = setting(1, "--aug-repeats", least=1)
    """Repeated augmentation: copies of an image in a batch (arXiv:1901.09335)."""
    mixup: float = setting(0.0, least=0, tasks=MIXED, before_plan=True)
    """Alpha of MixUp's Beta distribution (arXiv:1710.09412); 0 is off."""
    cutmix: float = setting(0.0, least=0, tasks=MIXED, before_plan=True)
    """Alpha of CutMix's Beta distribution (arXiv:1905.04899); 0 is off."""
    mix_probability: float = setting(
        1.0, "--mixup-prob", least=0, most=1, read_by=({"mixup": ON, "cutmix": ON},)
    )
    """Probability that a pair of images is mixed, if mixup or cutmix is on."""
    cutmix_share: float = setting(
        0.5, "--mixup-switch-prob", least=0, most=1, read_by=({"mixup": ON}, {"cutmix": ON})
    )
    """Share of the mixed pairs that use CutMix, if mixup and cutmix are both on."""

    @property
    def unbatched(self) -> str | None:
        """The first setting that cache=device does not support, as NAME=VALUE; None without one."""
        unlike = {
            "random_crop": self.random_crop != "resized",
            "rotate": self.rotate != 0,
            "auto_augment": self.auto_augment not in ("none", "three"),
            "erase": self.erase != 0,
        }
        name = next((name for name, wrong in unlike.items() if wrong), None)
        return None if name is None else f"{name}={getattr(self, name)}"

    @property
    def mixes(self) -> bool:
        """Whether images of a batch may be mixed."""
        return bool((self.mixup or self.cutmix) and self.mix_probability)
