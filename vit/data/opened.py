"""Sources whose pictures are inside of files, or come from elsewhere, by what their name says."""

from collections.abc import Callable

from vit.data import hub_datasets, torchvision_sets
from vit.data.remote_shards import is_remote, read_remote
from vit.data.samples import Listed
from vit.data.shard_names import is_shards
from vit.data.shards import read_shards

TABLE: tuple[tuple[Callable[[str], bool], Callable[[str], Listed]], ...] = (
    (torchvision_sets.is_named, torchvision_sets.read_torchvision),
    (is_remote, read_remote),
    (is_shards, read_shards),
)
"""A source is the first whose test says so. `hf:` comes before them: it has settings."""


def open_listed(
    data: str, *, image_column: str | None = None, label_column: str | None = None
) -> Listed | None:
    """What `data` holds, where it is one of these sources; None where it is not.

    Args:
        data: As the user gives it.
        image_column: Column of the pictures in a table; found when left empty.
        label_column: Column of the classes in a table; found when left empty.

    Raises:
        DataError: It cannot be used as it is.
    """
    if hub_datasets.is_named(data):
        return hub_datasets.read_dataset(data, image_column, label_column)
    return next((read(data) for fits, read in TABLE if fits(data)), None)
