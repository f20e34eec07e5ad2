"""The metric that ranks epochs, and the scores of an epoch as text."""

from collections.abc import Mapping
from typing import Any

from vit.generation.caption_likelihood import ignores_image

Event = Mapping[str, Any]

MIN_CIDER_IMAGES = 100
"""Validation images below which CIDEr is too noisy to rank epochs."""
NOTABLE_DIFFERENCE = 0.05
"""Difference of balanced accuracy and accuracy above which both are logged."""


def rank(event: Event) -> tuple[float, float]:
    """Sort key, higher is better: accuracy, mean average precision or CIDEr, then negative loss.

    `chosen_by` in the event names the score of a task that has another one than accuracy.
    With both tasks, and with few images for CIDEr, the loss is the only criterion.
    """
    loss = -float(event["val_loss"])
    few = event.get("val_images", MIN_CIDER_IMAGES) < MIN_CIDER_IMAGES
    if "val_cider" in event and ("val_top1" in event or few):
        return loss, 0.0
    name = "val_cider" if "val_cider" in event else event.get("chosen_by", "val_top1")
    return float(event[name]), loss


def format_scores(event: Event) -> str:
    """The scores of an event for a log line, without the loss."""
    parts = []
    if "val_top1" in event:
        parts.append(f"val top-1 {event['val_top1']:.2%}")
        balanced = event.get("val_balanced_accuracy", event["val_top1"])
        if "chosen_by" in event or abs(balanced - event["val_top1"]) >= NOTABLE_DIFFERENCE:
            parts.append(f"balanced {balanced:.2%}")
    if "val_map" in event:
        parts.append(f"val mAP {event['val_map']:.2%}  F1 {event['val_f1']:.2%}")
    if "val_cider" in event:
        own = event.get("val_caption_loss")
        parts += [] if own is None else [f"captions {own:.3f}"]
        parts.append(
            f"with other images {event['val_loss_shuffled']:.3f}  BLEU-4 {event['val_bleu4']:.3f}"
            f"  CIDEr {event['val_cider']:.3f}"
        )
    if event.get("val_exact"):
        parts.append(f"exact {event['val_exact']:.2%}")
    return "  ".join(parts)


def format_result(event: Event) -> str:
    """The scores of an event for the last log line."""
    loss = f"loss {event['val_loss']:.3f}, " if "val_cider" in event else ""
    return f"validation {loss}{format_scores(event).replace('val ', '')}"


def ignored_images_note(event: Event) -> str | None:
    """A log line if captions fit shuffled images as well as their own; else None."""
    if "val_loss_shuffled" not in event or event.get("val_images", 2) < 2:
        return None
    right, wrong = event.get("val_caption_loss", event["val_loss"]), event["val_loss_shuffled"]
    if not ignores_image(right, wrong):
        return None
    return (
        f"note: the decoder ignores the images: its loss is {right:.3f}, and "
        f"{wrong:.3f} with other images; more epochs or --caption-dropout 0.3 may help"
    )
