"""The rules of the plan: which settings make the best model of these images in this time.

facts of the data and the machine -> image size and network -> batch and steps -> how images vary

Every rule is a line of a table or a function of a few numbers here; what they were measured on, and
what stands in them by the literature alone, is in docs/recipes.md. A setting that somebody chose is
a fact to all rules after it. More time never chooses a smaller network or smaller images. A larger
network begins with fewer steps than the one before had at the end, and with more than a quarter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from vit.config import AugmentConfig
from vit.config.data_config import WHOLE
from vit.errors import ConfigError
from vit.text import format_bytes

if TYPE_CHECKING:
    from vit.data.sources.open_dataset import Listing

# Images up to this side are taken as they are; larger ones are photographs.
TINY_SIDE = 48


class Network(NamedTuple):
    """A row of a ladder of networks, with a convolutional stem."""

    side: int
    """Of images, in pixels."""
    patch: int
    dim: int
    depth: int
    ratio: int
    """Inner width of an MLP as a multiple of dim."""
    stem_depth: int
    stem_width: int
    passes: float
    """Passes over 3,000 images from which on it is worth its cost."""
    stem_stride: int = 2


# From the cheapest up.
PHOTO_NETWORKS = (
    Network(64, 16, 128, 4, 4, 4, 16, passes=0),
    Network(96, 16, 128, 4, 4, 4, 16, passes=10),
    Network(128, 16, 128, 4, 4, 4, 16, passes=24),
    Network(128, 16, 192, 6, 4, 4, 24, passes=55),
    Network(160, 16, 256, 8, 4, 4, 32, passes=55),
    Network(192, 16, 320, 10, 4, 4, 40, passes=75),
    Network(224, 16, 384, 12, 4, 4, 48, passes=100),
    Network(224, 16, 512, 12, 4, 4, 64, passes=140),
    Network(224, 16, 768, 12, 4, 4, 96, passes=200),
)
# With these the first convolution takes every pixel.
TINY_NETWORKS = (
    Network(32, 8, 128, 4, 2, 4, 16, passes=0, stem_stride=1),
    Network(32, 4, 128, 3, 4, 3, 32, passes=24, stem_stride=1),
    Network(32, 4, 192, 6, 2, 3, 24, passes=50, stem_stride=1),
    Network(32, 4, 256, 8, 2, 3, 32, passes=110, stem_stride=1),
    Network(32, 4, 320, 10, 2, 3, 40, passes=170, stem_stride=1),
    Network(32, 4, 384, 12, 4, 3, 48, passes=250, stem_stride=1),
)
# How the passes that are needed shrink with the number of images, and the fewest.
PASSES_POWER, LEAST_PASSES = 0.35, 2.0
# From this many planned passes on, of which three quarters are made, the variety of 3-Augment pays.
MANY_PASSES = 45
# Weight decay x learning rate x steps of a run; and the limits of weight decay.
DECAY, LEAST_DECAY, MOST_DECAY = 2.5, 0.02, 0.5
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
VALIDATION_TIME = 0.007
LEAST_VALIDATION, MOST_VALIDATION = 1000, 5000
# And of each class not fewer than these, where a fifth of it has them.
VALIDATION_OF_CLASS = 5
# Below this many steps in a pass, a batch that does not divide the images leaves out too many.
FEW_STEPS = 10
# Decoder depth by number of captions: (upper limit, depth).
DECODER_DEPTHS = ((5_000, 2), (1_000_000, 3), (math.inf, 6))
# A caption describes the whole image: the least crop where passes are many enough to crop at all.
CAPTION_CROP = 0.5
# Bytes of decoded images that are kept in memory at most, and the share of what is free.
MOST_CACHE, CACHE_SHARE = 8 * 2**30, 0.25


class CaptionStats(NamedTuple):
    """Of the captions of the training images."""

    total: int
    tokens: float
    """Mean length in tokens, with the end token."""
    longest: int
    """Tokens of the longest that is trained on, with begin and end."""
    vocab_size: int
    """Tokens of a tokenizer that is trained on them."""
    most_vocab: int
    """The most tokens that it may have."""


class TimedNetwork(NamedTuple):
    """The speed of a network on this machine."""

    cost: float
    """FLOPs of an image and its caption, forward."""
    flops: float
    """Floating-point operations a second of a training step; 0 where it does not fit in memory."""
    fits: int | None = None
    """Images at a time, of a process, that fit into its GPU, where not all of the batch did."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plan follows from."""

    images: int
    taught: int = 0
    """Those without a label, which get that of a teacher."""
    classes: int
    side: int
    """Median short side, in pixels."""
    grey: bool
    """Whether no image has colours."""
    channels: int = 0
    """Of images of instruments; 0 for RGB of 8 bits."""
    channel_names: tuple[str, ...] = ()
    aspect: float = 1.0
    """Median of the long side by the short side."""
    validation: int
    divided: bool
    """Whether the validation images are held out by us."""
    device: str
    """cpu, cuda or mps."""
    flops: float
    """Floating-point operations a second of a training step here."""
    timed: tuple[TimedNetwork, ...] = ()
    """The first networks of the ladder, as measured; `flops` without a measurement.

    Networks differ: what lies between the matrix products costs time, and next to no FLOPs, and a
    GPU waits for the processor that launches the operations of a small one.
    """
    memory: int
    """Bytes that a cache in memory may take; 0 where there can be none."""
    device_memory: int = 0
    """Free bytes of a GPU, for a cache there."""
    seconds: float | None = None
    """Time for the whole training, or None if no time was given."""
    processes: int = 1
    """Among which a batch is divided."""
    sharded: bool = False
    """Whether each process holds a part of the network (FSDP)."""
    task_batch: int | None = None
    """Images of a step on a CPU, where the task and not their number decides."""
    tiles: int = 1
    """Tiles of an image, about; each costs what an image does."""
    pass_cost: float = 1.0
    """Cost of a pass over the images, as a multiple of that with labels."""
    passes_factor: float = 1.0
    """Factor on the passes from which on a network is worth its cost."""
    captions: CaptionStats | None = None
    """Of a task that learns captions."""

    def nearest(self, cost: float) -> TimedNetwork:
        """What was measured of the network that is nearest to one of `cost` FLOPs an image."""
        if not self.timed:
            return TimedNetwork(cost, self.flops)
        return min(self.timed, key=lambda one: abs(math.log(one.cost / cost)))

    @property
    def labels(self) -> int:
        """Training images that a person labelled."""
        return self.images - self.taught


class Choice(NamedTuple):
    """A setting with the reason for its value."""

    value: Any
    reason: str


@dataclass
class Plan:
    """Settings with their reasons, in the order in which they were decided."""

    facts: Facts
    chosen: Mapping[str, Any]
    """The settings that a person chose."""
    choices: dict[str, Choice] = field(default_factory=dict)
    passes: float = 0.0
    """Passes over the training images that are expected."""
    flops: float = 0.0
    """Of one image and its caption, if there is one, forward."""
    speed: float = 0.0
    """Floating-point operations a second of a training step of this network."""
    fits: int | None = None
    """As of `TimedNetwork`."""
    listing: "Listing | None" = field(default=None, repr=False)
    """What the data hold, for a training that follows."""
    backbones: dict[str, Any] | None = field(default=None, repr=False)
    """What was measured of the networks for --weights auto: the content of backbones.json."""

    def decide(self, name: str, value: Any, reason: str) -> Any:
        """Set `name` to `value`, unless it is chosen or decided already; returns what it is."""
        if name not in self.chosen:
            self.choices.setdefault(name, Choice(value, reason))
        return self.get(name)

    def overrule(self, name: str, value: Any, reason: str) -> None:
        """Set `name` to `value`, also where somebody chose it."""
        self.chosen = {other: self.chosen[other] for other in self.chosen if other != name}
        self.choices[name] = Choice(value, reason)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting that is chosen or decided."""
        return self.values.get(name, default)

    @property
    def values(self) -> dict[str, Any]:
        """All settings, chosen and decided."""
        return {**self.settings, **self.chosen}

    @property
    def parts(self) -> int:
        """What a batch is a multiple of: processes, micro-batches and copies that were chosen."""
        chosen = [self.chosen.get(name) or 1 for name in ("accumulate", "repeats")]
        return math.prod([self.facts.processes, *chosen])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were decided, a layer of `Settings`."""
        return {name: choice.value for name, choice in self.choices.items()}


def make_plan(facts: Facts, chosen: Mapping[str, Any], network: Mapping[str, Choice] = {}) -> Plan:
    """Settings for `facts` beside those `chosen`, and those of a pretrained network, which stay."""
    plan = Plan(facts, chosen, {name: network[name] for name in network if name not in chosen})
    seconds = decide_time(plan)
    decide_network(plan, seconds)
    decide_decoder(plan)
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
    return min(max(each * facts.images * facts.tiles / faster, LEAST_SECONDS), MOST_SECONDS)


def decide_time(plan: Plan) -> float:
    """Seconds of the training; those that other rules reckon with where steps are given."""
    facts, seconds = plan.facts, planned_seconds(plan.facts)
    if facts.seconds is not None:
        return seconds
    if {"epochs", "steps"}.isdisjoint(plan.values) and not has_all_folds(plan):
        text = f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m"
        plan.decide("time", text, f"sensible for {facts.images:,} images; --time T takes longer")
    return seconds


def has_all_folds(plan: Plan) -> bool:
    """Whether one command trains on all folds, each of which is a run with epochs."""
    return plan.get("folds") is not None and plan.get("fold") is None


def decide_network(plan: Plan, seconds: float) -> None:
    """Image size and network: the largest of the ladder that sees the images often enough."""
    facts, fixed = plan.facts, plan.values
    tiny, ladder = facts.side <= TINY_SIDE, ladder_for(facts.side)
    network = ladder[0]
    for number, row in enumerate(ladder):
        candidate = with_chosen(row, facts.side, fixed)
        if plan.get("resize") == "native" and "image_size" not in fixed:
            # the short side of an image keeps the pixels of a crop
            patches = math.ceil(candidate.side * math.sqrt(facts.aspect) / candidate.patch)
            candidate = candidate._replace(side=patches * candidate.patch)
        cost = flops_with_captions(candidate, fixed, facts.captions)
        _, speed, fits = facts.nearest(cost)
        affordable = affordable_passes(cost, facts.images, seconds, speed) / facts.pass_cost
        if number and affordable < needed_passes(row, facts.images) * facts.passes_factor:
            break
        if cost > plan.flops:  # else it differs in nothing that is still to be chosen
            network, plan.passes, plan.flops = candidate, affordable, cost
            plan.speed, plan.fits = speed, fits
    side, patch, dim, depth = network[:4]
    often = f"{counted_passes(plan.passes)} over {facts.images:,} images fit"
    native = "the images' own size" if tiny else f"{often}, and images have {facts.side} px"
    plan.decide("image_size", side, native)
    tokens = max(side // patch, 1)
    plan.decide("patch_size", patch, f"{tokens}x{tokens} tokens")
    plan.decide("dim", dim, often)
    plan.decide("depth", depth, often)
    heads = heads_for(dim)
    plan.decide("num_heads", heads, f"heads of {dim // heads}")
    if network.ratio != 4 and plan.get("feedforward", "mlp") in ("mlp", "moe"):
        plan.decide("hidden_dim", network.ratio * dim, "more passes are worth more than width")
    decide_stem(plan, network)
    if dim % 4 == 0:
        plan.decide("position", "sinusoidal_2d", "nothing to learn, and any size of image")
    if has_all_folds(plan) and "steps" not in fixed:
        plan.decide("epochs", max(round(plan.passes), 1), f"about {seconds:.0f} s for each fold")
    if facts.classes or facts.captions is None:  # for captions alone, a decoder reads every token
        why = "learns faster than a class token without pretraining"
        if plan.decide("pooling", "mean", why) in ("mean", "attention"):
            plan.decide("class_token", False, "nothing reads it")
    small = math.ceil(side / 2 / patch) * patch
    if small < side and side >= 24 and {"start_image_size", "patch_sizes"}.isdisjoint(fixed):
        plan.decide("start_image_size", small, "early steps see little, and cost a quarter")


def heads_for(dim: int) -> int:
    """Heads of attention of a network of width `dim`: of 32 or 64, where they divide it."""
    head = 32 if dim < 256 else 64
    return dim // head if dim % head == 0 else next(n for n in (8, 6, 4, 3, 2, 1) if dim % n == 0)


def decide_decoder(plan: Plan) -> None:
    """Depth and vocabulary of the decoder of captions; its width is that of the network."""
    captions = plan.facts.captions
    if captions is None:
        return
    plan.decide("decoder_depth", decoder_depth(captions), f"for {captions.total:,} captions")
    if plan.get("tokenizer", "bpe") == "bpe":
        text = f"at most; each word that occurs twice, about {captions.vocab_size:,} tokens"
        plan.decide("vocab_size", captions.most_vocab, text)


def decoder_depth(captions: CaptionStats) -> int:
    return next(depth for most, depth in DECODER_DEPTHS if captions.total < most)


def affordable_passes(flops: float, images: int, seconds: float, speed: float) -> float:
    """Passes over `images` that fit, with a network of `flops` an image at `speed` in FLOP/s."""
    room = max(seconds - FIXED_SECONDS, 0.3 * seconds) / images
    return room * speed / (TRAINING_FLOPS * GROWING_SHARE * flops)


def needed_passes(row: Network, images: int) -> float:
    """Passes over `images` from which on `row` is worth its cost."""
    fewer: float = (3000 / images) ** PASSES_POWER
    return max(row.passes * fewer, LEAST_PASSES)


def ladder_for(side: int) -> tuple[Network, ...]:
    """The networks for images of which the median short side is `side`."""
    return TINY_NETWORKS if side <= TINY_SIDE else PHOTO_NETWORKS


def with_chosen(row: Network, native: int, chosen: Mapping[str, Any]) -> Network:
    """`row` for images of which the median short side is `native`, and with what is chosen."""
    side = chosen.get("image_size", image_side(native, row))
    patch = chosen.get("patch_size")
    if patch is None:
        patch = patch_for(side, row.patch, convolutions=chosen.get("stem") == "conv")
    if "image_size" not in chosen:
        multiple = math.lcm(patch, *chosen.get("patch_sizes", ()))
        side = max(math.ceil(side / multiple), 1) * multiple
    stride = row.stem_stride if patch >= 8 else 1
    layers = row.stem_depth if patch == row.patch else max(3, patch.bit_length() - stride)
    dim, depth = chosen.get("dim", row.dim), chosen.get("depth", row.depth)
    width = min(row.stem_width, dim)
    sizes = {"side": side, "patch": patch, "dim": dim, "depth": depth}
    return row._replace(**sizes, stem_depth=layers, stem_stride=stride, stem_width=width)


def patch_for(side: int, usual: int, *, convolutions: bool = False) -> int:
    """Side of the patches of images of `side` pixels: at most `usual` if a stem of convolutions
    then makes at most 32 x 32 tokens, else what is nearest to it.

    Args:
        convolutions: Whether the stem must be one of convolutions, each of which halves the image.
    """
    least = 2 if side <= TINY_SIDE else 4
    sizes = (4, 8, 16, 32) if convolutions else range(least, 33)
    divisors = [p for p in sizes if side % p == 0 and (side >= 4 * p or p == 4)]
    for patch in (16, 8, 4):
        if patch <= usual and patch in divisors and side <= 32 * patch:
            return patch
    if not divisors:
        below = max(side // usual, 1) * usual
        raise ConfigError(
            f"image_size={side}: no patches of {least} to 32 pixels divide it; give {below} or "
            f"{below + usual}"
        )
    return min(divisors, key=lambda patch: abs(patch - usual))


def network_settings(network: Network) -> dict[str, int]:
    settings = {"image_size": network.side, "patch_size": network.patch}
    settings |= {"dim": network.dim, "depth": network.depth}
    if network.ratio != 4:
        settings["hidden_dim"] = network.ratio * network.dim
    settings |= {"stem_depth": network.stem_depth, "stem_width": network.stem_width}
    if network.patch >= 8 and network.stem_stride == 1:
        settings["stem_stride"] = 1
    return settings


def decide_stem(plan: Plan, network: Network) -> None:
    """Convolutions before the blocks, where patches have a side that they reach."""
    if not stem_reaches(network.patch, plan.values):
        text = f"convolutions do not reach patches of {network.patch} pixels"
        plan.decide("stem", "linear", text)
        return
    if plan.decide("stem", "conv", "worth more than ten points in as many minutes") != "conv":
        return
    why = f"for patches of {network.patch} pixels"
    if plan.decide("stem_depth", network.stem_depth, why) > 1:
        width = min(network.stem_width, network.dim)
        plan.decide("stem_width", width, "the first convolutions cost the most")
    if network.patch >= 8 and network.stem_stride == 1:
        plan.decide("stem_stride", 1, "small images are read in full detail")


def stem_reaches(patch: int, chosen: Mapping[str, Any]) -> bool:
    """Whether a convolutional stem can make the tokens of such patches."""
    return patch in (2, 4, 8, 16) and {"patch_sizes", "merge_tokens"}.isdisjoint(chosen)


def decide_optimisation(plan: Plan) -> None:
    """Batch, optimiser and learning rate."""
    facts = plan.facts
    parts = plan.parts
    usual = usual_batch(facts)
    if plan.fits is not None and facts.task_batch is not None:  # images of a part are compared
        held = 2 ** int(math.log2(max(plan.fits * facts.processes, 1)))
        usual = min(usual, max(facts.task_batch, held))
    if plan.fits is not None and plan.get("accumulate") is None:
        needed = usual / (plan.fits * facts.processes)
        parts *= 2 ** max(math.ceil(math.log2(needed)), 0)
    batch = even_batch(facts.images, usual, parts)
    why = (
        "its images learn from each other," if facts.task_batch else f"for {facts.images:,} images"
    )
    batch = plan.decide("batch_size", batch, f"{why} on {facts.device}")
    decide_micro_batches(plan, batch)
    epochs, timed = plan.chosen.get("epochs"), plan.chosen.get("time")  # which is the length then
    if plan.get("steps") is not None:
        plan.passes = plan.get("steps") * batch / facts.images
    elif epochs is not None and plan.get("epoch_steps") is None and timed is None:
        plan.passes = epochs
    if not plan.get("encoder_lr"):
        best, why = "muon", "fewer steps to the same accuracy than AdamW"
        if facts.sharded:
            best, why = "adamw", "Muon needs whole matrices, and FSDP divides them"
        optimizer = plan.decide("optimizer", best, why)
        if optimizer == "muon":
            factor = math.sqrt(max(batch, 64) / 64)
            lr = plan.decide("lr", round(1.85e-3 * factor, 5), "of matrices in blocks")
            plan.decide("fallback_lr", round(4e-3 * factor, 5), "of all other parameters")
            steps = max(plan.passes * facts.images / batch, 1)
            decay = max(DECAY / max(lr * steps, DECAY / MOST_DECAY), LEAST_DECAY)
            why = f"less in longer trainings: about {steps:,.0f} steps"
            plan.decide("weight_decay", float(f"{decay:.1g}"), why)
    plan.decide("schedule", "wsd", "constant, then linear: its length is settled late")
    if plan.get("depth") > 1:
        rate = 0.1 if plan.passes > 60 else 0.05 if plan.passes > 40 else 0.0
        plan.decide("drop_path", rate, counted_passes(plan.passes))


def decide_micro_batches(plan: Plan, batch: int) -> None:
    """Divide a batch that a GPU does not hold at once."""
    share, rest = divmod(batch, plan.facts.processes)
    if plan.fits is None or plan.fits >= share or rest:
        return
    least = math.ceil(share / plan.fits)
    parts = next(parts for parts in range(least, share + 1) if share % parts == 0)
    plan.decide("accumulate", parts, f"{plan.fits} images fit into the memory of the GPU at a time")


def decide_augmentation(plan: Plan) -> None:
    """How training images vary, and how all of them are resized."""
    tiny = plan.facts.side <= TINY_SIDE
    characters = tiny and plan.facts.grey and plan.facts.captions is None
    if plan.facts.captions is not None:
        decide_caption_crops(plan)
    elif characters:
        why = "small and grey: characters, which are neither mirrored nor cut"
        plan.decide("hflip", 0.0, why)
        if plan.get("random_crop") != "simple":
            plan.decide("min_crop", 1.0, why)
        if plan.get("cache") != "device":  # which does not rotate
            plan.decide("rotate", 10.0, "characters lean")
        plan.decide("translate", 0.08, "and are not centred")
    elif tiny and {"random_crop", "min_crop"}.isdisjoint(plan.values):
        plan.decide("min_crop", 1.0, "of so few pixels none can be missed")
        plan.decide("translate", 0.07, "whole images, a little shifted")
    elif plan.get("random_crop") != "simple":
        least = 0.6 if tiny else 0.35
        plan.decide("min_crop", least, "smaller crops hide the object from a small network")
    varies = not characters and plan.facts.captions is None  # captions name colours
    if plan.facts.channels and varies:
        plan.decide("color_jitter", 0.3, "brightness and contrast of each channel, and noise")
    elif plan.passes >= MANY_PASSES and varies and plan.get("color_jitter") != 0:
        why = f"{counted_passes(plan.passes)}: greyscale, solarised or blurred, then jittered"
        plan.decide("auto_augment", "three", why)
    plan.decide("interpolation", "bilinear", "quick, and as good at these sizes")
    if plan.get("resize") not in WHOLE:
        plan.decide("crop_share", 1.0, "the whole short side counts")


def decide_caption_crops(plan: Plan) -> None:
    """Neither mirror images nor small crops: captions name left, right and what is at the edges."""
    plan.decide("hflip", 0.0, "captions name left and right")
    if plan.get("random_crop") == "simple":
        return
    if plan.passes < MANY_PASSES:
        plan.decide("min_crop", 1.0, "captions describe the whole image")
    else:
        why = f"{counted_passes(plan.passes)}, and captions name what is at the edges"
        plan.decide("min_crop", CAPTION_CROP, why)


def decide_validation(plan: Plan, seconds: float) -> None:
    """Share of the images that are held out."""
    facts = plan.facts
    total = facts.labels + facts.validation
    affordable = int(VALIDATION_TIME * seconds * plan.speed / plan.flops)
    multilabel = VALIDATION_OF_CLASS * facts.classes
    held_out = min(max(affordable, LEAST_VALIDATION, multilabel), max(MOST_VALIDATION, multilabel))
    if facts.divided and "folds" not in plan.chosen and total * 0.2 > held_out:
        within = 100 * 1.96 * 0.5 / math.sqrt(held_out)
        plan.decide(
            "val_share",
            round(held_out / total, 4),
            f"{held_out:,} images measure within {within:.1f} points",
        )


def decide_cache(plan: Plan) -> None:
    """Keep decoded images in memory, where they fit: in that of a GPU if it can augment them."""
    facts = plan.facts
    crop = plan.get("min_crop", 1.0)
    kept = min(plan.get("image_size", facts.side) / math.sqrt((crop + 1) / 2), facts.side)
    bytes_needed = (4 * facts.channels or 3) * facts.images * kept**2 * 1.5
    fits = bytes_needed < min(MOST_CACHE, CACHE_SHARE * facts.memory)
    if not fits or plan.get("decode") == "exact":
        return
    every = plan.values
    augment = AugmentConfig(
        **{one.name: every[one.name] for one in fields(AugmentConfig) if one.name in every}
    )
    decoded = f"{format_bytes(bytes_needed)} decoded once"
    # of a GPU that holds a part of the batch at a time, nothing is left
    on_device = plan.fits is None and bytes_needed < CACHE_SHARE * facts.device_memory
    # that of channels has not been measured on a GPU
    on_device &= not facts.channels and plan.get("resize") not in WHOLE
    if on_device and augment.unbatched is None:
        plan.decide("cache", "device", f"{decoded}; the GPU crops and varies them")
    else:
        plan.decide("cache", "ram", decoded)


def image_side(native: int, row: Network) -> int:
    """Side of the images that a network sees: its own where it is tiny, never far above it."""
    if native <= TINY_SIDE:
        unit = 4 if native <= 24 else 8
        return max(math.ceil(native / unit) * unit, 16)
    return max(min(row.side, native // row.patch * row.patch), 48)


def usual_batch(facts: Facts) -> int:
    """Images of a step for this number of training images on this type of device."""
    sizes = ((400, 16), (1200, 32), (20_000, 64), (200_000, 128), (math.inf, 256))
    batch = facts.task_batch or next(size for most, size in sizes if facts.images < most)
    return batch if facts.device == "cpu" else 4 * batch


def even_batch(images: int, size: int, parts: int) -> int:
    """A batch of about `size` that leaves few of `images` images out of a pass.

    A multiple of two images for each of `parts`, where there are several and images enough.
    """
    steps = math.ceil(images / size)
    batch = size if steps > FEW_STEPS else images // steps
    return divisible_batch(max(batch, min(2 * parts, images)), parts)


def divisible_batch(size: int, parts: int) -> int:
    """The largest batch up to `size` of a multiple of two images for each of several `parts`.

    With too few for that, of one image for each at least.
    """
    if parts == 1:
        return size
    return size // (2 * parts) * 2 * parts or size // parts * parts or parts


def counted_passes(passes: float) -> str:
    """`12 passes`, `1.4 passes`, `0.02 passes`."""
    digits = 0 if passes >= 10 else 1 if passes >= 0.95 else 1 - math.floor(math.log10(passes))
    return f"{passes:.{digits}f} passes"


def flops_of(network: Network, chosen: Mapping[str, Any]) -> float:
    """FLOPs of a network for one image, forward; with a convolutional stem, or a linear one."""
    side, patch, dim, depth, ratio, layers, width, _, stride = network
    tokens = (side / patch) ** 2
    hidden = chosen.get("hidden_dim") or ratio * dim
    total = depth * ((8 * dim + 4 * hidden) * dim * tokens + 4 * tokens**2 * dim)
    if chosen.get("stem", "conv") != "conv" or not stem_reaches(patch, chosen):
        return 6.0 * side**2 * dim + total
    layers = chosen.get("stem_depth") or layers
    width = chosen.get("stem_width") or width
    stride = chosen.get("stem_stride") or stride
    widths = [3, *(min(width << n, dim) for n in range(layers - 1)), dim]
    pools, pixels = int(math.log2(patch / stride)), side / stride
    for index in range(layers):
        total += 2 * 9 * widths[index] * widths[index + 1] * pixels**2
        if index >= layers - pools:
            pixels /= 2
    return total


def flops_with_captions(
    network: Network, chosen: Mapping[str, Any], captions: CaptionStats | None
) -> float:
    """`flops_of`, with those of a decoder for a caption of mean length if there are `captions`."""
    encoder = flops_of(network, chosen)
    if captions is None:
        return encoder
    dim = chosen.get("decoder_dim") or network.dim
    hidden = chosen.get("decoder_hidden_dim") or 4 * dim
    depth = chosen.get("decoder_depth", decoder_depth(captions))
    words, image = captions.tokens, (network.side / network.patch) ** 2
    matrices = (12 * dim + 4 * hidden) * dim * words + 4 * network.dim * dim * image
    attention = 4 * (words + image) * words * dim
    logits = 2 * dim * captions.vocab_size * words
    return float(encoder + depth * (matrices + attention) + logits)
