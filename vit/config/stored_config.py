"""config.yaml of a run folder: the completed settings of its training."""

import os
from pathlib import Path

from vit.config import Config
from vit.config.parser import make_config, read_settings


def run_folder_of(source: str | os.PathLike[str]) -> Path:
    """The run folder that `source` names, or whose weights file it names."""
    path = Path(source)
    return path.parent if path.is_file() else path


def has_stored_config(folder: Path) -> bool:
    """Whether `folder` is a run folder, whose training has begun."""
    return (folder / "config.yaml").is_file()


def stored_config(folder: Path) -> Config:
    """Read the completed settings of the run in `folder`.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    return make_config(read_settings(folder / "config.yaml"), complete=True)
