"""What an epoch's event says of its worth: which is better, and how a person is told."""

from collections.abc import Mapping
from typing import Any

from vit.generation.caption_likelihood import ignores_image

Event = Mapping[str, Any]

ENOUGH = 100
"""Validation images of which CIDEr tells one epoch from another."""
MUCH = 0.05
"""By how much balanced accuracy differs from accuracy where a person should know it."""


def rank(event: Event) -> tuple[float, float]:
    """What a better epoch has more of: accuracy, average precision or CIDEr, then the lower loss.

    Where classes are balanced, accuracy is balanced accuracy: the event says so.
    With both tasks, and where CIDEr is that of a few images, the loss alone.
    """
    loss = -float(event["val_loss"])
    few = event.get("val_images", ENOUGH) < ENOUGH
    if "val_cider" in event and ("val_top1" in event or few):
        return loss, 0.0
    name = "val_cider" if "val_cider" in event else event.get("chosen_by", "val_top1")
    return float(event[name]), loss


def told(event: Event) -> str:
    """The scores for a line, without the loss."""
    parts = []
    if "val_top1" in event:
        parts.append(f"val top-1 {event['val_top1']:.2%}")
        balanced = event.get("val_balanced_accuracy", event["val_top1"])
        if "chosen_by" in event or abs(balanced - event["val_top1"]) >= MUCH:
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


def verdict(event: Event) -> str:
    """The scores for the last line."""
    loss = f"loss {event['val_loss']:.3f}, " if "val_cider" in event else ""
    return f"validation {loss}{told(event).replace('val ', '')}"


def blindness(event: Event) -> str | None:
    """A line to the user where captions fit other images as well; None where they do not."""
    if "val_loss_shuffled" not in event or event.get("val_images", 2) < 2:
        return None
    right, wrong = event.get("val_caption_loss", event["val_loss"]), event["val_loss_shuffled"]
    if not ignores_image(right, wrong):
        return None
    return (
        f"note: the decoder does not look at the images: its loss is {right:.3f}, and "
        f"{wrong:.3f} with other images; more epochs or --caption-dropout 0.3 may help"
    )
