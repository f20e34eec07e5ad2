"""Model card (README.md) of a converted model: architecture, source, usage, scores, classes."""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from vit.config.stored_config import run_folder_of
from vit.event_log import METRICS_FILE, Event, ranking_metric, read_event_log, saved_event
from vit.text import printable
from vit.version import __version__
from vit.weights.formats.pretrained import Pretrained

CARD_FILE = "README.md"
MAX_LISTED_CLASSES = 100

USAGE = {
    "timm": """```python
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```""",
    "huggingface": """```python
from transformers import pipeline

classify = pipeline("image-classification", model="FOLDER")
classify("image.jpg")
```""",
}
STEM_USAGE = """This network has a convolutional stem, which {library} knows once vit is imported:
`pip install` vit and begin with `import vit`."""
TASKS = {True: "image-classification", False: "image-feature-extraction"}
LIBRARIES = {"timm": "timm", "huggingface": "transformers"}


def model_card(
    source: str | os.PathLike[str],
    pretrained: Pretrained,
    to: str,
    *,
    name: str,
    with_scores: bool = True,
) -> str:
    """Write the text of the model card."""
    config, best = pretrained.config, best_event(Path(source))
    use = USAGE[to]
    if config.stem == "conv":
        use = use.replace("```python", "```python\nimport vit\n", 1)
    front: dict[str, Any] = {
        "library_name": LIBRARIES[to],
        "pipeline_tag": TASKS[config.num_classes > 0],
        "tags": ["image-classification", "vision-transformer", LIBRARIES[to]],
    }
    if pretrained.license:
        front |= license_metadata(pretrained.license)
    parts = [
        f"# {printable(Path(source).name)}",
        f"A Vision Transformer: {config.depth} blocks of {config.num_heads} heads, width "
        f"{config.dim}, patches of {config.patch_size} px, images of {config.image_size} px. "
        f"Made from {printable(pretrained.origin)} by vit {__version__}.",
        *([STEM_USAGE.format(library=LIBRARIES[to])] if config.stem == "conv" else []),
        use.replace("FOLDER", printable(name)),
    ]
    if with_scores and best is not None:
        parts.append(f"## Scores\n\n{describe_score(best)} (loss {best['val_loss']:.4f}).")
    if pretrained.classes:
        names = [printable(name).replace("|", "\\|") for name in pretrained.classes]
        more = (
            f" and {len(names) - MAX_LISTED_CLASSES} more"
            if len(names) > MAX_LISTED_CLASSES
            else ""
        )
        parts.append(f"## Classes\n\n{', '.join(names[:MAX_LISTED_CLASSES])}{more}")
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(parts) + "\n"


def license_metadata(license_: str) -> dict[str, str]:
    """License fields of the hub's front matter: a short identifier, or `other` with its name."""
    if re.fullmatch(r"[a-z0-9.-]+", license_):
        return {"license": license_}
    return {"license": "other", "license_name": license_}


def best_event(run: Path) -> Event | None:
    """The event in metrics.jsonl of the weights in model.safetensors; None without one."""
    log = read_event_log(run_folder_of(run) / METRICS_FILE, "epoch", "soup")
    best = None if log.damage else saved_event(log.events)
    return best if best and {"val_top1", "chosen_by"} & best.keys() else None


def describe_score(event: Event) -> str:
    """The score as text."""
    metric = ranking_metric(event)
    if metric == "val_loss":
        return f"Loss on its validation images: {event['val_loss']:.4f}"
    names = {"val_map": "Mean average precision", "val_balanced_accuracy": "Balanced accuracy"}
    return f"{names.get(metric, 'Top-1')} on its validation images: {event[metric]:.2%}"
