"""Small data sets that come with the package and are written out as image folders.

`digits`: 1,797 handwritten digits of 8 x 8 grey pixels, the test part of the UCI data set "Optical
Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998, doi:10.24432/C50P49, CC BY 4.0) as
scikit-learn ships it. Here it is one sprite, digits.png, whose pixel of value v in 0 to 16 is the
byte round(255 v / 16), and the labels in row-major order in digits.json.

`shapes`: drawn scenes of two objects with their captions; see vit.data.sources.shapes.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from vit.data.sources.shapes import write_scenes
from vit.errors import DataError, printable

SIDE = 8
DIGEST = ".digest"
FOLD = 5
"""Every fifth digit of a class is for validation."""


def digits_folder(cache: Path | None = None) -> Path:
    """The folder digits-v1 with train/CLASS/NNNN.png and val/CLASS/NNNN.png; written where missing.

    Args:
        cache: Where to keep it; the user's cache folder when left empty.

    Raises:
        DataError: It cannot be written.
    """
    return _kept("digits", _write_digits, cache)


def shapes_folder(cache: Path | None = None) -> Path:
    """The folder shapes-v1 with train/, val/ and unseen/, each with PAIR/NNNN.png and captions.

    Writing it takes some seconds. Arguments and errors are those of `digits_folder`.
    """
    return _kept("shapes", write_scenes, cache)


def _kept(name: str, fill: Callable[[Path], None], cache: Path | None) -> Path:
    """The folder of the set `name`, which `fill` writes.

    It appears whole or not at all, and is written again where a file was changed or lost.
    """
    cache = user_cache() if cache is None else cache
    folder = cache / f"{name}-v1"
    try:
        if not is_whole(folder):
            cache.mkdir(parents=True, exist_ok=True)
            _write(folder, fill)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: the built-in {name} cannot be written ({error.strerror}); "
            f"set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def user_cache() -> Path:
    """The folder for files of ours that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "vit-toolkit"


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds exactly what was written into it."""
    try:
        return (folder / DIGEST).read_text(encoding="ascii") == _digest(folder)
    except (OSError, ValueError):
        return False


def _write(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder`, then put it in its place."""
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(fresh)
        (fresh / DIGEST).write_text(_digest(fresh), encoding="ascii")
        fresh.chmod(0o755)
        _replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`, unless another process was faster."""
    if is_whole(folder):
        return
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(Path(aside) / "damaged")
        try:
            fresh.rename(folder)
        except OSError:
            if not is_whole(folder):
                raise


def _write_digits(folder: Path) -> None:
    for name, image in _digits():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)


def _digits() -> list[tuple[str, Image.Image]]:
    """Each digit with its place in the folder."""
    here = Path(__file__).parent
    labels: list[int] = json.loads((here / "digits.json").read_text(encoding="ascii"))
    with Image.open(here / "digits.png") as sheet:
        sheet.load()
    cols, seen, digits = sheet.width // SIDE, [0] * 10, []
    for number, label in enumerate(labels):
        top, left = number // cols * SIDE, number % cols * SIDE
        seen[label] += 1
        split = "train" if seen[label] % FOLD else "val"
        image = sheet.crop((left, top, left + SIDE, top + SIDE))
        digits.append((f"{split}/{label}/{number:04d}.png", image))
    return digits


def _digest(folder: Path) -> str:
    """A hash of the names and contents of all files in `folder` but the digest itself."""
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        if path.name != DIGEST and path.is_file():
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


SETS: dict[str, Callable[[], Path]] = {"digits": digits_folder, "shapes": shapes_folder}
