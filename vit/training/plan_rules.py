"""The rules of the plan: which settings make the best model of these images in this time.

facts of the data and the machine -> image size and network -> batch and steps -> how images vary

Every rule is a line of a table or a function of a few numbers here; what they were measured on, and
what stands in them by the literature alone, is in docs/recipes.md. A setting that somebody chose is
a fact to all rules after it. More time never chooses a smaller network or smaller images. A larger
network begins with fewer steps than the one before had at the end, and with more than a third.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vit.data.sources.opening import Listing

from vit.data.room import shown_bytes

# Images up to this side are taken as they are, in patches of 4 pixels; larger ones are photographs.
TINY_SIDE = 48
# Networks from the cheapest up: side of photographs, width, depth.
LADDER = (
    (64, 128, 4),
    (80, 128, 4),
    (96, 160, 5),
    (112, 192, 6),
    (128, 256, 8),
    (160, 320, 10),
    (192, 384, 12),
    (224, 384, 12),
    (224, 512, 12),
    (224, 768, 12),
)
# Passes over 3,000 images that a network of the ladder's first step needs to be worth its cost,
# how they shrink with more images, and how they grow with each step of the ladder.
PASSES, PASSES_POWER, PASSES_STEP, LEAST_PASSES = 12.0, 0.35, 0.35, 2.0
# Small images first: mean cost of a step as a share of one at full size.
GROWING_SHARE = 0.6
# Forward, and backward twice as much.
TRAINING_FLOPS = 3
# Seconds that start, plan and report take beside the steps.
FIXED_SECONDS = 10.0
# Seconds for each training image where nobody gives a time, at REFERENCE FLOP/s.
SECONDS_PER_PHOTO, SECONDS_PER_TINY = 0.25, 0.028
LEAST_SECONDS, MOST_SECONDS = 50.0, 86_400.0
REFERENCE = 80e9
# Held out of a data set without validation images: a fifth, until measuring them once takes this
# share of the time; not fewer than these many, nor more.
VALIDATION_TIME = 0.01
LEAST_VALIDATION, MOST_VALIDATION = 1000, 5000
# And of each class not fewer than these, where a fifth of it has them.
VALIDATION_OF_CLASS = 5
# Below this many steps in a pass, a batch that does not divide the images leaves out too many.
FEW_STEPS = 10
# Bytes of decoded images that are kept in memory at most, and the share of what is free.
MOST_CACHE, CACHE_SHARE = 8 * 2**30, 0.25


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plan follows from."""

    images: int
    """Training images."""
    classes: int
    side: int
    """Median short side, in pixels."""
    grey: bool
    """Whether no image has colours."""
    aspect: float = 1.0
    """Median of the long side by the short side."""
    validation: int
    """Validation images."""
    divided: bool
    """Whether the validation images are held out by us."""
    device: str
    """cpu, cuda or mps."""
    flops: float
    """Floating-point operations a second of a training step here."""
    memory: int
    """Bytes that a cache in memory may take; 0 where there can be none."""
    seconds: float | None = None
    """Time for the whole training; None where nobody gave one."""
    processes: int = 1
    """Among which a batch is divided."""


class Choice(NamedTuple):
    """A setting with the reason for its value."""

    value: Any
    reason: str


@dataclass
class Plan:
    """Settings with their reasons, in the order in which they were decided.

    Args:
        facts: What they follow from.
        given: Settings that somebody chose.
    """

    facts: Facts
    given: Mapping[str, Any]
    choices: dict[str, Choice] = field(default_factory=dict)
    passes: float = 0.0
    """Passes over the training images that are expected."""
    flops: float = 0.0
    """Of one image, forward."""
    listing: "Listing | None" = field(default=None, repr=False)
    """What the data hold, for a training that follows."""

    def decide(self, name: str, value: Any, reason: str) -> Any:
        """Set `name` to `value`, unless somebody chose it; returns what it is."""
        if name in self.given:
            return self.given[name]
        self.choices[name] = Choice(value, reason)
        return value

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were decided, without those that were given."""
        return {name: choice.value for name, choice in self.choices.items()}


def make_plan(facts: Facts, given: Mapping[str, Any]) -> Plan:
    """Settings for `facts` beside those that are `given`."""
    plan = Plan(facts, given)
    seconds = decide_time(plan)
    decide_network(plan, seconds)
    decide_optimisation(plan)
    decide_augmentation(plan)
    decide_validation(plan, seconds)
    decide_cache(plan)
    return plan


def planned_seconds(facts: Facts) -> float:
    """Seconds of a training: those that were given, or what is sensible for the data."""
    if facts.seconds is not None:
        return facts.seconds
    each = SECONDS_PER_TINY if facts.side <= TINY_SIDE else SECONDS_PER_PHOTO
    faster = math.sqrt(max(facts.flops / REFERENCE, 1.0))
    return min(max(each * facts.images / faster, LEAST_SECONDS), MOST_SECONDS)


def decide_time(plan: Plan) -> float:
    """Seconds of the training; those that other rules reckon with where steps are given."""
    facts, seconds = plan.facts, planned_seconds(plan.facts)
    if facts.seconds is not None:
        return seconds
    if not {"epochs", "steps"} & set(plan.given):
        text = f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m"
        plan.decide("time", text, f"sensible for {facts.images:,} images; --time T takes longer")
    return seconds


def decide_network(plan: Plan, seconds: float) -> None:
    """Image size and network: the largest of the ladder that sees the images often enough."""
    facts, given = plan.facts, plan.given
    tiny = facts.side <= TINY_SIDE
    room = max(seconds - FIXED_SECONDS, 0.3 * seconds) * facts.flops / facts.images
    needed = max(PASSES * (3000 / facts.images) ** PASSES_POWER, LEAST_PASSES)
    chosen = (0, 0, 0)
    for step, (photo, dim, depth) in enumerate(LADDER):
        side = given.get("image_size", image_side(facts.side, photo))
        patch = given.get("patch_size", patch_of(side))
        dim, depth = given.get("dim", dim), given.get("depth", depth)
        conv = given.get("stem", "conv") == "conv" and stem_reaches(patch, given)
        cost = forward_flops(side, patch, dim, depth, conv=conv)
        affordable = room / (TRAINING_FLOPS * GROWING_SHARE * cost)
        if step and affordable < needed * (1 + PASSES_STEP * step):
            break
        if cost > plan.flops:  # else it differs in nothing that is still to be chosen
            chosen, plan.passes, plan.flops = (side, dim, depth), affordable, cost
    side, dim, depth = chosen
    often = f"{counted_passes(plan.passes)} over {facts.images:,} images fit"
    native = "the images' own size" if tiny else f"{often}, and images have {facts.side} px"
    patch = given.get("patch_size", patch_of(side))
    tokens = math.ceil(side / patch) if tiny else max(side // patch, 1)
    side = tokens * patch
    side = plan.decide("image_size", side, native)
    plan.decide("patch_size", patch, f"{max(side // patch, 1)}x{max(side // patch, 1)} tokens")
    dim = plan.decide("dim", dim, often)
    plan.decide("depth", depth, often)
    head = 32 if dim < 256 else 64
    heads = dim // head if dim % head == 0 else next(n for n in (8, 6, 4, 3, 2, 1) if dim % n == 0)
    plan.decide("num_heads", heads, f"heads of {dim // heads}")
    decide_stem(plan, patch, tiny=tiny)
    if dim % 4 == 0:
        plan.decide("position", "sinusoidal_2d", "nothing to learn, and any size of image")
    plan.decide("pooling", "mean", "learns faster than a class token without pretraining")
    if plan.given.get("pooling", "mean") in ("mean", "attention"):
        plan.decide("class_token", False, "nothing reads it")
    small = math.ceil(side / 2 / patch) * patch
    growing = {"start_image_size", "patch_sizes"} & set(plan.given)
    if small < side and side // patch >= 6 and not growing:
        plan.decide("start_image_size", small, "early steps see little, and cost a quarter")


def neighbours(plan: Plan) -> list[dict[str, int]]:
    """The networks beside that of `plan` on the ladder, the cheaper one first, as settings.

    There is none where its network is none of the ladder's.
    """
    facts, every = plan.facts, {**plan.settings, **plan.given}
    networks: list[dict[str, int]] = []
    for photo, dim, depth in LADDER:
        side = image_side(facts.side, photo)
        side = side // patch_of(side) * patch_of(side)
        network = {"image_size": side, "dim": dim, "depth": depth}
        if network not in networks:
            networks.append(network)
    own = {name: every.get(name) for name in ("image_size", "dim", "depth")}
    if own not in networks:
        return []
    at = networks.index(own)
    return networks[max(at - 1, 0) : at] + networks[at + 1 : at + 2]


def decide_stem(plan: Plan, patch: int, *, tiny: bool) -> None:
    """Convolutions before the blocks, where patches have a side that they reach."""
    if not stem_reaches(patch, plan.given):
        plan.decide("stem", "linear", f"convolutions do not reach patches of {patch} pixels")
        return
    stem = plan.decide("stem", "conv", "worth more than ten points in as many minutes")
    if stem != "conv":
        return
    if patch == 16:
        plan.decide("stem_depth", 4, "for patches of 16 pixels")
    if tiny and patch == 4:
        dim = plan.given.get("dim", plan.choices.get("dim", Choice(128, "")).value)
        plan.decide("stem_width", max(dim * 3 // 16, 8), "all its pixels are at full size")


def stem_reaches(patch: int, given: Mapping[str, Any]) -> bool:
    """Whether a convolutional stem can make the tokens of such patches."""
    return patch in (2, 4, 8, 16) and not {"patch_sizes", "merge_tokens"} & set(given)


def decide_optimisation(plan: Plan) -> None:
    """Batch, optimiser and learning rate."""
    facts = plan.facts
    sizes = ((400, 16), (1200, 32), (20_000, 64), (200_000, 128), (math.inf, 256))
    batch = next(size for most, size in sizes if facts.images < most)
    if facts.device != "cpu":
        batch *= 4
    batch = even_batch(facts.images, batch, facts.processes * (plan.given.get("accumulate") or 1))
    batch = plan.decide("batch_size", batch, f"for {facts.images:,} images on {facts.device}")
    if plan.given.get("steps") is not None:
        plan.passes = plan.given["steps"] * batch / facts.images
    elif "epochs" in plan.given and plan.given.get("epoch_steps") is None:
        plan.passes = plan.given["epochs"]
    if not plan.given.get("encoder_lr"):
        optimizer = plan.decide("optimizer", "muon", "fewer steps to the same accuracy than AdamW")
        if optimizer == "muon":
            factor = math.sqrt(max(batch, 64) / 64)
            plan.decide("lr", round(3e-3 * factor, 5), "of matrices in blocks")
            plan.decide("fallback_lr", round(2e-3 * factor, 5), "of all other parameters")
            plan.decide("weight_decay", 0.02, "short trainings need little")
    plan.decide("schedule", "wsd", "constant, then linear: its length is settled late")
    if plan.given.get("depth", 2) > 1:
        plan.decide("drop_path", 0.1 if plan.passes > 60 else 0.05, counted_passes(plan.passes))


def decide_augmentation(plan: Plan) -> None:
    """How training images vary, and how all of them are resized."""
    facts, tiny = plan.facts, plan.facts.side <= TINY_SIDE
    if tiny and facts.grey:
        why = "small and grey: characters, which are neither mirrored nor cut"
        plan.decide("hflip", 0.0, why)
        if plan.given.get("random_crop") != "simple":
            plan.decide("min_crop", 1.0, why)
        plan.decide("rotate", 10.0, "characters lean")
        plan.decide("translate", 0.08, "and are not centred")
    elif plan.given.get("random_crop") != "simple":
        least = 0.6 if tiny else 0.35
        plan.decide("min_crop", least, "smaller crops hide the object from a small network")
    plan.decide("interpolation", "bilinear", "quick, and as good at these sizes")
    plan.decide("crop_share", 1.0, "the whole short side counts")


def decide_validation(plan: Plan, seconds: float) -> None:
    """Share of the images that are held out."""
    facts = plan.facts
    total = facts.images + facts.validation
    affordable = int(VALIDATION_TIME * seconds * facts.flops / plan.flops)
    several = VALIDATION_OF_CLASS * facts.classes
    held_out = min(max(affordable, LEAST_VALIDATION, several), max(MOST_VALIDATION, several))
    if facts.divided and "folds" not in plan.given and total * 0.2 > held_out:
        within = 100 * 1.96 * 0.5 / math.sqrt(held_out)
        plan.decide(
            "val_share",
            round(held_out / total, 4),
            f"{held_out:,} images measure within {within:.1f} points",
        )


def decide_cache(plan: Plan) -> None:
    """Decoded images in memory, where they fit."""
    facts = plan.facts
    side = plan.given.get("image_size", plan.settings.get("image_size", facts.side))
    crop = plan.given.get("min_crop", plan.settings.get("min_crop", 1.0))
    kept = min(side / math.sqrt((crop + 1) / 2), facts.side)
    bytes_needed = 3 * facts.images * kept**2 * 1.5
    fits = bytes_needed < min(MOST_CACHE, CACHE_SHARE * facts.memory)
    if fits and plan.given.get("decode") != "exact":
        plan.decide("cache", "ram", f"{shown_bytes(bytes_needed)} decoded once")


def image_side(native: int, wanted: int) -> int:
    """Side of the images that a network sees: its own where it is tiny, never far above it."""
    if native <= TINY_SIDE:
        return max(math.ceil(native / 4) * 4, 16)
    return max(min(wanted, native // 8 * 8), 48)


def patch_of(side: int) -> int:
    """Side of a patch for images of `side`."""
    return 4 if side <= TINY_SIDE else 8 if side <= 144 else 16


def even_batch(images: int, size: int, parts: int) -> int:
    """A batch of about `size` that leaves few of so many images out of a pass.

    A multiple of two images for each of `parts`, where there are several and images enough.
    """
    steps = math.ceil(images / size)
    batch = size if steps > FEW_STEPS else images // steps
    unit = 2 * parts if parts > 1 else 1
    return max(batch // unit * unit, min(unit, images))


def counted_passes(passes: float) -> str:
    """`12 passes`, `1.4 passes`, `0.02 passes`."""
    digits = 0 if passes >= 10 else 1 if passes >= 0.95 else 1 - math.floor(math.log10(passes))
    return f"{passes:.{digits}f} passes"


def forward_flops(side: int, patch: int, dim: int, depth: int, *, conv: bool = True) -> float:
    """FLOPs of a network for one image, forward; with a convolutional stem, or a linear one."""
    tokens = (side / patch) ** 2
    blocks = depth * (24 * dim**2 * tokens + 4 * tokens**2 * dim)
    if not conv:
        return 6.0 * side**2 * dim + blocks
    width, layers = dim // 4, 4 if patch == 16 else 3
    pixels = side / (2 if patch >= 8 else 1)
    widths = [3, *(width * 2**n for n in range(layers - 1)), dim]
    pools = int(math.log2(patch)) - (1 if patch >= 8 else 0)
    stem = 0.0
    for index in range(layers):
        stem += 2 * 9 * widths[index] * widths[index + 1] * pixels**2
        if index >= layers - pools:
            pixels /= 2
    return stem + blocks
