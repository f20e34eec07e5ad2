"""Captions of a Predictor: those of the network run by hand, whatever else is in the batch."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.inference.captioners import save_captioner
from tests.slow_cases import mostly_slow
from vit.errors import ConfigError, WeightsError
from vit.generation import generate
from vit.generation.generation_config import Search
from vit.inference.predictor import Predictor
from vit.weights.adapt_weights import change_patches
from vit.weights.load_model import build_from_state
from vit.weights.saved_model import LoadedRun, load_run, split_decoder

CLASSES = ("apple", "class10", "class2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("both"), classes=CLASSES)


@pytest.fixture
def input_images(tiny_data: Path) -> list[str]:
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


def seen(run: LoadedRun, path: str) -> torch.Tensor:
    """The memory of one image, alone."""
    image = run.preprocessing(Image.open(path).convert("RGB"))
    return run.model.encode_images(run.preprocessing.normalise(image[None]))[1]


def greedy(run: LoadedRun, memory: torch.Tensor) -> tuple[str, float, bool]:
    """The likeliest word each time, without caches: text, log probability, and if it ended."""
    tokenizer, decoder = run.tokenizer, run.model.decoder
    ids, score = [tokenizer.begin], 0.0
    for place in range(decoder.max_length - 1):
        logits = decoder(torch.tensor([ids]), memory)[0, -1]
        if place == 0:  # a caption has a word
            allowed = logits.index_fill(0, torch.tensor(tokenizer.end), -torch.inf)
        else:
            allowed = logits
        ids.append(int(allowed.argmax()))
        score += float(logits.log_softmax(0)[ids[-1]])
        if ids[-1] == tokenizer.end:
            return tokenizer.decode(ids[1:-1]), score, True
    return tokenizer.decode(ids[1:]), score, False


def texts(found: Sequence) -> list[list[str]]:
    return [[caption.text for caption in prediction.captions] for prediction in found]


def scores(found: Sequence) -> list[float]:
    return [caption.score for prediction in found for caption in prediction.captions]


@torch.no_grad()
def test_captions_equal_those_of_the_network_called_directly(run, input_images):
    loaded = load_run(run)
    found = Predictor(run, precision="fp32", batch_size=4)(input_images)
    assert [prediction.image for prediction in found] == input_images
    for path, prediction in zip(input_images, found, strict=True):
        text, score, ended = greedy(loaded, seen(loaded, path))
        assert (prediction.caption, prediction.error) == (text, None)
        assert prediction.score == pytest.approx(score, abs=1e-4)
        assert prediction.captions[0].ended == ended
        assert prediction.predictions == ()
    assert len({prediction.caption for prediction in found}) > 5
    assert {prediction.captions[0].ended for prediction in found} == {True, False}


SEARCHES = [
    Search(),
    Search(beams=3, n_best=2),
    Search(temperature=1.0, seed=1),
    Search(repetition_penalty=1.5, min_tokens=3, max_tokens=5),
]


@pytest.mark.parametrize(
    "search", mostly_slow(SEARCHES, 2), ids=["greedy", "beams", "drawn", "penalised"]
)
def test_captions_do_not_depend_on_batches_or_unreadable_images(
    run, input_images, bad_images, search
):
    predictor = Predictor(run, batch_size=4, precision="fp32", search=search)
    plain = predictor(input_images)
    assert {len(prediction.captions) for prediction in plain} == {search.n_best}
    other = Predictor(run, batch_size=16, precision="fp32", search=search)(input_images)
    assert texts(other) == texts(plain)
    assert scores(other) == pytest.approx(scores(plain), abs=1e-4)
    mixed = predictor([*input_images[:2], bad_images[0], *input_images[3:]])
    assert (mixed[2].error, mixed[2].captions, mixed[2].caption) == (mixed[2].error, (), None)
    assert mixed[2].error
    del mixed[2], plain[2]
    assert texts(mixed) == texts(plain)
    assert scores(mixed) == pytest.approx(scores(plain), abs=1e-4)


@pytest.mark.auto_precision
def test_padding_images_get_no_caption(run, input_images, bad_images, monkeypatch):
    rows, write = [], generate.generate_captions

    def counting(decoder, memory, *others, **settings):
        rows.append(len(memory))
        return write(decoder, memory, *others, **settings)

    monkeypatch.setattr(generate, "generate_captions", counting)
    predictor = Predictor(run, batch_size=8)
    predictor([*input_images[:3], bad_images[0], input_images[4]])
    predictor(bad_images[:2])
    assert rows == [4]


def test_captions_and_classes_equal_those_of_each_head_alone(both, input_images):
    loaded = load_run(both)
    images = [loaded.preprocessing(Image.open(path).convert("RGB")) for path in input_images]
    with torch.no_grad():
        classes, memory = loaded.model.encode_images(
            loaded.preprocessing.normalise(torch.stack(images))
        )
    found = Predictor(both, precision="fp32")(input_images, top_k=2)
    for row, own, prediction in zip(classes.softmax(1), memory, found, strict=True):
        best = row.argsort(descending=True)[:2]
        assert [label for label, _ in prediction.predictions] == [CLASSES[i] for i in best]
        assert [p for _, p in prediction.predictions] == pytest.approx(row[best].tolist(), abs=1e-5)
        with torch.no_grad():
            assert prediction.caption == greedy(loaded, own[None])[0]


@pytest.mark.parametrize("name", ["run", "both"])
def test_captions_with_keep_aspect_equal_those_of_the_network_called_directly(
    name, request, tmp_path
):
    folder = request.getfixturevalue(name)
    loaded, paths = load_run(folder), []
    for number, (height, width) in enumerate(((40, 40), (40, 150), (90, 30), (31, 33), (40, 150))):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.effect_noise((width, height), 90).convert("RGB").save(paths[-1])
    predictor = Predictor(folder, keep_aspect=True, precision="fp32", batch_size=4)
    shapes = set()
    for path, found in zip(paths, predictor(paths), strict=True):
        image = loaded.preprocessing.to_native(8)(Image.open(path))
        shapes.add(tuple(image.shape))
        with torch.no_grad():
            classes, memory = loaded.model.encode_images(
                loaded.preprocessing.normalise(image[None])
            )
            text, score, _ = greedy(loaded, memory)
        assert found.caption == text
        assert found.score == pytest.approx(score, abs=1e-4)
        expected = classes[0].softmax(0)
        told = dict(found.predictions)
        assert [told[label] for label in loaded.classes] == pytest.approx(
            expected.tolist(), abs=1e-5
        )
    assert len(shapes) == 3


@pytest.mark.auto_precision
def test_keep_aspect_needs_an_encoder_with_sequence_packing(tmp_path):
    folder = save_captioner(tmp_path, position="relative")
    with pytest.raises(ConfigError, match="position=relative"):
        Predictor(folder, keep_aspect=True)


@pytest.mark.slow
def test_another_patch_size_changes_the_encoder_only(both, input_images):
    plain = Predictor(both, precision="fp32")(input_images, top_k=3)
    assert Predictor(both, precision="fp32", patch_size=8)(input_images, top_k=3) == plain
    assert Predictor(both, precision="fp32", merge_tokens=0)(input_images, top_k=3) == plain
    for asked in ({"patch_size": 4}, {"merge_tokens": 1}):
        predictor = Predictor(both, precision="fp32", **asked)
        found = predictor(input_images, top_k=3)
        assert texts(found) != texts(plain)
        words = predictor.model.decoder.state_dict()
        for key, tensor in load_run(both).model.decoder.state_dict().items():
            assert torch.equal(words[key], tensor)
        # classes are those of the encoder with other patches, without any decoder
        whole = load_run(both)
        encoder = build_from_state(whole.config, split_decoder(whole.model.state_dict())[0])
        alone = dataclasses.replace(whole, model=encoder, decoder=None, tokenizer=None)
        named = Predictor(change_patches(alone, **asked), precision="fp32")(input_images, top_k=3)
        for ours, theirs in zip(found, named, strict=True):
            assert dict(ours.predictions) == pytest.approx(dict(theirs.predictions), abs=1e-6)


@pytest.mark.auto_precision
@pytest.mark.parametrize(
    ("source", "search", "message"),
    [
        ("tiny_run", {"beams": 3, "min_tokens": 2}, "beams=3, min_tokens=2: .*writes no captions"),
        ("tiny_run", {}, "search: .*writes no captions"),
        ("run", {"max_tokens": 10}, "max_tokens=10: this decoder writes at most 9"),
        ("run", {"min_tokens": 10}, "min_tokens=10: this decoder writes at most 9"),
    ],
)
def test_unsupported_settings_are_refused(request, source, search, message):
    with pytest.raises(ConfigError, match=message):
        Predictor(request.getfixturevalue(source), search=Search(**search))


@torch.no_grad()
def test_an_image_with_nan_memory_does_not_affect_others(run, input_images):
    predictor, loaded = Predictor(run, precision="fp32"), load_run(run)
    memories = [seen(loaded, path)[0] for path in input_images[:3]]
    memories[1] = memories[1] * torch.nan
    first, bad, last = predictor.caption_generator.generate(memories, [0, 1, 2])
    assert isinstance(bad, WeightsError)
    expected = predictor(input_images[:3])
    assert (first[0].text, last[0].text) == (expected[0].caption, expected[2].caption)
    assert "not finite" in str(bad)
