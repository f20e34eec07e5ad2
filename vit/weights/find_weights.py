"""Which file in a folder has the weights, which library wrote them, and under which terms."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vit.errors import WeightsError, printable
from vit.weights.file_format import ONNX, content_of, open_file, read_json
from vit.weights.formats.state_dict_names import some
from vit.weights.state_dict_readers import is_numpy

Kind = Literal["run", "timm", "huggingface", "file", "npz"]

CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
CARD = "README.md"
INDEX = ".index.json"
# The order of timm, with the lists of shards behind the files that they replace.
PREFERRED = (
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
# What trainings keep beside the weights.
COMPANIONS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)[\w.-]*"
)
MOST_CARD = 65_536
MOST_TERMS = 160


@dataclass(frozen=True, kw_only=True)
class Found:
    """Weights on this disk.

    Args:
        kind: Who can read them: "run" (a folder of ours), "timm", "huggingface", "file" (tensors
            and nothing else), "npz" (numpy arrays).
        folder: Where the files are.
        weights: The file to read, or the index of several.
        config: config.json; None for "file", and where a cache has only timm's weights.
        processor: How images are prepared, for "huggingface"; None where it is not there.
        name: What they are called. For "timm" its name, ARCHITECTURE or ARCHITECTURE.TAG; where
            config.json names another architecture, this one is what was asked for.
        license: Under which terms they are given; None where nothing says so.
        places: Where they were looked for, the last one with success.
        notes: Lines for the user.
    """

    kind: Kind
    folder: Path
    weights: Path
    config: Path | None = None
    processor: Path | None = None
    name: str
    license: str | None = None
    places: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def in_folder(folder: Path) -> Found:
    """The weights in `folder`.

    Raises:
        WeightsError: There are none, or several that nothing decides between, or config.json is
            no settings of a network.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except OSError as error:
        raise WeightsError(f"{printable(folder)} cannot be read: {error.strerror}") from None
    if CONFIG in names and _kind(read_json(folder / CONFIG)) == "run":
        return _described(folder / PREFERRED[0])
    try:
        name, notes = choose(names)
    except WeightsError as error:
        raise WeightsError(f"{printable(folder)}: {error}") from None
    return replace(_described(folder / name), notes=notes)


def in_file(path: Path) -> Found:
    """The weights in the file `path`; a config.json beside it describes them.

    Raises:
        WeightsError: It holds none that can be read, or config.json is no settings of a network.
    """
    if path.name in (CONFIG, *PROCESSORS):
        raise WeightsError(f"{printable(path)} has settings and no weights; give its folder")
    return _described(path)


def choose(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Of the files in a folder, the one with the weights; and notes on those passed over.

    Raises:
        WeightsError: None has any, or nothing decides between several.
    """
    preferred = [name for name in PREFERRED if name in names]
    others = [
        name
        for suffix in SUFFIXES
        for name in names
        if name.endswith(suffix) and not COMPANIONS.fullmatch(name) and not is_shard(name)
    ]
    found = list(dict.fromkeys(preferred + others))
    if not found:
        onnx = next((name for name in names if name.endswith(".onnx")), None)
        if onnx is not None:
            raise WeightsError(f"{printable(onnx)} is {ONNX}")
        there = f"it has {some(sorted(names))}" if names else "it has no files"
        raise WeightsError(f"no file of weights ({there}); give a folder with {PREFERRED[0]}")
    first = found[0]
    ending = next((s for s in SUFFIXES if first.endswith(s)), "")
    rivals = [name for name in found if name.endswith(ending)]
    if not preferred and len(rivals) > 1:
        raise WeightsError(f"several files of weights: {some(rivals, most=6)}; give one of them")
    passed_over = f"took {printable(first)}, not {some(found[1:])}"
    return first, (passed_over,) if len(found) > 1 else ()


def is_shard(name: str) -> bool:
    """Whether a file has the name of one of several that belong together."""
    return re.search(r"-\d{5}-of-\d{5}\.(safetensors|bin)$", name) is not None


def needed(names: Sequence[str]) -> list[str]:
    """Of all files of a repository, those that loading reads: one set of weights, settings, card.

    Raises:
        WeightsError: As `choose`.
    """
    top = [name for name in names if "/" not in name]
    weights, _ = choose(top)
    small = [name for name in (CONFIG, *PROCESSORS, CARD) if name in top]
    stem, ending = Path(weights.removesuffix(INDEX)).stem, Path(weights.removesuffix(INDEX)).suffix
    shards = [n for n in top if is_shard(n) and n.startswith(f"{stem}-") and n.endswith(ending)]
    return [*small, weights, *(shards if weights.endswith(INDEX) else [])]


def _described(weights: Path) -> Found:
    folder = weights.parent
    config = folder / CONFIG if (folder / CONFIG).is_file() else None
    content = read_json(config) if config else {}
    kind = _kind(content) if config else "file"
    if kind == "run" and weights.name != PREFERRED[0]:
        kind, config, content = "file", None, {}  # something else that lies in a run folder
    if kind != "run" and content_of(weights) == "zip" and is_numpy(weights):
        kind = "npz"
    processors = (folder / name for name in PROCESSORS)
    own = weights.name.partition(".")[0] if kind in ("file", "npz") else folder.resolve().name
    return Found(
        kind=kind,
        folder=folder,
        weights=weights,
        config=config,
        processor=next((path for path in processors if path.is_file()), None),
        name=_timm_name(content) if kind == "timm" else own,
        license=_license(content) or (card_license(folder / CARD) if config else None),
    )


def _kind(config: dict[str, Any]) -> Kind:
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
    return printable(terms)[:MOST_TERMS] if terms and isinstance(terms, str) else None


def card_license(card: Path) -> str | None:
    """The licence in the head of a model card (README.md); None where it names none."""
    if not card.is_file():
        return None
    with open_file(card) as file:
        text = file.read(MOST_CARD).decode("utf-8", errors="replace")
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    if head is None:
        return None
    # single lines only: that is all a licence needs of YAML
    lines = re.findall(r"^(license(?:_name|_link)?):[ \t]*(?:\n- )?([^#\n]*)", head[1], re.M)
    terms = {key: value.strip().strip("'\"[]") for key, value in lines}
    name, link = terms.get("license", ""), terms.get("license_link", "")
    if name == "other" and terms.get("license_name"):
        name = terms["license_name"]
    shown = f"{name} ({link})" if name and link else name
    return printable(shown)[:MOST_TERMS] or None
