"""Exported classifiers without torch: order, memory bounds, and refused files."""

import json
import os
import subprocess
import sys
import types
from contextlib import suppress

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from tests.exported.graphs import MATRIX, METADATA, NAMES, graph_of, written
from vit.commands.main import main
from vit.config.inference_config import InferenceConfig
from vit.data.image_io import read_image
from vit.data.image_objects import named_images
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, RunError, WeightsError
from vit.exported import exported_classifier, image_prefetch
from vit.exported.exported_classifier import OnnxClassifier
from vit.exported.image_prefetch import chunks, expected_pixels
from vit.exported.onnx_metadata import read_metadata
from vit.exported.onnx_session import OnnxSession
from vit.generation.generation_config import Search
from vit.inference.predictor import Predictor


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("exported") / "fruit.onnx")


@pytest.fixture(scope="module")
def input_images(tmp_path_factory):
    """Twenty images of few sizes, in odd modes and turned."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    paths = []
    for number, mode in enumerate(["RGB", "RGB", "L", "RGBA", "P"] * 4):
        height, width = [(9, 7), (20, 31), (7, 9)][number % 3]
        colour = random.integers(0, 256, 4)
        pixels = np.clip(colour + random.integers(-60, 60, (height, width, 4)), 0, 255)
        image = Image.fromarray(pixels.astype(np.uint8)).convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        image.save(folder / f"{number}.png", exif=exif)
        paths.append(str(folder / f"{number}.png"))
    return paths


def mean_colours(paths):
    return np.stack([np.asarray(read_image(path), dtype=np.float64).mean((0, 1)) for path in paths])


def expected(paths):
    """Probabilities computed in numpy."""
    powers = np.exp(mean_colours(paths) @ MATRIX.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


class Recorder:
    """A session in numpy that records the shapes of its inputs."""

    inputs, outputs, metadata = ["images"], ["probabilities"], METADATA

    def __init__(self, answer=None):
        self.shapes, self.answer = [], answer

    def __call__(self, inputs):
        images = inputs["images"]
        assert images.dtype == np.uint8
        self.shapes.append(images.shape)
        if self.answer is not None:
            return [self.answer(images)]
        powers = np.exp(images.mean((1, 2)) @ MATRIX)
        return [powers / powers.sum(axis=1, keepdims=True)]


def over(session, **settings):
    """A Predictor over a session."""
    return Predictor(OnnxClassifier(session, InferenceConfig(**settings)))


def rows_of(predictor, images):
    """Probabilities of all images, or their errors."""
    outputs = [one for batch in predictor.batches(images) for one in batch]
    return [one.error if one.error else one.probabilities for one in outputs]


@pytest.mark.parametrize("size", [1, 2, 5, 33])
def test_predictions_equal_a_numpy_reference_in_input_order(file, input_images, size):
    classifier = Predictor(file, batch_size=size, workers=3, threads=1)
    assert (classifier.classes, classifier.n_best, classifier.precision) == (NAMES, 0, "fp32")
    assert classifier.preprocessing == Preprocessing(image_size=(16, 16))
    truth = expected(input_images)
    rows = rows_of(classifier, iter(input_images))
    assert rows[0].dtype == np.float64
    np.testing.assert_allclose(np.stack(rows), truth, atol=1e-6)
    predictions = classifier(input_images, top_k=2)
    assert [answer.image for answer in predictions] == input_images
    for answer, row in zip(predictions, rows, strict=True):
        best = np.argsort(-row)[:2]
        assert answer.predictions == tuple((NAMES[i], row[i]) for i in best)
        assert (answer.error, answer.captions) == (None, ())
    assert predictions == classifier(input_images, top_k=2)
    assert len(classifier(input_images[:1], top_k=99)[0].predictions) == len(NAMES)


def test_images_in_memory_have_the_predictions_of_their_files(file, input_images):
    classifier = Predictor(file)
    expected = [one.predictions for one in classifier(input_images[:6])]
    images = [Image.open(path) for path in input_images[:6]]
    arrays = [np.asarray(read_image(path)) for path in input_images[:6]]
    for given in (images, arrays):
        assert [one.predictions for one in classifier(given)] == expected


def test_images_of_equal_size_share_a_batch(input_images, monkeypatch):
    upright = [read_image(path).size for path in input_images]
    graph = Recorder()
    classifier = over(graph, batch_size=4)
    assert classifier.block_size == 32
    classifier(input_images)
    assert all(shape[0] <= 4 for shape in graph.shapes)
    for width, height in set(upright):
        batches = [shape[0] for shape in graph.shapes if shape[1:] == (height, width, 3)]
        assert batches == [4] * (upright.count((width, height)) // 4) + [
            rest for rest in [upright.count((width, height)) % 4] if rest
        ]
    monkeypatch.setattr(exported_classifier, "BATCH_PIXELS", 2 * 9 * 7)
    graph.shapes.clear()
    classifier(input_images)
    assert {shape[0] for shape in graph.shapes if 31 in shape} == {1}
    assert max(shape[0] for shape in graph.shapes) == 2


def test_only_a_window_is_read_ahead(input_images, monkeypatch):
    """Each window has at most a number of images, and of pixels besides those of its last image."""
    sizes = [np.prod(read_image(path).size) for path in input_images]
    for limit, most in ((750, 99), (10**6, 4), (50, 99)):
        monkeypatch.setattr(image_prefetch, "WINDOW_PIXELS", limit)
        classifier = over(Recorder(), workers=2)
        classifier.engine.block_size = most
        taken, done = [], 0
        for window in classifier.batches(taken.append(path) or path for path in input_images):
            here = len(window)
            assert 1 <= here <= most
            assert sum(sizes[done : done + here - 1]) < limit
            done += here
            assert len(taken) <= done + min(most, len(input_images)) + 1
        assert done == len(taken) == len(input_images)


def test_unreadable_images_give_error_predictions_in_input_order(file, input_images, bad_images):
    mixed = [*bad_images[:4], input_images[0], *bad_images[4:], *input_images[1:3]]
    for path, answer in zip(mixed, Predictor(file, batch_size=2)(mixed, top_k=1), strict=True):
        assert answer.image == path
        if path in input_images:
            assert answer.error is None
        else:
            with pytest.raises(BadImage) as raised:
                read_image(path)
            assert (answer.error, answer.predictions) == (raised.value.reason, ())


def test_a_failed_batch_is_an_error_of_its_images_only(input_images):
    def answer(images):
        if images.shape[1] == 20:
            raise WeightsError("onnxruntime cannot compute it (no room)")
        rows = np.full((len(images), len(NAMES)), 0.25, np.float32)
        rows[0, 0] = np.nan if images.shape[1] == 9 else 0.25
        return rows

    predictions = over(Recorder(answer), batch_size=1)(input_images)
    raised = {read_image(a.image).height: a.error for a in predictions}
    assert raised[20] == "onnxruntime cannot compute it (no room)"
    assert raised[9] == "the network overflowed in fp32; export it as fp32"
    assert raised[7] is None
    wrong = over(Recorder(lambda images: np.ones((len(images), 5))))
    with pytest.raises(RunError, match=r"shape \[\d, 5\] for \d images and 4 classes"):
        wrong(input_images)


@pytest.mark.parametrize(("engine", "other"), [("onnx", "openvino"), ("openvino", "onnxruntime")])
def test_an_exported_classifier_runs_without_importing_torch(file, input_images, engine, other):
    code = (
        "import sys; from vit import Predictor;"
        "print(Predictor(sys.argv[1], engine=sys.argv[3])([sys.argv[2]])[0].predictions[0][0]);"
        "heavy = {'torch', 'onnx', 'transformers', 'tokenizers', 'tqdm', sys.argv[4]};"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(file), input_images[0], engine, other]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == NAMES[expected(input_images[:1]).argmax()] + "\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": None}, "was not written by vit export"),
        ({"graph": "decoder"}, "is the decoder of a captioner; give its encoder"),
        ({"classes": None}, r"its metadata are damaged \('classes'\)"),
        ({"classes": "[1, 2]"}, "damaged .classes are no list of names"),
        ({"classes": '["a", "b", "c", "a"]'}, "damaged .*two have one name"),
        ({"classes": "[" * 100_000}, "its metadata are damaged"),
        ({"preprocessing": "{}"}, r"damaged \(preprocessing must have exactly crop_share"),
        ({"preprocessing": "\x1b[31m"}, "its metadata are damaged"),
        ({"precision": None}, "its metadata are damaged"),
    ],
    ids=str,
)
def test_damaged_metadata_are_refused_by_name(tmp_path, change, message):
    metadata = {k: v for k, v in (METADATA | change).items() if v is not None}
    with pytest.raises(WeightsError, match=message) as raised:
        Predictor(written(tmp_path / "a.onnx", metadata))
    assert "\x1b" not in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'a.onnx'}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing, or not a file"),
        (b"", r"no usable ONNX file \(it is empty\)"),
        (b"no graph", "no usable ONNX file"),
    ],
    ids=str,
)
def test_missing_and_damaged_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        Predictor(tmp_path / "a.onnx")


def test_unexpected_outputs_are_refused(tmp_path):
    model = graph_of()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    with pytest.raises(WeightsError, match=r"computes \['images'\] -> \['scores', 'embedding'\]"):
        Predictor(written(tmp_path / "a.onnx", model=model))


def test_embeddings_in_the_graph_are_returned(file, input_images):
    (outputs,) = Predictor(file).batches([*input_images, "none.png"])
    assert outputs.pop().embedding is None
    found = np.stack([one.embedding for one in outputs])
    np.testing.assert_allclose(found, mean_colours(input_images), atol=1e-3)


def test_the_number_of_threads_reaches_onnxruntime(file):
    assert OnnxSession(file, threads=1)._session.get_session_options().intra_op_num_threads == 1
    images = np.zeros((1, 2, 2, 3), np.uint8)
    with pytest.raises(WeightsError, match="onnxruntime cannot compute it"):
        OnnxSession(file)({"images": images.astype(np.float32)})


def stored_outside(path, location, place="graph"):
    """A file whose matrix lies in another one; the tensor is in the graph, a node or a function."""
    model = graph_of()
    (matrix,) = (x for x in model.graph.initializer if x.name == "matrix")
    onnx.external_data_helper.set_external_data(matrix, location, length=len(matrix.raw_data))
    (path.parent / "weights").write_bytes(matrix.raw_data)
    matrix.ClearField("raw_data")
    tensor = TensorProto()
    tensor.CopyFrom(matrix)
    constant = helper.make_node("Constant", [], ["matrix"], value=tensor)
    if place != "graph":
        model.graph.initializer.remove(matrix)
    if place == "node":
        model.graph.node.insert(0, constant)
    elif place == "function":
        opset = [helper.make_opsetid("", 18)]
        model.functions.append(helper.make_function("own", "F", [], ["matrix"], [constant], opset))
    elif place == "branch":
        branch = helper.make_graph([constant], "b", [], [])
        model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=branch))
    return written(path, model=model)


def test_weights_beside_the_file_are_read(tmp_path, input_images):
    path = stored_outside(tmp_path / "fruit.onnx", "fruit.onnx.data")
    with pytest.raises(WeightsError, match=r"fruit.onnx.data is missing, where the weights of"):
        Predictor(path)
    (tmp_path / "weights").rename(tmp_path / "fruit.onnx.data")
    rows = rows_of(Predictor(path), input_images)
    np.testing.assert_allclose(np.stack(rows), expected(input_images), atol=1e-6)


@pytest.mark.parametrize("place", ["graph", "node", "branch", "function"])
@pytest.mark.parametrize("name", ["weights", "../weights", "/etc/passwd", "./a.onnx.data"])
def test_weights_elsewhere_are_refused_wherever_the_tensor_is(tmp_path, name, place):
    path = stored_outside(tmp_path / "a.onnx", name, place)
    with pytest.raises(WeightsError, match=f"has weights in {name}, and only a.onnx.data"):
        Predictor(path)


def test_metadata_equal_those_that_onnx_reads(tmp_path):
    odd = METADATA | {"猫": "\x1b\n", "": "", "long": "x" * 40_000}
    assert read_metadata(written(tmp_path / "a.onnx", odd)) == odd


def test_damaged_bytes_raise_only_weights_errors(tmp_path, file):
    content, random = file.read_bytes(), np.random.default_rng(0)
    for place in random.integers(1, len(content), 300).tolist():
        damaged = bytearray(content[:place] if place % 3 == 0 else content)
        if place % 3:
            damaged[place] ^= 1 << place % 8
        (tmp_path / "a.onnx").write_bytes(damaged)
        with suppress(WeightsError):
            assert isinstance(read_metadata(tmp_path / "a.onnx"), dict)


def test_settings_with_a_meaning_are_accepted(file):
    like = Predictor(file, batch_size=3, workers=1, threads=1, device=None, precision="auto")
    assert (like.batch_size, like.workers) == (3, 1)
    Predictor(file, precision="fp32", keep_aspect=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"device": "cuda"}, "device='cuda': exported networks run on the CPU"),
        ({"merge_tokens": 1}, "merge_tokens=1: not supported by an exported network"),
        ({"embeddings": True}, "^embeddings: not supported by an exported network"),
        ({"precision": "bf16"}, "precision='bf16': the exported network computes in fp32"),
        ({"search": Search(beams=2)}, "beams=2: this network writes no captions"),
        ({"engine": "abacus"}, "engine='abacus': choose one of torch, onnx, openvino"),
        ({"engine": "torch"}, "engine=torch: .* is an exported network"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(file, settings, message):
    with pytest.raises(ConfigError, match=message):
        Predictor(file, **settings)


def test_openvino_is_selected_by_engine(file, input_images, monkeypatch):
    opened = []

    def session(path, **settings):
        opened.append((path, settings))
        return Recorder()

    module = types.ModuleType("vit.exported.openvino_session")
    module.OpenVINOSession = session
    monkeypatch.setitem(sys.modules, "vit.exported.openvino_session", module)
    rows = rows_of(Predictor("a.xml", engine="openvino"), input_images)
    np.testing.assert_allclose(np.stack(rows), expected(input_images), atol=1e-6)
    Predictor(file, engine="openvino", threads=2)
    assert opened == [("a.xml", {"threads": None}), (str(file), {"threads": 2})]


def test_vit_predict_accepts_an_exported_file(file, input_images, bad_images, capfd):
    mixed = [input_images[0], bad_images[0], input_images[1]]
    assert main(["predict", str(file), *mixed, "--format", "jsonl", "-k", "2"]) == 1
    out, err = capfd.readouterr()
    assert "1 of 3 images failed" in err
    for row, answer in zip(out.splitlines(), Predictor(file)(mixed, top_k=2), strict=True):
        told = json.loads(row)
        pairs = [(one["label"], one["score"]) for one in told.get("predictions", ())]
        assert (told["image"], told.get("error")) == (answer.image, answer.error)
        assert tuple(pairs) == answer.predictions


def test_windows_after_a_block_do_not_depend_on_earlier_images(tmp_path, monkeypatch):
    """A list continued from a block has the same windows."""
    sides = np.random.default_rng(0).integers(1, 40, (60, 2))
    paths = [str(tmp_path / f"{number}.png") for number in range(60)]
    for path, (width, height) in zip(paths, sides.tolist(), strict=True):
        Image.new("RGB", (width, height)).save(path)
    (tmp_path / "30.png").write_bytes((tmp_path / "30.png").read_bytes()[:60])

    def windows(first):
        images = named_images(paths[first:], first=first)
        found = chunks(images, 12, first=first, count_pixels=expected_pixels)
        return [(start, [one.name for one in window]) for start, window in found]

    for limit in (100, 450, 800, 2000):
        monkeypatch.setattr(image_prefetch, "WINDOW_PIXELS", limit)
        whole = windows(0)
        assert [name for _, names in whole for name in names] == paths
        for first in range(12, 60, 12):
            left = windows(first)
            assert whole[-len(left) :] == left
