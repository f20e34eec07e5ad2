"""Preprocessing equals that of transformers, in both directions."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from transformers import AutoImageProcessor, pipeline
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

from tests.weights.parity import build
from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.inference.predictor import Predictor
from vit.model.build import meta_model
from vit.weights.formats.huggingface_config import (
    FAMILIES,
    processor_notes,
    read_processor,
    write_processor,
)
from vit.weights.formats.huggingface_writer import write_huggingface
from vit.weights.saved_model import LoadedRun

CLASSES = ("apple", "class10", "class2")
SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4, "num_classes": 3}
SHAPES = [(160, 120), (120, 160), (250, 90), (75, 200), (97, 64), (64, 64), (131, 129), (333, 500)]
SQUASHED = Preprocessing(image_size=(32, 32), resize="squash", crop_share=1.0)
PREPARED = {
    "squashed": SQUASHED,
    "squashed and cropped": Preprocessing(image_size=(32, 32), resize="squash", crop_share=0.8),
    "cropped": Preprocessing(image_size=(32, 32), crop_share=0.8, interpolation="bilinear"),
    "shifted": Preprocessing(image_size=(32, 32), crop_share=0.9),
    "colours": Preprocessing(
        image_size=(32, 32), crop_share=1.0, mean=(0.48, 0.45, 0.40), std=(0.26, 0.27, 0.28)
    ),
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[str]:
    """JPEG files of several shapes: waves of colour, discs and noise."""
    folder, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    paths = []
    for number, (width, height) in enumerate(SHAPES):
        rows, cols = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
        waves = random.uniform(-3, 3, size=(3, 3))
        pixels = [127 + 90 * np.sin(2 * (a * cols + b * rows) + c) for a, b, c in waves]
        noisy = np.stack(pixels, axis=-1) + random.normal(0, 4, size=(height, width, 3))
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        for _ in range(4):
            left, top = random.integers(0, (width, height))
            side = random.integers(20, min(width, height))
            colour = tuple(map(int, random.integers(0, 255, size=3)))
            ImageDraw.Draw(image).ellipse((left, top, left + side, top + side), fill=colour)
        paths.append(str(folder / f"{number}.jpg"))
        image.save(paths[-1], quality=90)
    return paths


def rest(shape: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Pixels left over beside and above and below the crop of an image of this shape."""
    full = preprocessing.resized_size(*shape)
    return full[0] - preprocessing.image_size[1], full[1] - preprocessing.image_size[0]


def moves(shape: tuple[int, int], preprocessing: Preprocessing) -> bool:
    """Whether half a pixel is rounded in two ways: down there, here to the even side."""
    return any(pixels % 4 == 3 for pixels in rest(shape, preprocessing))


def bytes_of(processor, path: str, preprocessing: Preprocessing) -> torch.Tensor:
    """What transformers makes of an image, back in brightness of 0 to 255."""
    values = processor(Image.open(path), return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(v)[:, None, None] for v in (preprocessing.mean, preprocessing.std))
    return (values * std + mean) * 255


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in PREPARED),
        ("squashed", {"pooling": "mean"}),
        ("cropped", {"layer_scale": 1e-5, "pooling": "class_token_mean"}),
    ],
    ids=str,
)
def test_pipeline_answers_as_predict_does(name, settings, photographs, randomise, tmp_path):
    config, preprocessing = ModelConfig(**{**SMALL, **settings}), PREPARED[name]
    state = randomise(meta_model(config).state_dict())
    content, processor, tensors = write_huggingface(state, config, CLASSES, preprocessing)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = pipeline("image-classification", model=str(tmp_path), device="cpu")(photographs)

    run = LoadedRun(build(state, config), CLASSES, preprocessing, config)
    mine = Predictor(run, device="cpu", precision="fp32", workers=1)(photographs)
    tops = [prediction.predictions[0][1] for prediction in mine]
    assert max(tops) - min(tops) > 0.02, "answers alike for all images show nothing"
    for ours, other, shape in zip(mine, theirs, SHAPES, strict=True):
        scores = {answer["label"]: answer["score"] for answer in other}
        # a pixel is much in a random network that sees 32 of them
        most = 0.2 if moves(shape, preprocessing) else 0.01
        assert all(abs(scores[label] - score) < most for label, score in ours.predictions)
        if not moves(shape, preprocessing):
            assert scores[ours.predictions[0][0]] > other[0]["score"] - most


@pytest.mark.parametrize("name", PREPARED)
def test_what_is_written_prepares_the_same_pixels(name, photographs, tmp_path):
    preprocessing = PREPARED[name]
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(write_processor(preprocessing, 32)))
    by_pillow, by_default = (
        AutoImageProcessor.from_pretrained(tmp_path, backend=backend) for backend in ("pil", None)
    )
    moved = [moves(shape, preprocessing) for shape in SHAPES]
    assert processor_notes(preprocessing) or not any(moved)
    assert all(moved) == ("out one pixel" in "".join(processor_notes(preprocessing)))
    for path, shape, is_moved in zip(photographs, SHAPES, moved, strict=True):
        with Image.open(path) as image:
            whole = image.resize(
                preprocessing.resized_size(*shape),
                Image.Resampling[preprocessing.interpolation.upper()],
            )
        left, top = (pixels // 2 for pixels in rest(shape, preprocessing))
        crop = torch.from_numpy(np.array(whole.crop((left, top, left + 32, top + 32))))
        crop = crop.permute(2, 0, 1).float()
        with Image.open(path) as image:
            assert torch.equal(preprocessing(image).float(), crop) != is_moved
        exact, default = (
            bytes_of(processor, path, preprocessing) for processor in (by_pillow, by_default)
        )
        assert (exact - crop).abs().max() < 0.01
        assert (default - crop).abs().max() < 5
        assert (default - crop).abs().mean() < 0.2


@pytest.mark.parametrize("share", [1.0, 0.95, 0.9, 0.875, 224 / 248, 1 / 3])
@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_a_preprocessing_comes_back(share, resize):
    """The share may be another number, but the sizes that follow from it are the same."""
    for size in (16, 32, 48, 64, 96, 224, 384, 518):
        preprocessing = Preprocessing(image_size=(size, size), resize=resize, crop_share=share)
        found, notes = read_processor(write_processor(preprocessing, size), size)
        assert not notes
        assert found.resize == resize
        assert found.image_size == (size, size)
        assert math.floor(size / found.crop_share) == math.floor(size / share)
    bilinear = Preprocessing(image_size=(32, 32), interpolation="bilinear", std=(0.2, 0.3, 0.4))
    assert read_processor(write_processor(bilinear, 32), 32)[0].interpolation == "bilinear"
    assert read_processor(write_processor(bilinear, 32), 32)[0].std == (0.2, 0.3, 0.4)


# class of transformers, its settings
SAVED = {
    "vit": ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    "vit in21k": ("ViTImageProcessor", {"size": 32, "resample": 3, "do_normalize": False}),
    "deit": ("DeiTImageProcessor", {"size": {"height": 40, "width": 40}, "crop_size": 32}),
    "beit": ("BeitImageProcessor", {"size": {"height": 32, "width": 32}}),
    "dinov2": (
        "BitImageProcessor",
        {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}},
    ),
    "clip": ("CLIPImageProcessor", {"size": 32, "crop_size": 32}),
    "siglip": ("SiglipImageProcessor", {"size": {"height": 32, "width": 32}}),
    "dinov3": ("DINOv3ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    "tips": ("Tipsv2ImageProcessor", {"size": {"height": 32, "width": 32}}),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_processors_are_read(name, photographs, tmp_path):
    kind, settings = SAVED[name]
    theirs = getattr(transformers, kind)(**settings)
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    ours, notes = read_processor(content, 32)
    assert not notes
    for path, shape in zip(photographs, SHAPES, strict=True):
        if moves(shape, ours):
            continue
        with Image.open(path) as image:
            mine = ours(image).float()
        assert (bytes_of(theirs, path, ours) - mine).abs().max() < 6
        assert (bytes_of(theirs, path, ours) - mine).abs().mean() < 0.4


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("ending", ["ImageProcessorFast", "FeatureExtractor", "ImageProcessor"])
def test_names_and_defaults_of_all_versions(name, ending):
    """A file with nothing but its class is that class as it is built."""
    kind = SAVED[name][0]
    full = json.loads(getattr(transformers, kind)().to_json_string())
    key = "feature_extractor_type" if ending == "FeatureExtractor" else "image_processor_type"
    short = {key: kind.replace("ImageProcessor", ending)}
    assert read_processor(short, 224) == read_processor(full, 224)
    assert read_processor(short, 224)[0] is not None
    nested = {"image_processor": short, "processor_class": "CLIPProcessor"}
    assert read_processor(nested, 224) == read_processor(short, 224)


BIT = {"image_processor_type": "BitImageProcessor"}
VIT = {"image_processor_type": "ViTImageProcessor"}


COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
UNREADABLE = [
    ({}, "the processor None is unknown"),
    ({"image_processor_type": "SamImageProcessor"}, "'SamImageProcessor' is unknown"),
    ({**VIT, "do_rescale": False}, "do_rescale=False"),
    ({**VIT, "rescale_factor": 1 / 127.5}, "rescale_factor=0.0078"),
    ({**BIT, "do_pad": True}, "do_pad=True"),
    ({**BIT, "do_flip_channel_order": True}, "do_flip_channel_order=True"),
    ({**VIT, "image_mean": [0.5]}, "preprocessing.mean=[0.5]"),
    ({**VIT, "image_std": [0.5, 0.5, 0.0]}, "must be more than 0"),
    ({**VIT, "image_mean": [0.5, 0.5, float("nan")]}, "preprocessing.mean=nan"),
]
COLOURS_ALONE = [
    ({**VIT, "do_resize": False}, "do_resize=False"),
    ({**VIT, "resample": 1}, "resample=1"),
    ({**VIT, "resample": "bicubic"}, "resample='bicubic'"),
    ({**VIT, "size": {"height": 224, "width": 192}}, "size={"),
    ({**VIT, "size": {"shortest_edge": 224}}, "with do_center_crop=False"),
    ({**VIT, "size": {"shortest_edge": 224, "longest_edge": 448}}, "size={"),
    ({**VIT, "size": "224"}, "size='224'"),
    ({**BIT, "crop_size": {"height": 224, "width": 192}}, "with crop_size"),
    ({**BIT, "crop_size": 256}, "with crop_size=256"),
    ({**BIT, "crop_size": None}, "with crop_size=None"),
    ({**BIT, "do_center_crop": False}, "with do_center_crop=False"),
]


@pytest.mark.parametrize(("content", "reason"), UNREADABLE + COLOURS_ALONE)
def test_unsupported_processors_give_a_note_and_their_colours_at_most(content, reason):
    found, (note,) = read_processor({**COLOURS, **content}, 224)
    assert reason in note
    assert "preprocessor_config.json" in note
    if (content, reason) in UNREADABLE:
        assert found is None
    else:
        assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert (found.image_size, found.resize, found.crop_share) == ((224, 224), "crop", 0.9)
        assert "its mean and std are used" in note


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_file_without_a_class_is_that_of_the_model_type(model_type):
    kinds = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    # of these, AutoImageProcessor knows no class
    alike = {"dinov2_with_registers": "dinov2"}
    known = alike.get(model_type, model_type.removesuffix("_vision_model"))
    colours = {**COLOURS, "do_normalize": True}
    typed = {"image_processor_type": kinds[known]["torchvision"], **colours}
    found, notes = read_processor(colours, 224, model_type)
    assert (found, notes) == read_processor(typed, 224)
    assert found.mean == (0.1, 0.2, 0.3)


@torch.no_grad()
def test_naflex_images_become_squares(photographs):
    theirs = transformers.Siglip2ImageProcessorPil(max_num_patches=16, patch_size=8)
    found, (note,) = read_processor(json.loads(theirs.to_json_string()), 32)
    assert "32 x 32 pixels; transformers keeps their shape" in note
    with Image.open(photographs[SHAPES.index((64, 64))]) as image:
        rows = theirs(image, return_tensors="pt")["pixel_values"][0]
        mine = found.normalise(found(image)[None])[0]
    assert (convert_image_to_patches(mine, 8) - rows).abs().max() < 0.03


def test_a_missing_processor_or_another_size_gives_a_note():
    assert read_processor(None, 224)[0] is None
    assert "no preprocessor_config.json" in read_processor(None, 224)[1][0]
    found, (note,) = read_processor(BIT, 518)
    assert found.image_size == (224, 224)
    assert "224" in note
    assert "518" in note
