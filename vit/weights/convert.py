"""Converts any weight source to a folder that timm or Hugging Face transformers opens, with a model
card (README.md).

The folder is written to a temporary name and renamed when complete and checked. `check_parity`
compares the outputs of the other library with ours: image -> our preprocessing, our network, and
image -> the library's, as loaded from the folder.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit.atomic_files import atomic_folder, write_text
from vit.config import ModelConfig
from vit.config.setting_layers import read_stored_settings
from vit.config.stored_config import has_stored_config, run_folder_of
from vit.data.image_io import read_image
from vit.data.sources import builtin_datasets
from vit.errors import ConfigError, RunError, WeightsError, error_text
from vit.event_log import METRICS_FILE, Event, ranking_metric, read_event_log, saved_event
from vit.text import Notify, print_to_stderr, printable
from vit.version import __version__
from vit.weights.adapt_weights import fit_preprocessing
from vit.weights.formats.huggingface_config import processor_notes
from vit.weights.formats.huggingface_writer import write_huggingface
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.timm_config_writer import (
    incompatibility_remedy,
    timm_config,
    timm_incompatibility,
)
from vit.weights.hub import check_repository_name, push_to_hub
from vit.weights.load_model import (
    Source,
    build_from_state,
    describe_source,
    numbered_classes,
    open_pretrained,
    preprocessing_or_default,
)
from vit.weights.safetensors_io import DIGEST, write_tensors
from vit.weights.saved_model import to_timm

Library = Literal["timm", "huggingface"]

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
STEM_USAGE = """This network has a convolutional stem, which {library} knows once it is registered:
`pip install` vit and begin with `import {module}`."""
TASKS = {True: "image-classification", False: "image-feature-extraction"}

HUB_METRICS = {"val_top1": "accuracy", "val_map": "mean_average_precision", "val_kappa": "kappa"}
"""Score of an epoch -> its name in a model-index."""
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
PROCESSOR_FILE = "preprocessor_config.json"

MULTILABEL_NOTES = {
    "timm": "images may have several classes: take sigmoids of timm's logits",
    "huggingface": "problem_type is multi_label_classification: take sigmoids of its logits",
}
PLUG_INS = {
    "timm": "vit.weights.formats.timm_conv_stem",
    "huggingface": "vit.weights.formats.huggingface_classes",
}
"""Modules of ours that register the network with a convolutional stem when they are imported."""
LIBRARIES = {"timm": "timm", "huggingface": "transformers"}

# Same weights and pixels differ by rounding only; another resizing changes scores further.
OUTPUT_TOLERANCE = 1e-3
SCORE_TOLERANCE = 0.01

METADATA = {"format": "pt"}
"""Of the file of weights, beside its digest; that of a run folder has more keys."""
FILES = (CONFIG_FILE, WEIGHTS_FILE, PROCESSOR_FILE, CARD_FILE)


def convert(
    source: Source,
    to: Library,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    merge_tokens: int | None = None,
    check: Callable[[Pretrained, Path], object] = lambda _pretrained, _folder: None,
) -> tuple[Pretrained, list[str]]:
    """Write the folder `out`, with a model card; returns the converted weights, and lines for the
    user."""
    place = Path(out).absolute()
    check_replaceable(place, source, overwrite=overwrite)
    found = fit_preprocessing(open_pretrained(source))
    if found.answers is not None:
        raise ConfigError(
            f"to={to!r}: {source} answers with numbers, and their scale has no place in that "
            "folder; vit export writes files that answer in units"
        )
    config = found.config
    if merge_tokens is not None:
        config = dataclasses.replace(config, merge_tokens=merge_tokens)
    if to == "huggingface" and config.pooling == "none" and config.class_token:
        config = dataclasses.replace(config, pooling="class_token")  # a captioning encoder
    pretrained = dataclasses.replace(found, config=config)
    lines = conversion_notes(found.config, pretrained, to)
    files = folder_contents(pretrained, to)
    has_scores = config == found.config
    card = model_card(source, pretrained, to, name=place.name, with_scores=has_scores)
    with atomic_folder(place) as folder:
        for name, content in files.items():
            if isinstance(content, str):
                write_text(folder / name, content)
            else:
                write_tensors(folder / name, content, METADATA)
        write_text(folder / CARD_FILE, card)
        check(pretrained, folder)
    return pretrained, lines


def convert_model(
    source: Source,
    to: Library,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    merge_tokens: int | None = None,
    image: str | os.PathLike[str] | None = None,
    push: str | None = None,
    private: bool = False,
    notify: Notify = print_to_stderr,
) -> str | None:
    """Convert `source`, compare the outputs, and upload the folder if requested: `vit convert`.

    Args:
        source, to, out, overwrite, merge_tokens: As for `convert`.
        image: Image for the comparison; the built-in sheet of digits by default.
        push: OWNER/NAME of a repository of the Hugging Face Hub to upload to.
        private: Make a new repository private.
        notify: Called with lines about the source, the conversion and the comparison.

    Returns:
        URL of the repository, if `push` is given.

    Raises:
        VitError: As `convert` and `check_parity`, or the upload fails.
    """
    if push:
        check_repository_name(push)
    elif private:
        raise ConfigError("--private is of a repository: give --push OWNER/NAME as well")
    image = image or Path(builtin_datasets.__file__).parent / "digits.png"
    read_image(str(image))  # an error comes before anything is written
    parity: list[str] = []
    pretrained, lines = convert(
        source,
        to,
        out,
        overwrite=overwrite,
        merge_tokens=merge_tokens,
        check=lambda converted, folder: parity.extend(check_parity(converted, folder, to, image)),
    )
    for line in (*describe_source(source, pretrained), *lines, *parity):
        notify(line)
    return push_to_hub(Path(out), push, private=private) if push else None


def conversion_notes(source: ModelConfig, pretrained: Pretrained, to: Library) -> list[str]:
    """Lines on what the folder lacks, what it requires, and what was assumed."""
    preprocessing, assumed = preprocessing_or_default(pretrained)
    calibration = pretrained.calibration
    notes = [
        f"{name}={getattr(source, name)} is not written: answers are the same, but the other "
        "library trains without it"
        for name in ("patch_sizes", "patch_dropout")
        if getattr(source, name)
    ]
    if source.stem == "conv":
        notes.append(f"stem=conv: {LIBRARIES[to]} opens that folder after `import {PLUG_INS[to]}`")
    if source.merge_tokens != pretrained.config.merge_tokens:
        notes.append(
            f"without the merge_tokens={source.merge_tokens} of its training the network gives "
            "other answers, so the card has no scores"
        )
    notes += [assumed.removeprefix("note: ")] if assumed else []
    if preprocessing.intensity_range is not None:
        low, high = preprocessing.intensity_range
        notes.append(
            f"values from {low:g} to {high:g} of images of more than 8 bits per channel became "
            "black to white in training; scale them so before the other library reads them"
        )
    if pretrained.decoder is not None:
        notes.append("only the encoder is written: the decoder has no place in that folder")
    if pretrained.thresholds is not None:
        notes.append(
            f"{MULTILABEL_NOTES[to]}; the thresholds of the classes have no place in that folder"
        )
    if calibration is not None and calibration.scales:
        notes.append(
            "the scores of that folder are raw: the calibration (temperature "
            f"{calibration.temperature:.6g}, exponent {calibration.exponent:.6g}) has no place "
            "there"
        )
    if to == "huggingface":
        notes += processor_notes(preprocessing)
    return [f"note: {note}" for note in notes]


def folder_contents(pretrained: Pretrained, to: Library) -> dict[str, str | Mapping[str, Tensor]]:
    """Files of the folder by name: text, or tensors."""
    preprocessing, _ = preprocessing_or_default(pretrained)
    config, classes = pretrained.config, pretrained.classes or numbered_classes(pretrained)
    if to == "timm":
        if (reason := timm_incompatibility(config)) is not None:
            remedy = incompatibility_remedy(reason)
            raise WeightsError(f"timm cannot express this network: {reason}{remedy}")
        settings = timm_config(config, classes, preprocessing)
        if pretrained.license:
            settings["pretrained_cfg"]["license"] = pretrained.license
        tensors = to_timm(pretrained.state, config)
        return {CONFIG_FILE: to_json(settings), WEIGHTS_FILE: tensors}
    settings, processor, tensors = write_huggingface(
        pretrained.state,
        config,
        classes or None,
        preprocessing,
        multilabel=pretrained.thresholds is not None,
    )
    return {
        CONFIG_FILE: to_json(settings),
        PROCESSOR_FILE: to_json(processor),
        WEIGHTS_FILE: tensors,
    }


def to_json(content: Mapping[str, Any]) -> str:
    """Format a JSON file."""
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def check_replaceable(out: Path, source: Source, *, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it may be overwritten and `vit convert` wrote it."""
    if not os.path.lexists(out):
        return
    given = Path(source).absolute().resolve()
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if not overwrite:
        reason = "exists: give another --out, or --overwrite"
    elif given.exists() and out.resolve() in (given, *given.parents):
        reason = "holds the source, which is not overwritten: give another --out"
    elif out.is_symlink() or not names <= {*FILES} or (names and not _is_converted(out)):
        reason = "is no folder that vit convert wrote: give another --out"
    else:
        return
    raise RunError(f"{out} {reason}")


def _is_converted(folder: Path) -> bool:
    """Whether `convert` wrote the file of weights, by its metadata."""
    path = folder / WEIGHTS_FILE
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        return {*(file.metadata() or {})} == {*METADATA, DIGEST}
    return False


def check_parity(
    pretrained: Pretrained, folder: Path, to: str, pil_image: str | os.PathLike[str]
) -> list[str]:
    """Compare the outputs of the converted folder with ours, and return lines for the user."""
    if to == "huggingface" and importlib.util.find_spec("transformers") is None:
        return ["note: transformers is not installed here, so its answers were not compared"]
    if pretrained.config.channels != 3:
        return ["note: answers are compared for networks of RGB images only"]
    image = read_image(os.fspath(pil_image))
    preprocessing, _ = preprocessing_or_default(pretrained)
    ours = preprocessing.normalise(preprocessing(image).unsqueeze(0))
    network = build_from_state(pretrained.config, pretrained.state)
    compare = _timm if to == "timm" else _huggingface
    if pretrained.config.stem == "conv":
        importlib.import_module(PLUG_INS[to])
    with torch.inference_mode():
        mine = network(ours)
        try:
            same, other = compare(folder, ours, image, bool(pretrained.config.num_classes))
        except Exception as error:  # whatever another library raises
            raise WeightsError(
                f"{to} cannot open the converted folder, so nothing is written: {error_text(error)}"
            ) from None
    spread = float(mine.abs().max()) or 1.0
    difference = float((mine - same).abs().max()) / spread
    if not difference < OUTPUT_TOLERANCE:
        raise WeightsError(
            f"{to} answers otherwise with the converted folder, so nothing is written: outputs "
            f"differ by {difference:.2g} of the largest; please report it"
        )
    line = f"parity on {pil_image}: outputs differ by {difference:.1g} of the largest"
    if not pretrained.config.num_classes:
        return [line]
    scores, others = mine.softmax(1)[0], other.softmax(1)[0]
    gap = float((scores - others).abs().max())
    top = "the same top-1" if scores.argmax() == others.argmax() else "another top-1"
    lines = [f"{line}; with {to}'s own preprocessing {top}, scores differ by at most {gap:.2g}"]
    if gap > SCORE_TOLERANCE or scores.argmax() != others.argmax():
        lines.append(f"note: {to} resizes images otherwise; compare on your own with --image")
    return lines


def _timm(folder: Path, pixels: Tensor, image: Image.Image, _head: bool) -> tuple[Tensor, Tensor]:
    """timm's outputs for our preprocessed pixels, and for its own preprocessing."""
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return model(pixels), model(transform(image).unsqueeze(0))


def _huggingface(
    folder: Path, pixels: Tensor, image: Image.Image, head: bool
) -> tuple[Tensor, Tensor]:
    """transformers' outputs for our preprocessed pixels, and for its own preprocessing."""
    from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
    from transformers.utils import logging

    processor = AutoImageProcessor.from_pretrained(folder)
    own = processor(images=image, return_tensors="pt")["pixel_values"]
    kind = AutoModelForImageClassification if head else AutoModel
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(folder).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    ours, theirs = model(pixels), model(own)
    return (ours.logits, theirs.logits) if head else (ours.pooler_output, theirs.pooler_output)


def model_card(
    source: str | os.PathLike[str],
    pretrained: Pretrained,
    to: str,
    *,
    name: str,
    with_scores: bool = True,
) -> str:
    config, best = pretrained.config, best_event(Path(source))
    use = USAGE[to]
    if config.stem == "conv":
        first = STEM_USAGE.format(library=LIBRARIES[to], module=PLUG_INS[to])
        use = f"{first}\n\n" + use.replace("```python", f"```python\nimport {PLUG_INS[to]}\n", 1)
    front: dict[str, Any] = {
        "library_name": LIBRARIES[to],
        "pipeline_tag": TASKS[config.num_classes > 0],
        "tags": ["image-classification", "vision-transformer", LIBRARIES[to]],
    }
    if pretrained.license:
        short = re.fullmatch(r"[a-z0-9.-]+", pretrained.license)
        front["license"] = pretrained.license if short else "other"
        if not short:
            front["license_name"] = pretrained.license
    front |= hub_metadata(source, name, best if with_scores else None)
    parts = [
        f"# {printable(Path(source).name)}",
        f"A Vision Transformer: {config.depth} blocks of {config.num_heads} heads, width "
        f"{config.dim}, patches of {config.patch_size} px, images of {config.image_size} px. "
        f"Made from {printable(pretrained.origin)} by vit {__version__}.",
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


def hub_metadata(source: str | os.PathLike[str], name: str, best: Event | None) -> dict[str, Any]:
    """Base model, dataset and scores of a run, as fields of the hub's front matter."""
    run, found = run_folder_of(source), dict[str, Any]()
    stored = read_stored_settings(run / "config.yaml") if has_stored_config(run) else {}
    weights, data = str(stored.get("weights") or source), str(stored.get("data") or "")
    if base := re.match(r"(?:hf/|(?=timm/))([^/@]+/[^/@]+)", weights):
        found["base_model"] = base[1]
    if data.startswith("hf:") and not os.path.exists(data[3:]):
        found["datasets"] = [data[3:].split(":")[0]]
    scores = [
        {"type": HUB_METRICS[key], "name": key, "value": value}
        for key, value in (best or {}).items()
        if key in HUB_METRICS and value is not None
    ]
    if data and scores:
        kind, *_ = found.get("datasets", ["imagefolder"])
        of = {"task": {"type": TASKS[True]}, "dataset": {"name": Path(data).name, "type": kind}}
        found["model-index"] = [{"name": name, "results": [{**of, "metrics": scores}]}]
    return found


def best_event(run: Path) -> Event | None:
    """The event in metrics.jsonl of the weights in model.safetensors; None without one."""
    log = read_event_log(run_folder_of(run) / METRICS_FILE, "epoch", "soup")
    best = None if log.damage else saved_event(log.events)
    return best if best and {"val_top1", "chosen_by"} & best.keys() else None


def describe_score(event: Event) -> str:
    metric = ranking_metric(event)
    if metric == "val_loss":
        return f"Loss on its validation images: {event['val_loss']:.4f}"
    if metric == "val_kappa":
        return f"Quadratic weighted kappa on its validation images: {event[metric]:.4f}"
    names = {"val_map": "Mean average precision", "val_balanced_accuracy": "Balanced accuracy"}
    return f"{names.get(metric, 'Top-1')} on its validation images: {event[metric]:.2%}"
