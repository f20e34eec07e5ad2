"""Views, vectors, threads and compiled networks give what the plain network gives."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from vit.data.image_io import read_image
from vit.errors import ConfigError, WeightsError
from vit.inference.predictor import Predictor
from vit.weights.load_model import load_model
from vit.weights.saved_model import LoadedRun, load_run

pytestmark = pytest.mark.auto_precision


@pytest.fixture
def images(tiny_data: Path) -> list[str]:
    return [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]


@pytest.fixture
def run(tiny_run) -> LoadedRun:
    return load_run(tiny_run)


def answers(run, paths, **settings):
    predictor = Predictor(run, device="cpu", precision="fp32", **settings)
    return [answer for batch in predictor.batches(paths) for answer in batch]


@torch.inference_mode()
def by_hand(run: LoadedRun, view) -> torch.Tensor:
    return run.model(run.preprocessing.normalise(view)).double().softmax(dim=1)


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_flip_is_the_mean_of_an_image_and_its_mirror_image(run, images, keep_aspect):
    found = answers(run, images, tta="flip", keep_aspect=keep_aspect)
    for path, answer in zip(images, found, strict=True):
        image, prepare = read_image(path), run.preprocessing
        view = prepare.keep_aspect(image, 8) if keep_aspect else prepare(image)
        views = torch.stack([view, view.flip(-1)])
        assert answer.probabilities.numpy() == pytest.approx(
            by_hand(run, views).mean(dim=0).numpy(), abs=1e-5
        )
        assert torch.equal(answer.pixels, view)


def test_an_image_and_its_mirror_image_have_one_answer(run, images, tmp_path):
    mirrored = tmp_path / "mirrored.png"
    square = read_image(images[0]).crop((0, 0, 20, 20)).resize((16, 16))
    square.save(tmp_path / "a.png")
    square.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mirrored)
    one, other = answers(run, [str(tmp_path / "a.png"), str(mirrored)], tta="flip")
    torch.testing.assert_close(one.probabilities, other.probabilities)


def test_crops_are_ten_views(run, images, bad_images):
    found = answers(run, [images[0], bad_images[0], images[1]], tta="crops", batch_size=4)
    assert found[1].error
    for path, answer in zip(images[:2], found[::2], strict=True):
        crops = run.preprocessing.five_crops(read_image(path))
        expected = by_hand(run, torch.cat([crops, crops.flip(-1)])).mean(dim=0)
        assert answer.probabilities.numpy() == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"keep_aspect": True}, {"tta": "flip"}])
def test_embeddings_are_what_the_head_reads(run, images, bad_images, settings):
    paths = [*images[:5], bad_images[0]]
    *found, bad = answers(run, paths, embeddings=True, **settings)
    assert bad.embedding is None
    plain = answers(run, paths, **settings)
    for answer, other in zip(found, plain, strict=False):
        assert other.embedding is None
        assert answer.embedding.dtype == torch.float32
        assert answer.embedding.shape == (run.model.num_features,)
        torch.testing.assert_close(answer.probabilities, other.probabilities)
        if "tta" not in settings:
            with torch.inference_mode():
                logits = run.model.head(answer.embedding).double()
            torch.testing.assert_close(
                logits.softmax(0), answer.probabilities, atol=1e-6, rtol=1e-5
            )


def test_a_network_without_a_head_gives_embeddings_alone(tmp_path, images):
    import timm
    from safetensors.torch import save_file

    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0, pretrained=False
    ).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"architecture": "vit_tiny_patch16_224", "num_classes": 0, '
        '"model_args": {"img_size": 32, "depth": 1}}'
    )
    with pytest.raises(WeightsError, match="has no head"):
        load_model(tmp_path, notify=None)
    predictor = Predictor(
        tmp_path, device="cpu", precision="fp32", embeddings=True, notify=lambda _: None
    )
    assert predictor.classes == ()
    (batch,) = predictor.batches(images[:2])
    inputs = torch.stack([predictor.preprocessing(read_image(path)) for path in images[:2]])
    with torch.inference_mode():
        expected = theirs(predictor.preprocessing.normalise(inputs))
    found = torch.stack([answer.embedding for answer in batch])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [len(answer.probabilities) for answer in batch] == [0, 0]
    assert predictor(images[:2])[0].predictions == ()


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_no_digit(run, images, workers):
    one = Predictor(run, device="cpu", batch_size=2, workers=workers)(images)
    assert one == Predictor(run, device="cpu", batch_size=2, workers=2)(images)


def test_a_list_may_be_begun_anywhere(run, images):
    predictor = Predictor(run, device="cpu", batch_size=4)
    whole = predictor(images)
    for start in (4, 12, 24):
        assert list(predictor.stream(images[start:], first=start)) == whole[start:]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tta": "mirror"}, "tta='mirror': choose flip or crops"),
        ({"tta": "crops", "keep_aspect": True}, "keep_aspect shows whole images"),
        ({"compile": True, "keep_aspect": True}, "too many shapes to compile"),
    ],
)
def test_what_cannot_be_is_refused(run, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Predictor(run, device="cpu", **settings)


def test_crops_of_what_is_never_cut_are_refused(run):
    import dataclasses

    prepare = dataclasses.replace(run.preprocessing, resize="squash", crop_share=1.0)
    with pytest.raises(ConfigError, match="all crops are equal"):
        Predictor(dataclasses.replace(run, preprocessing=prepare), device="cpu", tta="crops")


def test_compiling_has_one_shape_and_a_failure_is_one_line(run, images, monkeypatch):
    shapes = []

    def compiled(function, **_):
        return lambda batch: (shapes.append(batch.shape[0]), function(batch))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    found = Predictor(run, device="cpu", batch_size=4, compile=True)(images[:9])
    assert set(shapes) == {4}
    for row, plain in zip(found, Predictor(run, device="cpu")(images[:9]), strict=True):
        assert dict(row.predictions) == pytest.approx(dict(plain.predictions), abs=1e-5)

    def broken(_function, **_):
        def fail(_batch):
            raise RuntimeError("no C++ compiler\nmore")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ConfigError, match=r"torch cannot compile here \(no C\+\+ compiler\)"):
        Predictor(run, device="cpu", compile=True)(images[:1])


@pytest.mark.slow
def test_a_compiled_network_says_the_same(run, images):
    plain = answers(run, images)
    for answer, other in zip(answers(run, images, compile=True), plain, strict=True):
        torch.testing.assert_close(answer.probabilities, other.probabilities, atol=1e-5, rtol=1e-5)
