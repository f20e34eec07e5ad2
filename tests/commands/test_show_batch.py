"""`vit train --show-batch FILE`: the first batch drawn, and nothing trained."""

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.contact_sheet import MARGIN, TILE, contact_sheet, wrap
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.tasks.classification import class_lines

pytestmark = pytest.mark.auto_precision

TINY = (
    *("--image-size", "16", "--patch-size", "8", "--dim", "32", "--depth", "1", "--num-heads", "2"),
    *("--device", "cpu", "--model", "vit_tiny_patch16_224"),
)


@pytest.fixture
def show(vit, tmp_path, monkeypatch):
    """Runs the command in an empty folder; gives exit code and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(data, *words):
        code, _, err = vit("train", data, *TINY, *words)
        return code, "\n".join(err)

    return run


@pytest.fixture
def colours(tiny_data):
    """A folder of classes, from which we hold out some ourselves."""
    return tiny_data / "val"


def tiles(path) -> list[np.ndarray]:
    """The first row of images of 16 x 16 on a sheet, as they were before they were enlarged."""
    sheet, scale = np.asarray(Image.open(path)), TILE // 16
    side = 16 * scale
    count = (sheet.shape[1] - MARGIN) // (side + MARGIN)
    lefts = [MARGIN + at * (side + MARGIN) for at in range(count)]
    return [sheet[MARGIN : MARGIN + side : scale, left : left + side : scale] for left in lefts]


def test_the_sheet_shows_the_first_batch_and_nothing_is_trained(show, colours, tmp_path):
    plain = ("-b", "6", "--min-crop", "1", "--hflip", "0")
    code, said = show(colours, *plain, "--show-batch", "batch.png")
    assert code == 0, said
    assert "batch.png: 6 images of the first batch, 16x16 pixels; nothing was trained" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.png"]
    whole = Preprocessing(image_size=(16, 16))
    found = {whole(read_image(str(p))).numpy().tobytes() for p in colours.rglob("*.*")}
    shown = tiles("batch.png")
    assert len(shown) == 6
    assert all(np.ascontiguousarray(one.transpose(2, 0, 1)).tobytes() in found for one in shown)
    show(colours, *plain, "--mixup", "1", "--show-batch", "mixed.png")
    mixed = tiles("mixed.png")
    sums = [[int(each.astype(int).sum()) for each in row] for row in (shown, mixed)]
    assert all(not np.array_equal(one, other) for one, other in zip(shown, mixed, strict=True))
    # both of a pair have one weight: their sum stays, up to rounding
    for at in range(0, 6, 2):
        assert sum(sums[0][at : at + 2]) == pytest.approx(
            sum(sums[1][at : at + 2]), abs=16 * 16 * 6
        )


def test_an_existing_file_is_only_replaced_with_overwrite(show, refusal, colours):
    assert show(colours, "-b", "4", "--show-batch", "batch.png")[0] == 0
    said = refusal("train", colours, *TINY, "-b", "4", "--show-batch", "batch.png")
    assert "batch.png exists; choose another name, or add --overwrite" in said
    assert show(colours, "-b", "4", "--show-batch", "batch.png", "--overwrite")[0] == 0


def test_captions_are_drawn_below_the_images(show, colours, tmp_path):
    rows = [f"{path},an image of something called {path.stem}" for path in colours.rglob("*.*")]
    (tmp_path / "list.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    code, said = show(
        "list.csv", "--task", "caption", "--decoder-dim", "32", "--decoder-depth", "1",
        "--decoder-heads", "2", "-b", "4", "--show-batch", "captions.png",
    )  # fmt: skip
    assert code == 0, said
    assert "4 images of the first batch" in said
    with Image.open(tmp_path / "captions.png") as sheet:
        below = np.asarray(sheet)[MARGIN + TILE :]
        assert sheet.height > TILE + 40  # a caption takes several lines
    assert (below < 128).any()


def test_text_is_broken_between_words():
    assert wrap("a small green circle left of it", 120) == ["a small green", "circle left of it"]
    long = wrap("x" * 60, 100)
    assert len(long) > 2
    assert "".join(long) == "x" * 60
    assert wrap("", 100) == [""]


def test_mixed_images_are_labelled_with_class_shares():
    names = ["cat", "dog", "owl"]
    assert class_lines(torch.tensor([0.0, 1.0, 0.0]), names) == ["dog"]
    assert class_lines(torch.tensor([0.25, 0.75, 0.001]), names) == ["dog 75%", "cat 25%"]
    assert class_lines(torch.tensor([1.0, 0.0, 1.0]), names) == ["cat, owl"]
    assert class_lines(torch.zeros(3), names) == ["(no class)"]


def test_a_sheet_of_many_or_large_images_has_a_limited_size():
    many = torch.zeros(70, 3, 500, 250, dtype=torch.uint8)
    sheet = contact_sheet(many, [["a\nb" * 200], *[["c"]] * 69])
    assert sheet.width == MARGIN + 8 * (88 + MARGIN)
    assert sheet.height < 8 * (TILE + MARGIN + 20 * 40)
