"""Resolves SOURCE, as users name weights, to files on this disk.

    a folder, a file                     of ours, timm, Hugging Face, or bare weights
    timm/NAME[.TAG][@REVISION]           a pretrained model of timm's registry
    hf/OWNER/NAME[@REVISION]             the Hugging Face Hub; also OWNER/NAME, hf-hub:OWNER/NAME

A path is tried first, then the hub, and the hub's cache when the hub does not answer. In a folder,
the weight file, the library that wrote it and the license are read from names and config.json.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vit.config.collect_settings import FOLDS_FILE, SOUP_FOLDER
from vit.config.setting_layers import RUNS
from vit.errors import WeightsError
from vit.json_reader import open_file, read_json
from vit.paths import did_you_mean, path_argument
from vit.text import join_names, printable
from vit.weights import hub
from vit.weights.formats import timm_network
from vit.weights.state_dict_readers import detect_format, is_npz

SourceKind = Literal["run", "timm", "huggingface", "file", "npz"]
CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
OPEN_CLIP_CONFIG = "open_clip_config.json"
MODEL_CARD = "README.md"
SETTINGS = (CONFIG, OPEN_CLIP_CONFIG, *PROCESSORS)
INDEX = ".index.json"
# timm's order of preference, with each shard index after the file it replaces.
PREFERRED_FILES = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
    "pytorch_model.pth",
    "model.pth",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
)
SUFFIXES = (".safetensors", ".pth", ".pth.tar", ".bin", ".pt", ".ckpt", ".npz")
# Training state that is saved next to the weights.
TRAINING_STATE_FILES = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)[\w.-]*"
)
MAX_CARD_BYTES = 65_536
MAX_LICENSE_LENGTH = 160
HUB = "hf-hub:"
TIMM = "timm/"
ONNX = "an ONNX file, which has been exported already; give the weights it was exported from"
FILES = (*SUFFIXES, ".onnx", ".json", ".pkl", ".npy", ".h5", ".msgpack")


@dataclass(frozen=True, kw_only=True)
class WeightsLocation:
    """Weight files on this disk.

    Args:
        kind: Their format: "run" (our run folder), "timm", "huggingface", "file" (tensors only),
            "npz" (numpy arrays).
        config: config.json; None if a cache has only timm's weights; for "file"
            open_clip_config.json, if the weights are of OpenCLIP.
        processor: preprocessor_config.json for "huggingface"; None if missing.
    """

    kind: SourceKind
    folder: Path
    weights: Path
    config: Path | None = None
    processor: Path | None = None
    name: str
    license: str | None = None
    notes: tuple[str, ...] = ()


def locate_weights(
    source: str | os.PathLike[str], *, offline: bool | None = None
) -> WeightsLocation:
    """Locate the weights `source`, and download them if they are not on this disk."""
    text = path_argument("weights", source, "a run folder, timm/NAME, hf/OWNER/NAME or a file")
    if not text.strip():
        raise WeightsError("the weights have no name; give a file, a folder or timm/NAME")
    if "://" in text:
        raise WeightsError(
            f"{text} is an address: give OWNER/NAME of the Hugging Face Hub, or the "
            "path of the downloaded file"
        )
    if text.lower().startswith(HUB):
        return _from_hub(hub.Repository.parse(text[len(HUB) :]), text, offline)
    path = Path(text).expanduser() if text.startswith(("~/", f"~{os.sep}")) else Path(text)
    if os.path.exists(path):
        return locate_in_folder(path) if path.is_dir() else locate_file(path)
    if isinstance(source, os.PathLike) or _means_path(text):
        raise WeightsError(_missing_path_message(path))
    if text.startswith(TIMM):
        return _from_timm(text, offline)
    if "/" not in text:
        if timm_network.find_entry(text) is not None:
            raise WeightsError(f"{text} is not there; of timm it is timm/{text}")
        raise WeightsError(_missing_path_message(path))
    return _from_hub(hub.Repository.parse(text.removeprefix("hf/")), text, offline)


def _means_path(text: str) -> bool:
    """Whether `text`, which does not exist, can only be a path."""
    if text.startswith((".", "/", "~")) or "\\" in text or re.match("[A-Za-z]:", text):
        return True
    if text.lower().endswith(FILES) or text.endswith("/"):
        return True
    if text.startswith((TIMM, "hf/")):
        return False
    # a mistyped runs/petz must not be looked up on the hub, also where there are no runs yet
    return (
        text.count("/") > 1
        or text.startswith(f"{RUNS}/")
        or ("/" in text and Path(text).parent.is_dir())
    )


def _missing_path_message(path: Path) -> str:
    """Message that `path` does not exist, with similar names."""
    hint = did_you_mean(path) or "; give another path, hf/OWNER/NAME of the hub, or timm/NAME"
    while not path.parent.is_dir() and path.parent != path.parent.parent:
        path = path.parent
    return f"{path} is not there{hint}"


def _from_timm(text: str, offline: bool | None) -> WeightsLocation:
    name, _, revision = text.removeprefix(TIMM).partition("@")
    entry = timm_network.find_entry(name)
    if entry is None:
        repository = hub.Repository.parse(text)
        return _from_hub(
            repository,
            text,
            offline,
            hint=f"; timm has no such name{timm_network.suggest_names(name)}",
        )
    if entry.hub_id is None:
        raise WeightsError(
            f"{text} is not on the Hugging Face Hub; fetch {entry.url}, and give the file"
        )
    repository = hub.Repository.parse(f"{entry.hub_id}@{revision}" if revision else entry.hub_id)
    return _from_hub(repository, text, offline, entry=entry)


def _from_hub(
    repository: hub.Repository,
    text: str,
    offline: bool | None,
    *,
    entry: timm_network.RegistryEntry | None = None,
    hint: str = "",
) -> WeightsLocation:
    chosen = hub.offline_reason(offline=offline)
    why = chosen or hub.unreachable_reason()
    notes: tuple[str, ...] = ()
    folder = None
    if why is None:
        try:
            folder = hub.download(repository, required_files)
        except WeightsError as error:
            why = str(error)
    if why is not None:
        folder = hub.cached_snapshot(repository)
        notes = () if chosen else (f"{text} is from the cache: {why}",)
        if folder is None or not any(p.name.endswith((*SUFFIXES, INDEX)) for p in folder.iterdir()):
            raise WeightsError(_not_found(repository, text, f"{why}{hint}"))
    assert folder is not None
    found = locate_in_folder(folder)
    if found.license is None and found.kind != "run":
        found = replace(found, license=card_license(found.folder / MODEL_CARD))
    named = _with_requested_name(found, repository, entry)
    return replace(named, notes=(*notes, *found.notes))


def _with_requested_name(
    found: WeightsLocation, repository: hub.Repository, entry: timm_network.RegistryEntry | None
) -> WeightsLocation:
    """`found` under the requested name instead of that of the cache folder."""
    if found.kind == "file":
        # timm caches weights without config.json; its registry has the content
        owner, _, name = repository.name.partition("/")
        entry = entry or (timm_network.find_entry(name) if owner == "timm" else None)
        found = replace(found, kind="timm", config=None) if entry else found
    if entry is not None and found.kind in ("timm", "npz"):
        return replace(found, name=entry.name, license=found.license or entry.license)
    return found if found.kind == "timm" else replace(found, name=repository.name)


def _not_found(repository: hub.Repository, text: str, why: str) -> str:
    folder = repository.name.rpartition("/")[2]
    return (
        f"{text} was not found: {why}. Looked at the path, the cache "
        f"{repository.cache}, and {repository.url}. Where there is a network, run "
        f"{repository.fetch_command()}, copy the folder here, and give it: --weights {folder}"
    )


def locate_in_folder(folder: Path) -> WeightsLocation:
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except OSError as error:
        raise WeightsError(f"{folder} cannot be read: {error.strerror}") from None
    if CONFIG in names and _kind(read_json(folder / CONFIG)) == "run":
        return _describe_run(folder)
    try:
        name, notes = choose_weights_file(names)
    except WeightsError as error:
        runs = sorted(file.parent for file in folder.glob(f"*/{PREFERRED_FILES[0]}"))
        reason = f": {error}"
        if runs:
            reason = f" has no weights itself; give one of its folders: {join_names(runs)}"
        if FOLDS_FILE in names:
            remedy = "a run of all images, trained without --folds, or one fold, such as its fold-1"
            if folder / SOUP_FOLDER in runs:
                remedy = f"the network of all folds, {folder / SOUP_FOLDER}"
            reason = f": the folds of a cross-validation, which measure the settings; give {remedy}"
        raise WeightsError(f"{folder}{reason}") from None
    return replace(_describe_files(folder / name), notes=notes)


def locate_file(path: Path) -> WeightsLocation:
    """Locate the weights in the file `path`, described by the config.json next to it, if any."""
    if path.suffix.lower() == ".onnx":
        raise WeightsError(f"{path} is {ONNX}")
    if path.name in SETTINGS:
        raise WeightsError(f"{path} has settings and no weights; give its folder")
    return _describe_files(path)


def choose_weights_file(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Choose the weight file among the names of a folder; return it with notes on the others."""
    preferred = [name for name in PREFERRED_FILES if name in names]
    others = [
        name
        for suffix in SUFFIXES
        for name in names
        if name.endswith(suffix) and not TRAINING_STATE_FILES.fullmatch(name) and not is_shard(name)
    ]
    found = list(dict.fromkeys(preferred + others))
    if not found:
        onnx = next((name for name in names if name.endswith(".onnx")), None)
        if onnx is not None:
            raise WeightsError(f"{onnx} is {ONNX}")
        there = f"it has {join_names(sorted(names), 3)}" if names else "it has no files"
        raise WeightsError(f"no file of weights ({there}); give a folder with {PREFERRED_FILES[0]}")
    first = found[0]
    ending = next((s for s in SUFFIXES if first.endswith(s)), "")
    rivals = [name for name in found if name.endswith(ending)]
    if not preferred and len(rivals) > 1:
        raise WeightsError(
            f"several files of weights: {join_names(rivals, limit=6)}; give one of them"
        )
    passed_over = f"took {first}, not {join_names(found[1:], 3)}"
    return first, (passed_over,) if len(found) > 1 else ()


def is_shard(name: str) -> bool:
    """Whether a file is named as one shard of a sharded checkpoint."""
    return re.search(r"-\d{5}-of-\d{5}\.(safetensors|bin)$", name) is not None


def required_files(names: Sequence[str]) -> list[str]:
    """Names of the files of a repository that loading reads: weights, settings, model card."""
    top = [name for name in names if "/" not in name]
    weights, _ = choose_weights_file(top)
    small = [name for name in (*SETTINGS, MODEL_CARD) if name in top]
    stem, ending = Path(weights.removesuffix(INDEX)).stem, Path(weights.removesuffix(INDEX)).suffix
    shards = [n for n in top if is_shard(n) and n.startswith(f"{stem}-") and n.endswith(ending)]
    return [*small, weights, *(shards if weights.endswith(INDEX) else [])]


def _describe_run(folder: Path) -> WeightsLocation:
    return WeightsLocation(
        kind="run",
        folder=folder,
        weights=folder / PREFERRED_FILES[0],
        config=folder / CONFIG,
        name=folder.resolve().name,
    )


def _describe_files(weights: Path) -> WeightsLocation:
    folder = weights.parent
    config = folder / CONFIG if (folder / CONFIG).is_file() else None
    content = read_json(config) if config else {}
    kind = _kind(content) if config else "file"
    if kind == "run" and weights.name == PREFERRED_FILES[0]:
        return _describe_run(folder)
    if kind == "run":  # another file in a run folder
        kind, config, content = "file", None, {}
    if detect_format(weights) == "zip" and is_npz(weights):
        kind = "npz"
    if kind == "file" and weights.name.startswith("open_clip_"):
        open_clip = folder / OPEN_CLIP_CONFIG
        config = open_clip if open_clip.is_file() else None
    processors = (folder / name for name in PROCESSORS)
    own = weights.name.partition(".")[0] if kind in ("file", "npz") else folder.resolve().name
    return WeightsLocation(
        kind=kind,
        folder=folder,
        weights=weights,
        config=config,
        processor=next((path for path in processors if path.is_file()), None),
        name=_timm_name(content) if kind == "timm" else own,
        license=_license(content) or (card_license(folder / MODEL_CARD) if config else None),
    )


def _kind(config: dict[str, Any]) -> SourceKind:
    if isinstance(config.get("vit"), dict):
        return "run"
    # transformers' wrapper of timm writes both; the tensors are timm's
    if isinstance(config.get("architecture"), str) or "pretrained_cfg" in config:
        return "timm"
    if "model_type" in config or "architectures" in config:
        return "huggingface"
    raise WeightsError(
        f"{CONFIG} is of no known library: it has neither architecture (timm) nor model_type "
        "(Hugging Face); to load the weights alone, copy their file elsewhere"
    )


def _timm_name(config: dict[str, Any]) -> str:
    nested = _nested(config)
    architecture = config.get("architecture") or nested.get("architecture")
    tag = nested.get("tag")
    if not isinstance(architecture, str):
        raise WeightsError(f"{CONFIG} names no architecture; timm's files have one")
    return f"{architecture}.{tag}" if tag and isinstance(tag, str) else architecture


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("pretrained_cfg", config)  # old files of timm are flat
    return nested if isinstance(nested, dict) else {}


def _license(config: dict[str, Any]) -> str | None:
    terms = _nested(config).get("license")
    return printable(terms)[:MAX_LICENSE_LENGTH] if terms and isinstance(terms, str) else None


def card_license(card: Path) -> str | None:
    """License in the YAML front matter of a model card (README.md); None if missing."""
    if not card.is_file():
        return None
    with open_file(card) as file:
        text = file.read(MAX_CARD_BYTES).decode("utf-8", errors="replace")
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    if head is None:
        return None
    # license fields are single lines, so no YAML parser is needed
    lines = re.findall(r"^(license(?:_name|_link)?):[ \t]*(?:\n- )?([^#\n]*)", head[1], re.M)
    terms = {key: value.strip().strip("'\"[]") for key, value in lines}
    name, link = terms.get("license", ""), terms.get("license_link", "")
    if name == "other" and terms.get("license_name"):
        name = terms["license_name"]
    shown = f"{name} ({link})" if name and link else name
    return printable(shown)[:MAX_LICENSE_LENGTH] or None
