"""Pretrained networks that `--weights auto` chooses from: a list of timm's, and your own runs.

The list has one licence a network, of timm's `pretrained_cfg`, and all are permissive.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from vit.config.setting_layers import RUNS
from vit.config.stored_config import has_stored_config, run_folder_of, stored_config
from vit.data.sources.split_file import read_split
from vit.errors import ConfigError, RunError, WeightsError
from vit.weights import hub
from vit.weights.load_model import read_source_config
from vit.weights.resolve_source import TIMM, WeightsLocation, locate_weights

PERMISSIVE = {"apache-2.0": "Apache-2.0", "mit": "MIT"}
"""Licences of the list, and how they are usually written."""
TOKEN_FLOPS = 2.16
"""FLOPs of a token by parameters: 2, and those of attention."""


@dataclass(frozen=True)
class Backbone:
    """A network with pretrained weights; `image_size` and `patch_size` are its own."""

    source: str
    """As --weights takes it."""
    license: str
    megabytes: float
    """Of its file, 4 bytes a parameter."""
    year: int | None = None
    pretrained_on: str = ""
    paper: str = ""
    _: KW_ONLY
    image_size: int = 224
    patch_size: int = 16

    @property
    def repository(self) -> hub.Repository:
        return hub.Repository(self.source)

    @property
    def parameters(self) -> float:
        """In millions."""
        return self.megabytes / 4

    def size(self, wanted: int) -> int:
        """The side of images nearest to `wanted` from below that whole patches make."""
        return max(wanted // self.patch_size, 1) * self.patch_size

    def flops(self, size: int) -> float:
        """FLOPs of one image of `size` x `size` pixels, forward, about."""
        return TOKEN_FLOPS * 1e6 * self.parameters * (size / self.patch_size) ** 2


IN1K, IN21K, IN22K = "ImageNet-1k", "ImageNet-21k, ImageNet-1k", "ImageNet-22k, ImageNet-1k"
IN12K, LVD, PE = "ImageNet-12k, ImageNet-1k", "LVD-142M, no labels", "5.4 G captioned images"
WEBLI, DATACOMP = "WebLI, captions", "DataComp-1B, captions"
SBB = "timm, searching for better ViT baselines"
APACHE, MIT = "apache-2.0", "mit"
# fmt: off
# In the order in which they are fetched: different ones of each size, the small ones first.
ROWS = (
    ("vit_small_patch14_reg4_dinov2.lvd142m", APACHE, 88, 2023, LVD, "arXiv:2309.16588"),
    ("vit_small_patch16_224.augreg_in21k_ft_in1k", APACHE, 88, 2021, IN21K, "arXiv:2106.10270"),
    ("vit_pe_core_small_patch16_384.fb", APACHE, 95, 2025, PE, "arXiv:2504.13181"),
    ("eva02_small_patch14_336.mim_in22k_ft_in1k", MIT, 89, 2023, IN22K, "arXiv:2303.11331"),
    ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", APACHE, 23, 2021, IN21K, "arXiv:2106.10270"),
    ("vit_pe_core_tiny_patch16_384.fb", APACHE, 25, 2025, PE, "arXiv:2504.13181"),
    ("vit_base_patch14_reg4_dinov2.lvd142m", APACHE, 346, 2023, LVD, "arXiv:2309.16588"),
    ("vit_base_patch16_siglip_224.v2_webli", APACHE, 372, 2025, WEBLI, "arXiv:2502.14786"),
    ("vit_base_patch16_224.augreg2_in21k_ft_in1k", APACHE, 346, 2022, IN21K, "arXiv:2106.10270"),
    ("vit_pe_core_base_patch16_224.fb", APACHE, 375, 2025, PE, "arXiv:2504.13181"),
    ("eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", MIT, 348, 2023, IN22K, "arXiv:2303.11331"),
    ("deit3_small_patch16_224.fb_in22k_ft_in1k", APACHE, 88, 2022, IN22K, "arXiv:2204.07118"),
    ("vit_little_patch16_reg4_gap_256.sbb_in1k", APACHE, 90, 2024, IN1K, SBB),
    ("deit3_medium_patch16_224.fb_in22k_ft_in1k", APACHE, 155, 2022, IN22K, "arXiv:2204.07118"),
    ("vit_betwixt_patch16_reg4_gap_256.sbb2_e200_in12k_ft_in1k", APACHE, 242, 2024, IN12K, SBB),
    ("vit_mediumd_patch16_reg4_gap_256.sbb2_e200_in12k_ft_in1k", APACHE, 256, 2024, IN12K, SBB),
    ("vit_base_patch16_clip_224.datacompxl", APACHE, 345, 2023, DATACOMP, "arXiv:2304.14108"),
    ("deit3_base_patch16_224.fb_in22k_ft_in1k", APACHE, 346, 2022, IN22K, "arXiv:2204.07118"),
    ("vit_small_patch14_dinov2.lvd142m", APACHE, 88, 2023, LVD, "arXiv:2304.07193"),
    ("vit_base_patch14_dinov2.lvd142m", APACHE, 346, 2023, LVD, "arXiv:2304.07193"),
    ("eva02_tiny_patch14_336.mim_in22k_ft_in1k", MIT, 23, 2023, IN22K, "arXiv:2303.11331"),
    ("deit_tiny_patch16_224.fb_in1k", APACHE, 23, 2020, IN1K, "arXiv:2012.12877"),
    ("deit_small_patch16_224.fb_in1k", APACHE, 88, 2020, IN1K, "arXiv:2012.12877"),
    ("vit_large_patch14_reg4_dinov2.lvd142m", APACHE, 1217, 2023, LVD, "arXiv:2309.16588"),
    ("vit_large_patch16_224.augreg_in21k_ft_in1k", APACHE, 1217, 2021, IN21K, "arXiv:2106.10270"),
)
# fmt: on
LISTED = tuple(
    Backbone(f"{TIMM}{row[0]}", *row[1:], patch_size=int(row[0].partition("patch")[2][:2]))
    for row in ROWS
)


def find_backbones(data: str, root: Path) -> tuple[list[Backbone], list[str]]:
    """Those on this disk, and a line for each that is left out: of the list in the hub's cache or
    in a folder of their name, and in the folders of ./runs, for a training on `data`, whose images
    are below `root`."""
    found, left_out = [], []
    for weights in LISTED:
        for source in (weights.source, weights.source.removeprefix(TIMM)):
            cached = source.startswith(TIMM) and hub.cached_snapshot(weights.repository)
            if (cached or Path(source).exists()) and is_listed(weights, source):
                found.append(replace(weights, source=source))
                break
    for file in sorted(Path(RUNS).glob("*/model.safetensors")):
        try:
            found.append(read_own(file, data, root))
        except (ConfigError, RunError, WeightsError) as error:
            left_out.append(f"{file.parent} is left out: {error}")
    return found, left_out


def is_listed(weights: Backbone, source: str) -> bool:
    """Whether `source` can be read here and is `weights`, under a permissive licence."""
    try:
        found: WeightsLocation = locate_weights(source, offline=True)
    except WeightsError:
        return False
    terms = (found.license or weights.license).lower()
    name = weights.source.removeprefix(TIMM).partition(".")[0]
    return found.kind == "timm" and found.name.partition(".")[0] == name and terms in PERMISSIVE


def read_own(file: Path, data: str, root: Path) -> Backbone:
    """The weights in a folder of ./runs, unless they may know labels of `data` already."""
    found, config = locate_weights(file.parent), read_source_config(file.parent)
    if learned_labels(file.parent, data, root):
        raise WeightsError("it, or a run that it began with, has learned labels of these images")
    if config.channels != 3:
        raise WeightsError(f"it is for images of {config.channels} channels")
    if found.kind != "run" and (found.license or "").lower() not in PERMISSIVE:
        raise WeightsError(f"its licence is {found.license or 'unknown'}")
    return Backbone(
        str(file.parent),
        found.license or "own",
        file.stat().st_size / 1e6,
        image_size=config.image_size,
        patch_size=config.patch_size,
    )


def learned_labels(run: Path, data: str, root: Path) -> bool:
    """Whether `run`, or one that it began with or was taught by, has learned labels of images of
    `data`, or of a folder that has those below `root`, or is among them."""
    if not has_stored_config(run):
        return False
    config, split = stored_config(run), read_split(run)
    theirs = Path(config.data.data).resolve()
    folder = split.root.resolve() if split else theirs
    near = folder == root.resolve() or folder in root.resolve().parents
    near = near or root.resolve() in folder.parents or theirs == Path(data).resolve()
    earlier = filter(None, (config.finetune.weights, config.values()["teacher"]))
    return (near and not config.training.pretrains) or any(
        learned_labels(Path(run_folder_of(one)), data, root) for one in earlier
    )


def fetch_backbones(choices: Iterable[Backbone], limit: int) -> tuple[list[Backbone], list[str]]:
    """Download those of `choices` that `limit` bytes are enough for; also a line for a failure."""
    found, lines = [], []
    choices = [weights for weights in choices if 1e6 * weights.megabytes <= limit]
    if not choices:
        lines.append(f"nothing is fetched: the list has no other of {max(limit, 0) / 1e6:.0f} MB")
    if choices and (reason := hub.offline_reason(offline=None) or hub.unreachable_reason()):
        return [], [f"nothing is fetched: {reason}"]
    for weights in choices:
        if 1e6 * weights.megabytes > limit:
            continue
        try:
            locate_weights(weights.source)
        except WeightsError as error:
            lines.append(f"{weights.source} is left out: {error}")
            continue
        limit -= int(1e6 * weights.megabytes)
        found.append(weights)
    return found, lines


def license_name(terms: str) -> str:
    """`Apache-2.0`, `MIT`: as the licences are usually written."""
    return PERMISSIVE.get(terms.lower(), terms)
