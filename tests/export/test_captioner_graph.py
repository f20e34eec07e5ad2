"""Exported captioners say what torch says, without torch, and refuse what they cannot be."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from vit.config import AugmentConfig, Config, DecoderConfig, ModelConfig, TrainingConfig
from vit.data.captions.tokenizer import train_tokenizer
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, VitError, WeightsError
from vit.export import onnx_tracing
from vit.export.export_formats import export_onnx
from vit.export.onnx_tracing import Part, check_equal, to_onnx
from vit.exported.exported_captioner import greedy_decode
from vit.generation.generate import generate, generate_captions
from vit.generation.generation_config import Search
from vit.inference.predictor import Predictor
from vit.model.build import build_captioner
from vit.weights.saved_model import load_run, save_model

pytestmark = pytest.mark.slow

SMALL = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4}
CLASSES = ("apple", "pear", "plum")
# The first one has many options at once, and one block each.
MIXTURES = [
    (
        {"num_classes": 3, "registers": 2, "norm": "rmsnorm"},
        {"decoder_position": "rotary", "decoder_norm": "rmsnorm", "decoder_feedforward": "swiglu"}
        | {"decoder_qk_norm": True, "decoder_kv_heads": 2},
    ),
    (
        {"pooling": "none", "position": "rotary", "class_token": False, "parallel_blocks": True},
        {"decoder_position": "sinusoidal", "decoder_norm_order": "post", "decoder_dim": 48}
        | {"decoder_heads": 3, "decoder_kv_heads": 1, "decoder_layer_scale": 0.5},
    ),
    (
        {"num_classes": 3, "position": "sinusoidal_2d", "pooling": "attention"}
        | {"feedforward": "swiglu_packed", "merge_tokens": 1},
        {"decoder_feedforward": "swiglu_packed", "decoder_depth": 3, "caption_dropout": 0.1},
    ),
    (
        {"num_classes": 3, "position": "relative", "pooling": "mean", "norm_order": "post"}
        | {"feedforward": "moe", "moe_every": 1, "num_experts": 3},
        {"decoder_feedforward": "moe", "decoder_position": "rotary", "decoder_hidden_dim": 40},
    ),
    (
        {"pooling": "none", "position": "learned_rotary", "repeat_blocks": 2, "num_kv_heads": 2}
        | {"norm_order": "sandwich"},
        {"decoder_activation": "quick_gelu", "decoder_depth": 1, "caption_tokens": 5}
        | {"decoder_position": "relative"},
    ),
]


def random_run(folder, encoder, decoder):
    """A run folder of a captioner no part of which is zero."""
    folder.mkdir()
    words = [f"a {size} {shape} sits there" for size in ("big", "red") for shape in ("cat", "dog")]
    tokenizer = train_tokenizer([*words, *words])
    settings = ModelConfig(**{**SMALL, "num_classes": 0, **encoder})
    usual = {"decoder_depth": 2, "caption_tokens": 9, "vocab_size": tokenizer.size}
    writer = DecoderConfig(**{**usual, **decoder})
    config = Config(
        training=TrainingConfig(task="caption"),
        augment=AugmentConfig(mixup=0.0, cutmix=0.0),
        model=settings,
        decoder=writer,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = build_captioner(settings, writer).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        model.decoder.token_embed.weight.data[tokenizer.end] *= 2  # so that some sentences end
    save_model(
        folder,
        model,
        config=config,
        classes=CLASSES[: settings.num_classes],
        preprocessing=Preprocessing(
            image_size=(16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)
        ),
        tokenizer=tokenizer,
    )
    return folder


@pytest.fixture(scope="module")
def input_images(tmp_path_factory):
    """Noise in odd sizes, modes and orientations."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = []
    for number, mode in enumerate(["RGB", "L", "RGBA", "P", "I;16", "CMYK"] * 3):
        size = (int(random.integers(3, 40)), int(random.integers(3, 40)), 4)
        pixels = random.integers(0, 256, size=size, dtype=np.uint8)
        image = Image.fromarray(pixels).convert("RGB")
        if mode == "I;16":
            image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
        elif mode == "RGBA":
            image = Image.fromarray(pixels)
        else:
            image = image.convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        path = folder / f"{number}.{'tiff' if mode == 'CMYK' else 'png'}"
        image.save(path, exif=exif)
        paths.append(str(path))
    return paths


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The first mixture: its run folder and its encoder's file."""
    folder = tmp_path_factory.mktemp("exported")
    encoder, decoder = MIXTURES[0]  # a graph of one block takes half the time of one with two
    run = random_run(folder / "run", {**encoder, "depth": 1}, {**decoder, "decoder_depth": 1})
    found = export_onnx(run, folder / "pets.onnx")
    assert [path.name for path, _ in found.files] == ["pets.onnx", "pets.decoder.onnx"]
    assert found.difference < 1e-5
    return run, folder / "pets.onnx"


@torch.no_grad()
def torch_answers(run, paths, search=None):
    """Probabilities and captions by the network itself."""
    loaded = load_run(run)
    images = torch.stack([loaded.preprocessing(read_image(path)) for path in paths])
    logits, memory = loaded.model.encode_images(loaded.preprocessing.normalise(images))
    captions = generate_captions(loaded.model.decoder, memory, loaded.tokenizer, search or Search())
    return logits.double().softmax(1), [first for first, *_ in captions]


def assert_same(answers, probabilities, captions):
    assert [answer.error for answer in answers] == [None] * len(captions)
    ours = [answer.captions[0] for answer in answers]
    assert [one.ids for one in ours] == [one.ids for one in captions]
    assert [one.text for one in ours] == [one.text for one in captions]
    assert [one.ended for one in ours] == [one.ended for one in captions]
    assert [one.score for one in ours] == pytest.approx([one.score for one in captions], abs=1e-3)
    for answer, row in zip(answers, probabilities, strict=True):
        named = dict(zip(CLASSES, row.tolist(), strict=False))
        assert dict(answer.predictions) == pytest.approx(named, abs=1e-5)
        assert [label for label, _ in answer.predictions] == sorted(named, key=lambda n: -named[n])


def test_captions_scores_and_classes_equal_those_of_torch(exported, input_images):
    run, path = exported
    probabilities, captions = torch_answers(run, input_images)
    assert len({one.text for one in captions}) > 3
    assert {one.ended for one in captions} == {True, False}
    for size in (16, 5):
        assert_same(Predictor(path, batch_size=size)(input_images), probabilities, captions)


def test_the_length_limits_work_as_in_torch(exported, input_images):
    run, path = exported
    limits = {"min_tokens": 4, "max_tokens": 5}
    assert_same(
        Predictor(path, search=Search(**limits))(input_images),
        *torch_answers(run, input_images, Search(**limits)),
    )
    like = Predictor(path, search=Search(min_tokens=7), device=None, precision="auto")
    assert_same(like(input_images), *torch_answers(run, input_images, Search(min_tokens=7)))


def test_the_decoder_takes_tokens_one_by_one_or_together(exported):
    """Both by the decoder's graph; the exporter itself has compared it with torch."""
    runner = Predictor(exported[1])
    key, value, _ = runner._encoder({"images": np.full((2, 16, 16, 3), 7, np.uint8)})
    seen = {"memory_key": key, "memory_value": value}
    past = {"past_key": key[..., :0, :], "past_value": value[..., :0, :]}
    ids = np.array([[1, 5, 6, 4], [1, 4, 4, 8]])
    whole = runner._decoder({"ids": ids, **past, **seen})
    for word in ids.T:
        logits, *present = runner._decoder({"ids": word[:, None], **past, **seen})
        past = dict(zip(past, present, strict=True))
    for found, expected in zip((logits, *present), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_captioning_does_not_import_torch(exported, input_images):
    code = (
        "import sys; from vit import Predictor;"
        "print(Predictor(sys.argv[1])([sys.argv[2]])[0].caption);"
        "sys.exit(bool({'torch', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(exported[1]), input_images[0]]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert (said.returncode, said.stderr) == (0, "")
    (expected,) = torch_answers(exported[0], input_images[:1])[1]
    assert said.stdout == expected.text + "\n"


def test_unreadable_images_give_error_predictions(exported, input_images, bad_images):
    runner = Predictor(exported[1], batch_size=3)
    mixed = [*bad_images[:4], input_images[0], *bad_images[4:], input_images[1]]
    answers = runner(mixed, top_k=1)
    assert [answer.image for answer in answers] == mixed
    assert [answer.error is None for answer in answers] == [path in input_images for path in mixed]
    good = [answer for answer in answers if answer.error is None]
    assert [one.caption for one in good] == [one.caption for one in runner(input_images[:2])]
    assert all(len(one.predictions) == 1 for one in good)
    bad = next(answer for answer in answers if answer.error is not None)
    assert (bad.caption, bad.score, bad.predictions) == (None, None, ())


def test_an_image_on_which_a_network_fails_is_an_error_of_its_own(
    exported, input_images, monkeypatch
):
    runner = Predictor(exported[1], batch_size=3)
    right, encoder = runner(input_images[:7]), runner._encoder
    wrong = runner.preprocessing.resize_and_crop(read_image(input_images[1]))

    def encode(inputs):
        if any(np.array_equal(image, wrong) for image in inputs["images"]):
            raise WeightsError("onnxruntime cannot compute it (no room)")
        return encoder(inputs)

    monkeypatch.setattr(runner.engine, "_encoder", encode)
    answers = runner(input_images[:7])
    assert answers[1].error == "onnxruntime cannot compute it (no room)"
    assert [one.caption for one in answers] == [
        None if number == 1 else one.caption for number, one in enumerate(right)
    ]


def test_the_metadata_are_complete_and_have_no_local_path(exported):
    run, path = exported
    loaded = load_run(run)
    both = {}
    for kind, file in (("encoder", path), ("decoder", path.with_name("pets.decoder.onnx"))):
        proto = onnx.load(file)
        onnx.checker.check_model(proto, full_check=True)
        both[kind] = about = {entry.key: entry.value for entry in proto.metadata_props}
        assert json.loads(about["preprocessing"]) == loaded.preprocessing.to_dict()
        assert tuple(json.loads(about["classes"])) == CLASSES
        assert about["source_run"] == str(run)
        assert (int(about["begin"]), int(about["end"]), int(about["pad"])) == (
            *(loaded.tokenizer.begin, loaded.tokenizer.end, loaded.tokenizer.pad),
        )
        assert (about["graph"], about["max_tokens"]) == (kind, "8")
        assert about["vit_version"]
        assert b"site-packages" not in file.read_bytes()
        assert b"/vit/" not in file.read_bytes()
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*proto.graph.input, *proto.graph.output)
        }
        assert shapes["memory_key"] == [1, "batch", 2, 7, 8]
        if kind == "encoder":
            assert shapes["images"] == ["batch", 16, 16, 3]
            assert shapes["probabilities"] == ["batch", 3]
            assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
        else:
            assert shapes["ids"] == ["batch", "new"]
            assert shapes["past_key"] == shapes["past_value"] == [1, "batch", 2, "past", 8]
            assert shapes["present_key"] == [1, "batch", 2, "past_and_new", 8]
    assert both["decoder"]["tokenizer"] == loaded.tokenizer.to_json()
    assert both["decoder"]["pair"] == both["encoder"]["pair"]


@pytest.mark.parametrize(("encoder", "decoder"), MIXTURES, ids=str)
def test_every_option_of_the_network_is_exported(encoder, decoder, tmp_path, input_images):
    run = random_run(tmp_path / "run", encoder, decoder)
    assert export_onnx(run, tmp_path / "a.onnx").difference < 1e-5
    assert_same(Predictor(tmp_path / "a.onnx")(input_images), *torch_answers(run, input_images))


class Table:
    """Logits by row and place, for both searches; whole numbers, so that many are equal."""

    def __init__(self, rows=7, places=6, vocab=5):
        self.logits = np.random.default_rng(3).integers(0, 3, (rows, places, vocab))
        self.logits = self.logits.astype(np.float32)
        self.rows, self.place = torch.arange(rows), 0

    def __call__(self, ids):
        assert ids.shape == (len(self.rows), 1)
        self.place += 1
        return torch.from_numpy(self.logits[self.rows.numpy(), self.place - 1])

    def select_rows(self, rows):
        self.rows = self.rows[rows]

    def step(self, inputs):
        """The decoder's graph: rows are told by the memory, places by the past."""
        assert inputs["ids"].shape[1] == 1
        rows = inputs["memory_key"][0, :, 0, 0, 0].astype(int)
        past = inputs["past_key"]
        grown = np.concatenate([past, past[..., :1, :] if past.size else past], axis=3)
        grown = np.zeros((1, len(rows), 1, past.shape[3] + 1, 1), np.float32) + grown.sum()
        return [self.logits[rows, past.shape[3]], grown, grown]


@pytest.mark.parametrize("least", [1, 3])
def test_greedy_decoding_equals_that_of_torch(least):
    table, end = Table(), 2
    search = Search(min_tokens=least, max_tokens=6)
    expected = generate(table, rows=7, begin=0, end=end, search=search)
    memory = np.arange(7, dtype=np.float32).reshape(1, 7, 1, 1, 1)
    limits = {"min_tokens": least, "max_tokens": 6}
    found = greedy_decode(table.step, memory, memory, begin=0, end=end, **limits)
    assert [one.ids for one in found] == [one.ids for (one,) in expected]
    assert [one.ended for one in found] == [one.ended for (one,) in expected]
    scores = [one.score for (one,) in expected]
    assert [one.score for one in found] == pytest.approx(scores, abs=1e-5)
    assert len({len(one.ids) for one in found}) > 2


def test_logits_that_are_not_finite_raise_an_error():
    table, memory = Table(), np.zeros((1, 1, 1, 1, 1), np.float32)
    table.logits[:] = np.nan
    with pytest.raises(WeightsError, match="log probability nan"):
        greedy_decode(table.step, memory, memory, begin=0, end=2, min_tokens=1, max_tokens=3)


def test_a_graph_that_differs_from_torch_is_refused():
    class Scale(torch.nn.Module):
        by = 2.0

        def forward(self, x):
            return (x * self.by,)

    axes, module = {"x": {0: "batch"}}, Scale().eval()
    examples = [(torch.randn(rows, 3),) for rows in (2, 1)]
    part = Part(
        name="part", module=module, inputs=axes, outputs={"y": {0: "batch"}}, examples=examples
    )
    content = to_onnx(part, {}).SerializeToString()
    assert check_equal(part, content) < 1e-6
    module.by = 2.001
    with pytest.raises(VitError, match=r"part differs from torch: y by 0\.0\d+ of .*nothing was"):
        check_equal(part, content)


def test_settings_that_cannot_be_exported_are_refused_by_name(exported, tmp_path, monkeypatch):
    run, path = exported
    short = random_run(tmp_path / "short", {"pooling": "none"}, {"caption_tokens": 4})
    with pytest.raises(ConfigError, match="caption_tokens=4"):
        export_onnx(short, tmp_path / "a.onnx")
    with pytest.raises(ConfigError, match="precision='fp16': a captioner is exported in fp32"):
        export_onnx(run, tmp_path / "a.onnx", precision="fp16")
    monkeypatch.setattr(onnx_tracing, "MAX_GRAPH_BYTES", 1000)
    with pytest.raises(ConfigError, match="GB of weights"):
        export_onnx(run, tmp_path / "a.onnx")
    monkeypatch.undo()
    monkeypatch.setattr("vit.export.export_onnx.to_onnx", lambda *_: onnx.load(path))
    monkeypatch.setattr(onnx_tracing, "TOLERANCE", -1.0)
    with pytest.raises(VitError, match="the exported encoder differs"):
        export_onnx(run, path, overwrite=True)
    assert not [*tmp_path.glob("*.onnx"), *tmp_path.glob(".*")]
    Predictor(path)


def test_files_of_two_exports_are_refused(exported, tmp_path):
    _, path = exported
    decoder = path.with_name("pets.decoder.onnx")
    with pytest.raises(WeightsError, match="is the decoder of a captioner; give its encoder"):
        Predictor(decoder)
    shutil.copy(path, tmp_path / "alone.onnx")
    with pytest.raises(WeightsError, match=r"alone\.decoder\.onnx is missing, .*; copy both files"):
        Predictor(tmp_path / "alone.onnx")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(WeightsError, match="no usable ONNX file"):
        Predictor(tmp_path / "text.onnx")
    other = onnx.load(decoder)
    other.metadata_props[[entry.key for entry in other.metadata_props].index("pair")].value = "x"
    onnx.save(other, tmp_path / "alone.decoder.onnx")
    with pytest.raises(WeightsError, match="are of two exports"):
        Predictor(tmp_path / "alone.onnx")
    del other.metadata_props[:]
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(WeightsError, match="was not written by vit export"):
        Predictor(tmp_path / "other.onnx")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"search": Search(max_tokens=9)}, "max_tokens=9: this decoder writes 1 to 8"),
        ({"search": Search(min_tokens=9)}, "min_tokens=9: must be from 1 to 8"),
        ({"search": Search(beams=3)}, "beams=3: an exported network decodes greedily"),
        ({"device": "cuda"}, r"^device\b.*exported network"),
        ({"merge_tokens": 2}, r"^merge_tokens\b.*exported network"),
        ({"keep_aspect": True}, r"^keep_aspect\b.*exported network"),
    ],
)
def test_settings_that_a_file_cannot_follow_are_refused(exported, settings, message):
    with pytest.raises(ConfigError, match=message):
        Predictor(exported[1], **settings)
