"""From what a user calls weights to files on this disk.

    a folder, a file                     of ours, timm, Hugging Face, or bare weights
    timm/NAME[.TAG][@REVISION]           as timm's registry has them
    hf/OWNER/NAME[@REVISION]             the Hugging Face Hub; also OWNER/NAME and hf-hub:OWNER/NAME

A path is tried first. Then the hub, and its cache where the hub does not answer.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from vit.errors import WeightsError, printable
from vit.paths import did_you_mean, names_in
from vit.weights import hub
from vit.weights.file_format import ONNX
from vit.weights.find_weights import SUFFIXES, Found, in_file, in_folder, needed
from vit.weights.formats import timm_registry
from vit.weights.formats.state_dict_names import some

__all__ = ["Found", "locate"]

HUB = ("hf-hub:", "hf_hub:", "hf/")
LOCAL = "local-dir:"
TIMM = "timm/"
FILES = (*SUFFIXES, ".onnx", ".json", ".pkl", ".npy", ".h5", ".msgpack")


def locate(source: str | os.PathLike[str], *, offline: bool | None = None) -> Found:
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


def _from_path(path: Path) -> Found:
    if path.is_dir():
        return replace(in_folder(path), places=(str(path),))
    if path.suffix.lower() == ".onnx":
        raise WeightsError(f"{printable(path)} is {ONNX}")
    return replace(in_file(path), places=(str(path),))


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
    if timm_registry.find(text) is not None:
        return f"{printable(text)} is not there; for timm's pretrained weights write timm/{text}"
    missing = _missing(path)
    others = (
        "" if missing.endswith("?") else ", or timm/NAME (`vit models --pretrained` lists them)"
    )
    return missing + others


def _from_timm(text: str, offline: bool | None) -> Found:
    name, _, revision = text.removeprefix(TIMM).partition("@")
    entry = timm_registry.find(name)
    if entry is None:
        repository = hub.Repository.parse(text)
        return _from_hub(
            repository, text, offline, hint=f"; timm has no such name{timm_registry.nearest(name)}"
        )
    if entry.hub_id is None:
        return _from_torch_cache(entry, text)
    repository = hub.Repository.parse(f"{entry.hub_id}@{revision}" if revision else entry.hub_id)
    return _from_hub(repository, text, offline, entry=entry)


def _from_torch_cache(entry: timm_registry.Entry, text: str) -> Found:
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
    found = in_file(kept)
    return replace(found, kind="timm", name=entry.name, license=entry.license, places=places)


def _from_hub(
    repository: hub.Repository,
    text: str,
    offline: bool | None,
    *,
    entry: timm_registry.Entry | None = None,
    hint: str = "",
) -> Found:
    places = [f"the path {Path(text).absolute()}"] if ":" not in text else []
    chosen = hub.switched_off(offline=offline)
    why = chosen or hub.unreachable()
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
        found = in_folder(folder) if folder else None
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


def _named(found: Found, repository: hub.Repository, entry: timm_registry.Entry | None) -> Found:
    """`found` under the name that was asked for, not that of the cache's folder."""
    if found.kind == "file":
        # timm itself fetches its weights without config.json: the registry has what it says
        owner, _, name = repository.name.partition("/")
        entry = entry or (timm_registry.find(name) if owner == "timm" else None)
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
