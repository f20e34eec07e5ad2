"""Drawings: colour where the decoder looked or what spoke for a class, words of any script, names
that stay in the folder.
"""

import dataclasses
import itertools
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from tests.inference.captioners import save_captioner
from vit.commands.main import main
from vit.data import contact_sheet
from vit.data.contact_sheet import break_lines, draw_centred, escape_missing
from vit.data.image_io import read_image
from vit.data.sources.file_walk import OUTPUT_MARKER
from vit.errors import ConfigError, RunError
from vit.generation.generation_config import Search
from vit.inference.attribution import (
    WordAttribution,
    attribute_caption,
    relevance,
    seen_image,
)
from vit.inference.attribution_plot import (
    TILE,
    draw_explanations,
    overlay,
    plot_name,
    plot_words,
)
from vit.inference.predictor import Predictor
from vit.weights.saved_model import load_run

pytestmark = pytest.mark.auto_precision

NASTY = [
    "cat", "café", "кошка", "猫", "cat猫ж", "قطة", "🐱🇫🇷", "e\u0301\u0302", "\u202ecod", "\x1b[31m",
    "\ud800", "\U0010fffe", "a\nb", "", " ", "x" * 3000,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_captioner(tmp_path_factory.mktemp("run"), registers=1)


@pytest.fixture
def explain(tmp_path):
    """Draw explanations into a folder; its records as well as the predictions are returned."""

    def explain(predictor, images, name="x", **settings):
        folder = tmp_path / name
        found = [*draw_explanations(predictor, images, folder, **settings)]
        paths = sorted(folder.glob("*.json"))
        return found, [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    return explain


@pytest.fixture
def input_images(input_images):
    return input_images[:5]


def heat(drawn: Image.Image) -> np.ndarray:
    """How orange each pixel is: red above blue."""
    pixels = np.asarray(drawn).astype(float)
    return (pixels[:, :, 0] - pixels[:, :, 2]).clip(0)


@pytest.mark.parametrize("size", [(60, 40), (40, 60)])
def test_the_colour_is_in_the_patch_with_the_weight(size):
    cols, rows = size[0] // 20, size[1] // 20
    plain = Image.effect_noise(size, 80).convert("RGB")
    for row in range(rows):
        for col in range(cols):
            weights = torch.zeros(rows, cols)
            weights[row, col] = 0.01  # however little it is: the largest is full colour
            found = heat(overlay(plain, weights))
            assert found.max() > 200
            y, x = np.unravel_index(found.argmax(), found.shape)
            assert (y // 20, x // 20) == (row, col)
            far = [found[r * 20 + 10, c * 20 + 10] for r in range(rows) for c in range(cols)]
            assert sorted(far)[-2] < 20


def test_a_map_of_zeros_leaves_the_image_grey():
    drawn = overlay(Image.new("RGB", (20, 20), "blue"), torch.zeros(2, 2))
    assert heat(drawn).max() == 0


@torch.no_grad()
def craft(run) -> None:
    """Make an encoder that passes brightness on and a decoder that looks where there is most."""
    model = run.model
    target = run.tokenizer.encode(["cat"])[0][0]
    for name, parameter in model.named_parameters():
        if "token_embed" not in name:
            parameter.zero_()
    model.patch_embed.proj.weight[0] = 1.0
    model.patch_embed.proj.bias[0] = 150.0  # black gives -192, and some light more than 0
    model.norm.weight.fill_(1.0)
    model.decoder.norm.bias.copy_(model.decoder.token_embed.weight[target] * 10)
    for block in model.decoder.blocks:
        block.norm_cross.weight.fill_(1.0)
        head_dim = 32 // block.cross_attn.num_heads
        block.cross_attn.q.bias[::head_dim] = 5.0
        block.cross_attn.kv.weight[:32:head_dim, 0] = 5.0


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_attention_to_the_bright_patch_is_plotted_there(run, tmp_path, keep_aspect):
    loaded = load_run(run)
    craft(loaded)
    pil_image = Image.new("RGB", (480, 120), "black")
    x, y = (420, 60) if keep_aspect else (265, 35)  # the latter in the square that is kept
    ImageDraw.Draw(pil_image).rectangle((x - 26, y - 26, x + 26, y + 26), "white")
    pil_image.save(tmp_path / "light.png")
    predictor = Predictor(loaded, precision="fp32", keep_aspect=keep_aspect)
    (answer,) = next(predictor.batches([str(tmp_path / "light.png")]))
    assert answer.captions[0].text.startswith("cat cat")
    seen, words = answer.pixels.float().mean(0), attribute_caption(predictor, answer)
    row, col = divmod(int(seen.argmax()), seen.shape[1])
    for word in words:
        place = divmod(int(word.weights.argmax()), word.weights.shape[1])
        assert place == (row // 8, col // 8)
        assert word.weights.max() > 0.9
    drawn = plot_words(seen_image(predictor, answer.pixels), words[:1])
    # the tile of the word beside that of the image: orange where that is white
    left = np.asarray(drawn.convert("L"))[8:, 8:]
    height, width = (round(TILE * side / max(seen.shape)) for side in seen.shape)
    white = np.argwhere(left[:height, :width] > 200).mean(axis=0)
    orange = heat(drawn)[8 : 8 + height, 16 + width : 16 + 2 * width]
    hottest = np.argwhere(orange > 0.8 * orange.max()).mean(axis=0)
    cell = np.array([height, width]) * 8 / np.array(seen.shape)
    assert (abs(white - hottest) < cell).all()


def test_every_image_has_a_plot_and_a_json_file(run, input_images, bad_images, tmp_path, explain):
    images = [*input_images[:2], bad_images[0], *input_images[2:]]
    predictor = Predictor(run, precision="fp32", batch_size=4)
    found, records = explain(predictor, images)
    assert found == predictor(images)
    stems = [plot_name(place + 1, path) for place, path in enumerate(images) if place != 2]
    names = [f"{stem}.{kind}" for stem in stems for kind in ("json", "png")]
    assert sorted(os.listdir(tmp_path / "x")) == sorted([*names, OUTPUT_MARKER])
    told = [row for row in found if row.error is None]
    for stem, record, row in zip(stems, records, told, strict=True):
        assert record.keys() == {"image", "caption", "words"}
        assert (record["image"], record["caption"]) == (row.image, row.caption)
        joined = "".join(word["text"] for word in record["words"])
        assert joined == "".join(row.caption.split())
        weights = np.array([word["weights"] for word in record["words"]])
        assert weights.shape[1:] == (2, 2)
        assert weights.min() >= 0
        assert weights.sum((1, 2)).max() < 1
        with Image.open(tmp_path / "x" / f"{stem}.png") as drawn:
            assert drawn.width > 2 * TILE


def test_plot_names_are_unique_and_stay_in_the_folder(run, input_images, tmp_path, explain):
    images = []
    for image, name in zip(
        input_images,
        ("a/..png", "b/cat.png", "c/cat.png", "c/cat.jpg", "d/%00 é.png"),
        strict=True,
    ):
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        images.append(shutil.copy(image, path))
    found, _ = explain(Predictor(run), images, "to")
    assert all(one.error is None for one in found)
    assert len(os.listdir(tmp_path / "to")) == 11
    assert {path.name for path in tmp_path.iterdir()} == {"from", "to"}
    for name in ("../../x.png", "/etc/passwd", "..", "", "\udcff\n.png", "猫" * 300 + ".png"):
        stem = plot_name(12345, name)
        assert os.path.basename(stem) == stem
        assert stem.startswith("12345-")
        assert len(f".{stem}.json.1234567.tmp".encode()) < 256


def sizes(text: str) -> tuple[int, int]:
    return plot_words(Image.new("RGB", (16, 16)), [WordAttribution(text, torch.ones(2, 2))]).size


@pytest.mark.parametrize("word", NASTY, ids=[str(n) for n in range(len(NASTY))])
def test_any_text_can_be_plotted(word):
    width, height = sizes(word)
    assert width == 2 * TILE + 24
    assert height >= TILE + 20


def test_characters_without_a_glyph_are_escaped(monkeypatch):
    pillow = ImageFont.load_default(15)
    monkeypatch.setattr(contact_sheet, "fonts", lambda: (pillow,))
    assert [escape_missing(word) for word in ("cat", "猫", "a猫")] == ["cat", "\\u732b", "a\\u732b"]
    assert sizes("猫") == sizes("cat")
    bitmap = ImageFont.load_default_imagefont()
    monkeypatch.setattr(contact_sheet, "fonts", lambda: (bitmap,))
    assert escape_missing("aé猫") == "a\\xe9\\u732b"
    for word in NASTY:
        sizes(word)


def test_long_words_are_broken_into_lines_without_loss():
    text = "a-very-long-word" * 20
    lines = break_lines(text, 200)
    assert "".join(lines) == text
    assert len(lines) > 5
    for line in lines:
        assert contact_sheet.font_of(line).getlength(line) <= 200
    assert sizes(text)[1] > sizes("short")[1]


def test_lines_of_text_are_centred():
    image = Image.new("RGB", (200, 30), "white")
    draw_centred(ImageDraw.Draw(image), "minimum", (100, 2))
    _, ink = np.nonzero(np.asarray(image.convert("L")) < 128)
    assert abs((ink.min() + ink.max()) / 2 - 100) < 3


@pytest.mark.parametrize(
    ("model", "settings", "drawing", "told"),
    [
        ("run", {"merge_tokens": 1}, {}, "merge_tokens=0"),
        ("tiny_run", {"merge_tokens": 1}, {}, "merge_tokens=0"),
        ("tiny_run", {"tta": "flip"}, {}, "tta=flip: one view of an image is explained"),
        ("run", {}, {"deletion": False}, "no_deletion: maps of words are never tested"),
    ],
)
def test_what_cannot_be_explained_is_refused(request, model, settings, drawing, told, tmp_path):
    predictor = Predictor(request.getfixturevalue(model), **settings)
    with pytest.raises(ConfigError, match=told):
        next(draw_explanations(predictor, ["a.png"], tmp_path / "x", **drawing))
    assert not (tmp_path / "x").exists()


def test_a_file_is_no_folder_for_plots(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        next(draw_explanations(Predictor(run), ["a.png"], tmp_path / "file"))


def test_the_plotted_caption_is_the_best_one(run, input_images, explain):
    predictor = Predictor(run, precision="fp32", search=Search(beams=3, n_best=2, max_tokens=3))
    (found,), (record,) = explain(predictor, input_images[:1])
    assert record["caption"] == found.caption


def test_classes_are_plotted_with_their_deletion_metric(
    tiny_run, input_images, bad_images, explain
):
    images = [*input_images[:2], bad_images[0], *input_images[2:]]
    predictor = Predictor(tiny_run, precision="fp32", batch_size=4)
    said = []
    found, records = explain(predictor, images, top_k=2, notify=said.append)
    assert found == predictor(images, top_k=2)
    told = [row for row in found if row.error is None]
    assert [record["image"] for record in records] == [row.image for row in told]
    model, better = predictor.model, 0
    with torch.no_grad():
        empty = model(torch.zeros(1, 3, 16, 16))[0].double().softmax(0)
    for record, row in zip(records, told, strict=True):
        pixels = predictor.preprocessing(read_image(record["image"]))
        network_input = predictor.preprocessing.normalise(pixels[None])
        with torch.no_grad():
            whole = model(network_input)[0].double().softmax(0)
        labels = [one["label"] for one in record["classes"]]
        assert labels == [label for label, _ in row.predictions]
        better += record["classes"][0]["deletion"]["better_than_chance"]
        for one in record["classes"]:
            index = predictor.classes.index(one["label"])
            assert one["probability"] == pytest.approx(float(whole[index]), abs=1e-5)
            expected = relevance(model, network_input, [index])[0]
            weights = torch.tensor(one["weights"])
            above = expected - expected.min()
            torch.testing.assert_close(weights, above / above.sum(), atol=1e-5, rtol=0)
            deletion = one["deletion"]
            assert deletion["deleted"] == [0, 0.25, 0.5, 0.75, 1]
            for curve in (deletion["curve"], deletion["reverse"]["curve"]):
                ends = [float(whole[index]), float(empty[index])]
                assert [curve[0], curve[-1]] == pytest.approx(ends, abs=1e-5)
            lowest = min(deletion["random_scores"])
            assert deletion["better_than_chance"] == (deletion["score"] < lowest * 0.9999)
    assert len(said) == 1
    assert f"beat all 9 random orders for {better} of {len(told)} images" in said[0]


@pytest.mark.slow
def test_maps_alone_are_the_same_and_take_two_passes(
    tiny_run, input_images, tmp_path, capsys, explain
):
    loaded, images_passed = load_run(tiny_run), []
    loaded.model.register_forward_hook(lambda _net, _inputs, out: images_passed.append(len(out)))
    predictor = Predictor(loaded, precision="fp32")
    _, whole = explain(predictor, input_images, "whole")
    count = sum(images_passed)
    images_passed.clear()
    _, alone = explain(predictor, input_images, "alone", deletion=False)
    steps = 2 + 3 * (9 + 2 * 2)  # of four patches
    saved = len(input_images) * (steps - 1)  # the one is that of the probabilities
    assert count - sum(images_passed) == saved
    for record, tested in zip(alone, whole, strict=True):
        assert record["image"] == tested["image"]
        for one, other in zip(record["classes"], tested["classes"], strict=True):
            assert other.pop("deletion")
            assert one == other | {"probability": pytest.approx(other["probability"], rel=1e-3)}
    words = ["predict", str(tiny_run), *input_images, "--precision", "fp32", "--no-deletion"]
    assert main([*words, "--explain", str(tmp_path / "command")]) == 0
    written = sorted((tmp_path / "command").glob("*.json"))
    assert [json.loads(path.read_text(encoding="utf-8")) for path in written] == alone
    assert "random orders" not in capsys.readouterr().err
    with Image.open(next((tmp_path / "alone").glob("*.png"))) as drawn:
        assert drawn.width == 3 * TILE + 32


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_the_plot_shows_the_preprocessed_image(tiny_run, tmp_path, resize, explain):
    """An image that is red outside of the square that the network sees."""
    loaded = load_run(tiny_run)
    preparing = dataclasses.replace(loaded.preprocessing, resize=resize, crop_share=1.0)
    loaded = dataclasses.replace(loaded, preprocessing=preparing)
    image = Image.new("RGB", (60, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    image.save(tmp_path / "wide.png")
    _, (record,) = explain(Predictor(loaded), [tmp_path / "wide.png"])
    assert record["seen"] == {"size": [16, 16], "resize": resize, "crop_share": 1.0}
    with Image.open(next((tmp_path / "x").glob("*.png"))) as drawn:
        plain = np.asarray(drawn.convert("RGB"))[8 : 8 + TILE, 8 : 8 + TILE].astype(int)
        assert drawn.width == 3 * TILE + 32
    red = (plain[:, :, 0] > plain[:, :, 2]).mean()
    assert red < 0.02 if resize == "crop" else 0.6 < red < 0.7


@pytest.mark.slow
def test_maps_are_computed_in_float32_and_independent_of_the_batch(tiny_run, input_images, explain):
    """The digits depend neither on the precision of the predictions nor on neighbours."""

    def found(images, precision, name):
        predictor = Predictor(tiny_run, precision=precision, batch_size=4)
        _, records = explain(predictor, images, name)
        return {(row["image"], one["label"]): one for row in records for one in row["classes"]}

    usual = found(input_images, "fp32", "usual")
    assert found(input_images[::-1], "fp32", "turned") == usual
    rough = found(input_images, "bf16", "rough")
    shared = usual.keys() & rough.keys()
    assert len(shared) >= len(usual) - 2  # bf16 may rank the second class otherwise
    assert all(usual[key] == rough[key] for key in shared)


def test_no_summary_is_printed_if_no_image_is_readable(tmp_path, tiny_run, explain):
    said = []
    (found,), _ = explain(Predictor(tiny_run), ["none.png"], notify=said.append)
    assert found.error
    assert said == []
    assert os.listdir(tmp_path / "x") == []


def test_an_explanation_that_overflows_is_the_error_of_its_image(
    tiny_run, input_images, tmp_path, monkeypatch, explain
):
    def overflow(network, images, classes, **settings):
        maps = relevance(network, images, classes, **settings)
        return maps.fill_(torch.nan) if next(count) == 1 else maps

    count = itertools.count()
    monkeypatch.setattr("vit.inference.attribution.relevance", overflow)
    predictor = Predictor(tiny_run, precision="fp32")
    found, _ = explain(predictor, input_images[:3], deletion=False)
    assert [one.error is None for one in found] == [True, False, True]
    assert found[1].error == "gradients overflowed, so it cannot be explained"
    assert found[1].predictions == predictor(input_images[:3])[1].predictions
    assert len(os.listdir(tmp_path / "x")) == 5
