"""x"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vit.errors import WeightsError, printable
from vit.paths import did_you_mean, names_in
from vit.weights import hub
from vit.weights.file_format import ONNX, detect_format, open_file, read_json
from vit.weights.formats import timm_registry
from vit.weights.formats.state_dict_names import some
from vit.weights.state_dict_readers import is_npz

SourceKind = Literal["run", "timm", "huggingface", "file", "npz"]

CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MODEL_CARD = "README.md"
INDEX = ".index.json"
# The order of timm, with the lists of shards behind the files that they replace.
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
# What trainings keep beside the weights.
TRAINING_STATE_FILES = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)[\w.-]*"
)
MAX_CARD_BYTES = 65_536
MAX_LICENSE_LENGTH = 160


@dataclass(frozen=True, kw_only=True)
class WeightsLocation:
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

    kind: SourceKind
    folder: Path
    weights: Path
    config: Path | None = None
    processor: Path | None = None
    name: str
    license: str | None = None
    places: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def locate_in_folder(folder: Path) -> WeightsLocation:
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
        return _describe_files(folder / PREFERRED_FILES[0])
    try:
        name, notes = choose(names)
    except WeightsError as error:
        raise WeightsError(f"{printable(folder)}: {error}") from None
    return replace(_describe_files(folder / name), notes=notes)


def locate_file(path: Path) -> WeightsLocation:
    """The weights in the file `path`; a config.json beside it describes them.

    Raises:
        WeightsError: It holds none that can be read, or config.json is no settings of a network.
    """
    if path.name in (CONFIG, *PROCESSORS):
        raise WeightsError(f"{printable(path)} has settings and no weights; give its folder")
    return _describe_files(path)


def choose(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Of the files in a folder, the one with the weights; and notes on those passed over.

    Raises:
        WeightsError: None has any, or nothing decides between several.
    """
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
            raise WeightsError(f"{printable(onnx)} is {ONNX}")
        there = f"it has {some(sorted(names))}" if names else "it has no files"
        raise WeightsError(f"no file of weights ({there}); give a folder with {PREFERRED_FILES[0]}")
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
    small = [name for name in (CONFIG, *PROCESSORS, MODEL_CARD) if name in top]
    stem, ending = Path(weights.removesuffix(INDEX)).stem, Path(weights.removesuffix(INDEX)).suffix
    shards = [n for n in top if is_shard(n) and n.startswith(f"{stem}-") and n.endswith(ending)]
    return [*small, weights, *(shards if weights.endswith(INDEX) else [])]


def _describe_files(weights: Path) -> WeightsLocation:
    folder = weights.parent
    config = folder / CONFIG if (folder / CONFIG).is_file() else None
    content = read_json(config) if config else {}
    kind = _kind(content) if config else "file"
    if kind == "run" and weights.name != PREFERRED_FILES[0]:
        kind, config, content = "file", None, {}  # something else that lies in a run folder
    if kind != "run" and detect_format(weights) == "zip" and is_npz(weights):
        kind = "npz"
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
    """The licence in the head of a model card (README.md); None where it names none."""
    if not card.is_file():
        return None
    with open_file(card) as file:
        text = file.read(MAX_CARD_BYTES).decode("utf-8", errors="replace")
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
    return printable(shown)[:MAX_LICENSE_LENGTH] or None


HUB = ("hf-hub:", "hf_hub:", "hf/")
LOCAL = "local-dir:"
TIMM = "timm/"
FILES = (*SUFFIXES, ".onnx", ".json", ".pkl", ".npy", ".h5", ".msgpack")


def locate_weights(
    source: str | os.PathLike[str], *, offline: bool | None = None
) -> WeightsLocation:
    """Find the weights called `source`, and fetch them if they are elsewhere.

    Args:
        source: A path, or a name on the Hugging Face Hub.
        offline: Whether to ask no other computer; None follows HF_HUB_OFFLINE.

    Raises:
        WeightsError: They are not to be had; the message has every place that was looked at, and
            what to do.
    """
    text = os.fspath(source)
    if not text.strip():
        raise WeightsError("the weights have no name; give a file, a folder or timm/NAME")
    word = text.lower()
    remote = next((prefix for prefix in HUB[:2] if word.startswith(prefix)), None)
    if remote is not None:
        return _from_hub(hub.Repository.parse(text[len(remote) :]), text, offline)
    only_local = isinstance(source, os.PathLike) or word.startswith(LOCAL)
    path = Path(text[len(LOCAL) :] if word.startswith(LOCAL) else text)
    path = path.expanduser() if text.startswith(("~/", f"~{os.sep}")) else path
    if _exists(path):
        return _from_path(path)
    if only_local or _means_path(text):
        raise WeightsError(_missing(path))
    if text.startswith(TIMM):
        return _from_timm(text, offline)
    name = text.removeprefix("hf/")
    if "/" not in name and name == text:
        raise WeightsError(_bare_word(path, text))
    return _from_hub(hub.Repository.parse(name), text, offline)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, no permission, a NUL
        return False


def _from_path(path: Path) -> WeightsLocation:
    if path.is_dir():
        return replace(locate_in_folder(path), places=(str(path),))
    if path.suffix.lower() == ".onnx":
        raise WeightsError(f"{printable(path)} is {ONNX}")
    return replace(locate_file(path), places=(str(path),))


def _means_path(text: str) -> bool:
    """Whether `text`, which is not there, can only have been meant as a path."""
    if text.startswith((".", "/", "~")) or "\\" in text or re.match("[A-Za-z]:", text):
        return True
    if text.lower().endswith(FILES) or text.endswith("/"):
        return True
    if text.startswith((TIMM, "hf/")):
        return False
    # a mistyped runs/petz must not become somebody's weights on the hub
    return text.count("/") > 1 or ("/" in text and Path(text).parent.is_dir())


def _missing(path: Path) -> str:
    """Why `path` is not there, and what is there that looks like it."""
    folder, hint = path.parent, did_you_mean(path)
    if not folder.is_dir():
        while not folder.is_dir() and folder != folder.parent:
            path, folder = folder, folder.parent
        what = f"there is no folder {printable(path)}"
    else:
        what = f"{printable(path)} is not there"
    if hint:
        return f"{what}{hint}"
    names = names_in(folder)
    inside = "here" if folder == Path() else f"in {printable(folder)}"
    return f"{what}; {inside} is {some(names) if names else 'nothing'}; give another path"


def _bare_word(path: Path, text: str) -> str:
    if timm_registry.find_entry(text) is not None:
        return f"{printable(text)} is not there; for timm's pretrained weights write timm/{text}"
    missing = _missing(path)
    others = (
        "" if missing.endswith("?") else ", or timm/NAME (`vit models --pretrained` lists them)"
    )
    return missing + others


def _from_timm(text: str, offline: bool | None) -> WeightsLocation:
    name, _, revision = text.removeprefix(TIMM).partition("@")
    entry = timm_registry.find_entry(name)
    if entry is None:
        repository = hub.Repository.parse(text)
        return _from_hub(
            repository,
            text,
            offline,
            hint=f"; timm has no such name{timm_registry.suggest_names(name)}",
        )
    if entry.hub_id is None:
        return _from_torch_cache(entry, text)
    repository = hub.Repository.parse(f"{entry.hub_id}@{revision}" if revision else entry.hub_id)
    return _from_hub(repository, text, offline, entry=entry)


def _from_torch_cache(entry: timm_registry.RegistryEntry, text: str) -> WeightsLocation:
    """Weights that timm knows only by an address of the web, which is not fetched from here."""
    import torch

    url = entry.url or ""
    kept = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    places = (str(Path(text).absolute()), str(kept))
    if not kept.is_file():
        raise WeightsError(
            f"{printable(text)} is not on the Hugging Face Hub; looked at {' and '.join(places)}; "
            f"fetch {url} by hand and put it at the second place"
        )
    found = locate_file(kept)
    return replace(found, kind="timm", name=entry.name, license=entry.license, places=places)


def _from_hub(
    repository: hub.Repository,
    text: str,
    offline: bool | None,
    *,
    entry: timm_registry.RegistryEntry | None = None,
    hint: str = "",
) -> WeightsLocation:
    places = [f"the path {Path(text).absolute()}"] if ":" not in text else []
    chosen = hub.offline_reason(offline=offline)
    why = chosen or hub.unreachable_reason()
    notes: tuple[str, ...] = ()
    folder = None
    if why is None:
        try:
            folder = hub.download(repository, needed)
            places.append(repository.url)
        except WeightsError as error:
            why = str(error)
    if why is not None:
        places.append(f"the cache {repository.cache}")
        folder = hub.cached(repository)
        notes = () if chosen else (f"{printable(text)} is from the cache: {why}",)
    try:
        found = locate_in_folder(folder) if folder else None
    except WeightsError as error:
        if why is None or _has_weights(folder):
            raise
        found, why = None, f"{why}, and of the cache {error}"
    if found is None:
        raise WeightsError(_nowhere(repository, text, places, f"{why}{hint}"))
    named = _named(found, repository, entry)
    return replace(named, places=tuple(places), notes=(*notes, *found.notes))


def _has_weights(folder: Path | None) -> bool:
    return folder is not None and any(p.name.endswith(SUFFIXES) for p in folder.iterdir())


def _named(
    found: WeightsLocation, repository: hub.Repository, entry: timm_registry.RegistryEntry | None
) -> WeightsLocation:
    """`found` under the name that was asked for, not that of the cache's folder."""
    if found.kind == "file":
        # timm itself fetches its weights without config.json: the registry has what it says
        owner, _, name = repository.name.partition("/")
        entry = entry or (timm_registry.find_entry(name) if owner == "timm" else None)
        found = replace(found, kind="timm") if entry else found
    if entry is not None and found.kind in ("timm", "npz"):
        return replace(found, name=entry.name, license=found.license or entry.license)
    return found if found.kind == "timm" else replace(found, name=repository.name)


def _nowhere(repository: hub.Repository, text: str, places: list[str], why: str) -> str:
    folder = repository.name.rpartition("/")[2]
    looked = "; ".join(printable(place) for place in [*places, repository.url])
    return (
        f"{printable(text)} was not found: {why}. Looked at {looked}. Where there is a network, "
        f"run {repository.fetch_command()}, copy the folder here, and give it: --weights {folder}"
    )
