"""How pretrained weights are trained: the method, image size and settings that the time allows.

facts of the data and the machine -> method and size of each network -> settings of the chosen one

vit/training/backbone_selection.py chooses the network. The rules stand on the literature, and on
what docs/fine-tuning.md measured with weights of our own; see docs/recipes.md. A setting that
somebody chose is a fact to all rules after it.

Sources: Kumar et al., "Fine-Tuning can Distort Pretrained Features", arXiv:2202.10054 (a probe,
then fine-tuning from its head); Kolesnikov et al., "Big Transfer (BiT)", section 3.3,
arXiv:1912.11370 (small images are resized up, to 128 pixels).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vit.config import ModelConfig
from vit.config.setting_layers import all_settings
from vit.config.training_config import NO_PROBE
from vit.data.preprocessing import Preprocessing
from vit.training.finetune.finetune_settings import DEFAULTS
from vit.training.finetune.linear_probe import MAX_PROBE_IMAGES
from vit.training.plan_rules import (
    FIXED_SECONDS,
    GROWING_SHARE,
    TINY_SIDE,
    TRAINING_FLOPS,
    Choice,
    Facts,
    Plan,
    decide_cache,
    decide_time,
    decide_validation,
    divisible_batch,
    has_all_folds,
    make_plan,
    planned_seconds,
)
from vit.weights.backbone_list import Backbone, license_name

# Sides of images: the first one, unless no network fits the time with it.
PHOTO_SIZES, TINY_SIZES = (224, 160, 128), (128, 96)
# Up to this number of images the head of a probe stays the best model (docs/fine-tuning.md).
PROBED_IMAGES = 500
# Passes over the images that steps are worth beginning with, and more than which overfit.
LEAST_PASSES, MOST_PASSES = 4, 50
# Millions of parameters that need no drop path.
SMALL_NETWORK = 10
# Labelled images from which on a network of `vit pretrain` is trained as from scratch (measured:
# docs/lab-notebook.md).
MANY_LABELS = 1000
# What the plan would decide of a network that is there.
ARCHITECTURE = (
    *("image_size", "patch_size", "dim", "depth", "num_heads", "hidden_dim", "position"),
    *("pooling", "class_token", "stem"),
)
# FLOPs of a training step in those of a forward pass, where not all is learned: the blocks of a
# frozen backbone have no backward pass.
STEP_FLOPS = {"full": TRAINING_FLOPS, "lora": TRAINING_FLOPS, "linear": 1, "probe": 1}


@dataclass(frozen=True)
class WeightsChoice:
    """How weights are trained in the time."""

    weights: Backbone
    method: str
    image_size: int
    passes: float
    """Of training over the images that fit the time."""
    seconds: float
    """Estimate of one pass of the method, with the validation images."""
    fits: bool


@dataclass(frozen=True)
class Rules:
    """What fits the time."""

    facts: Facts
    chosen: Mapping[str, Any]
    one_class: bool = True

    def choose(self, weights: Backbone) -> WeightsChoice | None:
        """How `weights` are trained; None if their patches do not divide the images.

        Steps where enough passes fit, else a probe, whose images may be smaller.
        """
        first, *smaller = self.sizes(weights)
        tries = [(method, first) for method in self.methods]
        tries += [(self.methods[-1], size) for size in smaller]
        choice = None
        for method, size in tries:
            if "image_size" in self.chosen and weights.size(size) != size:
                continue
            choice = self.estimate(weights, method, size)
            if choice.fits:
                break
        return choice

    def sizes(self, weights: Backbone) -> tuple[int, ...]:
        if "image_size" in self.chosen:
            return (int(self.chosen["image_size"]),)
        if weights.image_size < PHOTO_SIZES[-1]:
            return (weights.image_size,)
        return TINY_SIZES if self.facts.side <= TINY_SIDE else PHOTO_SIZES

    @property
    def methods(self) -> tuple[str, ...]:
        """What to try, the preferred one first."""
        if self.chosen.get("method") is not None:
            return (str(self.chosen["method"]),)
        if self.chosen.get("freeze_epochs"):
            return ("full",)
        if not self.one_class:
            return ("full", "linear")
        steps = [n for n in self.chosen if "probe" in all_settings()[n].properties.unused_by]
        if self.chosen.get("probe_first") or {*steps} - {"time"}:
            return ("full",)
        return ("probe",) if self.facts.images <= PROBED_IMAGES else ("full", "probe")

    def estimate(self, weights: Backbone, method: str, wanted: int) -> WeightsChoice:
        """What `method` takes with `weights` on images of `wanted` pixels, and whether it fits."""
        facts, size = self.facts, weights.size(wanted)
        forward = weights.flops(size) / max(speed_of(facts, weights.flops(size)), 1.0)
        total = planned_seconds(facts)
        room = max(total - FIXED_SECONDS, 0.3 * total)
        seen = facts.images + facts.validation
        if method == "probe":
            each, passes = forward * seen, 1.0
            fits = each <= room
        else:
            each = forward * (STEP_FLOPS[method] * facts.images + facts.validation)
            if self.one_class and self.chosen.get("probe_first") is not False:
                probed = min(facts.images, MAX_PROBE_IMAGES["train"]) + min(
                    facts.validation, MAX_PROBE_IMAGES["val"]
                )
                room -= forward * probed
            passes = max(room, 0.0) / each
            fits = passes >= LEAST_PASSES
        return WeightsChoice(weights, method, size, passes, each, fits)


def plan_weights(
    facts: Facts, chosen: Mapping[str, Any], choice: WeightsChoice, *, one_class: bool = True
) -> Plan:
    """Settings of a training from the weights of `choice`, each with its reason."""
    plan = Plan(facts, {name: chosen[name] for name in chosen if name != "weights"})
    weights, size, method = choice.weights, choice.image_size, choice.method
    plan.passes, plan.flops = choice.passes, weights.flops(size)
    plan.speed = speed_of(facts, plan.flops)
    plan.decide("weights", weights.source, weights_reason(choice))
    up = f"images of {facts.side} px are resized up" if facts.side < size else ""
    smaller = "fewer tokens than at 224 px, for the time" if size < weights.size(224) else ""
    if facts.side <= TINY_SIDE and smaller:
        smaller = "more pixels would add no detail (BiT)"
    why = ", ".join(filter(None, (up, smaller))) or "the size of pretraining's end"
    plan.decide("image_size", size, why)
    plan.decide("method", method, method_reason(choice, facts, one_class=one_class))
    if method != "probe":
        decide_steps(plan, choice, one_class=one_class)
    elif "time" in chosen:
        why = f"{chosen['time']} chose the network: a probe ends when its head is fitted"
        plan.overrule("time", None, why)
    decide_validation(plan, planned_seconds(facts))
    if method != "probe":
        decide_cache(plan)
    return plan


def speed_of(facts: Facts, cost: float) -> float:
    """Floating-point operations a second of weights whose network needs `cost` for an image."""
    return facts.nearest(cost).flops if facts.device == "cuda" else facts.flops


def architecture_settings(model: ModelConfig, images: Preprocessing) -> dict[str, Any]:
    """What `make_plan` would decide of a network and its images, as those of weights have it."""
    found = {name: getattr(model, name) for name in ARCHITECTURE}
    if model.stem == "conv":
        found |= {name: getattr(model, name) for name in ("stem_depth", "stem_width")}
        found["stem_stride"] = model.stem_stride
    found |= {name: getattr(images, name) for name in ("resize", "crop_share", "interpolation")}
    several = ("patch_sizes", "merge_tokens")
    return found | {name: getattr(model, name) for name in several if getattr(model, name)}


def plan_after_pretraining(
    facts: Facts,
    chosen: Mapping[str, Any],
    network: Mapping[str, Any],
    *,
    one_class: bool = True,
) -> Plan:
    """Settings of a training from a run of `vit pretrain` on images like these.

    Many labels train it as they would from scratch. Few overfit so, and fine-tuning is gentle:
    the settings of its method stay. Those that a teacher gives are not counted: it knows no more.
    """
    of_network = {name: Choice(value, "as pretrained") for name, value in network.items()}
    plan = make_plan(facts, chosen, of_network)
    usual = DEFAULTS["full"]
    if one_class and facts.labels >= MANY_LABELS:
        for name in sorted({*usual} - {"epochs", "min_crop"} - {*plan.choices}):
            plan.decide(name, all_settings()[name].default, "as from scratch")
        plan.decide("probe_first", False, "all parameters learn as from scratch")
        why = f"{facts.labels:,} labels are enough to train all parameters as from scratch"
        plan.decide("method", "full", why)
        return plan
    plan.choices = {name: plan.choices[name] for name in network if name in plan.choices}
    batch = divisible_batch(usual["batch_size"], plan.parts)
    batch = plan.decide("batch_size", batch, "of fine-tuning")
    if plan.get("steps") is not None:
        plan.passes = plan.get("steps") * min(batch, facts.images) / facts.images
    elif "time" in chosen:
        plan.passes *= GROWING_SHARE  # images do not grow
        if one_class:
            limit_epochs(plan)
    elif "epochs" not in chosen:
        epochs, why = usual["epochs"], "of fine-tuning; --epochs N sets others"
        possible = int(min(GROWING_SHARE * plan.passes, MOST_PASSES))
        if one_class and possible > epochs and plan.get("epoch_steps") is None:
            epochs, why = possible, "in a sensible time for so few; --epochs N sets others"
        plan.passes = plan.decide("epochs", epochs, why)
    why = "images of several classes: the small steps of fine-tuning"
    if one_class and not any(map(plan.chosen.get, NO_PROBE)):
        plan.decide("probe_first", True, "steps begin with the head of a probe (LP-FT)")
        why = f"{facts.labels:,} labels are few: a probe, then small steps from its head (LP-FT)"
    plan.decide("method", "full", why)
    return plan


def weights_reason(choice: WeightsChoice) -> str:
    """Licence, size and origin."""
    weights = choice.weights
    origin = f", {weights.pretrained_on} ({weights.paper})" if weights.pretrained_on else ""
    late = "" if choice.fits else "; the cheapest there is, and it may take longer than the time"
    size = f"{weights.parameters:.1f} M parameters"
    return f"{license_name(weights.license)}, {size}{origin}{late}"


def method_reason(choice: WeightsChoice, facts: Facts, *, one_class: bool) -> str:
    if choice.method == "probe":
        head = f"a head alone, in about {choice.seconds + FIXED_SECONDS:,.0f} s"
        if facts.images <= PROBED_IMAGES:
            return f"{head}: {facts.images:,} images are too few to train all of it"
        return f"{head}: {LEAST_PASSES} passes of training do not fit"
    if choice.method == "linear" and not one_class:
        return f"the head alone: {LEAST_PASSES} passes of training all do not fit"
    return f"about {choice.passes:.0f} passes over {facts.images:,} images fit"


def decide_steps(plan: Plan, choice: WeightsChoice, *, one_class: bool) -> None:
    """Length, batch, optimisation and augmentation of a training by steps."""
    facts, usual = plan.facts, DEFAULTS[choice.method]
    if one_class and not any(map(plan.chosen.get, NO_PROBE)):
        plan.decide("probe_first", True, "steps begin with the head of a probe (LP-FT)")
    if {"epochs", "steps"}.isdisjoint(plan.values) and not limit_epochs(plan):
        decide_time(plan)
        plan.decide("schedule", "wsd", "constant, then linear: its length is settled late")
    batch = 32 if facts.images < 1200 else int(usual["batch_size"])
    if facts.device != "cpu" and facts.images >= 5000:
        batch *= 2
    batch = divisible_batch(min(batch, facts.images), plan.parts)
    batch = plan.decide("batch_size", batch, f"for {facts.images:,} images")
    if facts.device == "cuda":
        plan.decide("accumulate", None, "as -b auto: as many of a batch at a time as the GPU holds")
    factor = math.sqrt(batch / usual["batch_size"])
    lr = float(f"{usual['lr'] * factor:.2g}")
    plan.decide("lr", lr, f"of {choice.method} fine-tuning with AdamW, at a batch of {batch}")
    if choice.method == "full":
        plan.decide("layer_decay", usual["layer_decay"], "early layers know edges already (BEiT)")
        millions = choice.weights.parameters
        deep = 0.1 if millions > SMALL_NETWORK and choice.passes > 8 else 0.0
        why = f"{choice.passes:.0f} passes of {millions:.0f} M parameters"
        plan.decide("drop_path", deep, why)
    else:
        plan.decide("weight_decay", usual["weight_decay"], "little is learned")
    if facts.grey and facts.side <= TINY_SIDE:
        plan.decide("hflip", 0.0, "small and grey: characters, which are not mirrored")
    if plan.get("random_crop") != "simple":
        long = facts.side > TINY_SIDE and choice.passes > 12
        why = "a long training of large images bears strong crops" if long else "mild, as measured"
        plan.decide("min_crop", 0.5 if long else usual["min_crop"], why)
    plan.decide("smoothing", usual["smoothing"], "the weights are sure of little as it is")


def limit_epochs(plan: Plan) -> bool:
    """Decide epochs where more gain nothing, or each fold has its own; returns whether it did."""
    if not {"epochs", "steps"}.isdisjoint(plan.values):
        return False
    all_folds = has_all_folds(plan)
    # an estimate, so what is a bit more is not cut; an epoch of --epoch-steps is no pass
    many = plan.passes > 2 * MOST_PASSES and plan.get("epoch_steps") is None
    if not (all_folds or many):
        return False
    epochs = int(min(max(plan.passes, LEAST_PASSES), MOST_PASSES))
    if "time" in plan.chosen and not all_folds:
        plan.overrule("time", None, f"{plan.get('time')} has room for more epochs")
    why = "more gain nothing" if epochs == MOST_PASSES else "for each fold"
    plan.passes = plan.decide("epochs", epochs, why)
    return True
