"""A classifier's file answers without torch: in order, in bounds, and refused where it is wrong."""

import json
import os
import subprocess
import sys
import types
from contextlib import suppress

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from vit.commands.main import main
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, WeightsError
from vit.exported import onnx_classifier as classes_module
from vit.exported import read_ahead
from vit.exported.load_exported import runner_like
from vit.exported.onnx_captioner import CaptionRunner
from vit.exported.onnx_classifier import ClassRunner
from vit.exported.onnx_metadata import metadata_of
from vit.exported.onnx_session import Session
from vit.generation.generation_config import Search

NAMES = ("apple", "pear", "plum", "=SUM(1)")
MATRIX = np.random.default_rng(0).normal(size=(3, len(NAMES))).astype(np.float32) / 40
METADATA = {
    "graph": "classifier",
    "classes": json.dumps(NAMES),
    "preprocessing": json.dumps(Preprocessing(image_size=(16, 16)).to_dict()),
    "vit_version": "0",
    "source_run": "runs/fruit",
    "precision": "fp32",
    "opset": "18",
    "calibration": "null",
}


def graph_of(kind=TensorProto.UINT8, image=("batch", "height", "width", 3), count=4):
    """The contract with the smallest network: the mean colour, a matrix, softmax."""
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats", "sides"], ["embedding"], keepdims=0),
        helper.make_node("MatMul", ["embedding", "matrix"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    outputs = [("probabilities", ["batch", count]), ("embedding", ["batch", 3])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", kind, image)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
        [
            numpy_helper.from_array(np.array([1, 2]), "sides"),
            numpy_helper.from_array(np.resize(MATRIX, (3, count)), "matrix"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def written(path, metadata=None, model=None):
    model = model or graph_of()
    helper.set_model_props(model, METADATA if metadata is None else metadata)
    onnx.save(model, path)
    return path


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


def expected(paths):
    """Probabilities in numpy alone."""
    means = [np.asarray(read_image(path), dtype=np.float64).mean((0, 1)) for path in paths]
    powers = np.exp(np.stack(means) @ MATRIX.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


class Recorder:
    """A graph in numpy that remembers the shapes it was given."""

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


@pytest.mark.parametrize("size", [1, 2, 5, 33])
def test_answers_are_those_of_the_pixels_in_order(file, input_images, size):
    runner = ClassRunner(file, batch_size=size, workers=3, threads=1)
    assert (runner.classes, runner.n_best, runner.precision) == (NAMES, 0, "fp32")
    assert runner.preprocessing == Preprocessing(image_size=(16, 16))
    truth = expected(input_images)
    rows = list(runner.probabilities(iter(input_images)))
    assert rows[0].dtype == np.float64
    np.testing.assert_allclose(np.stack(rows), truth, atol=1e-6)
    answers = runner(input_images, top_k=2)
    assert [answer.image for answer in answers] == input_images
    for answer, row in zip(answers, rows, strict=True):
        best = np.argsort(-row)[:2]
        assert answer.predictions == tuple((NAMES[i], row[i]) for i in best)
        assert (answer.error, answer.captions) == (None, ())
    assert answers == runner(input_images, top_k=2)
    assert len(runner(input_images[:1], top_k=99)[0].predictions) == len(NAMES)


def test_images_of_one_size_go_together_and_others_alone(input_images, monkeypatch):
    upright = [read_image(path).size for path in input_images]
    graph = Recorder()
    runner = ClassRunner(graph, batch_size=4)
    assert runner.block == 32
    runner(input_images)
    assert all(shape[0] <= 4 for shape in graph.shapes)
    for width, height in set(upright):
        batches = [shape[0] for shape in graph.shapes if shape[1:] == (height, width, 3)]
        assert batches == [4] * (upright.count((width, height)) // 4) + [
            rest for rest in [upright.count((width, height)) % 4] if rest
        ]
    monkeypatch.setattr(classes_module, "BATCH_PIXELS", 2 * 9 * 7)
    graph.shapes.clear()
    runner(input_images)
    assert {shape[0] for shape in graph.shapes if 31 in shape} == {1}
    assert max(shape[0] for shape in graph.shapes) == 2


def test_a_list_can_be_gone_on_with_after_a_block(input_images, monkeypatch):
    """Whatever the window holds back: what comes after a block is put together as if from there."""
    monkeypatch.setattr(read_ahead, "PIXELS", 1800)
    graph = Recorder()
    runner = ClassRunner(graph, batch_size=1)
    runner.block = 6
    whole = runner(input_images)
    shapes = graph.shapes.copy()
    graph.shapes.clear()
    assert whole[12:] == runner(input_images[12:])
    assert graph.shapes == shapes[-len(graph.shapes) :]


def test_images_do_not_pile_up(input_images, monkeypatch):
    """In memory are a window and what is being read, together at most PIXELS."""
    sizes = [np.prod(read_image(path).size) for path in input_images]
    for limit, most in ((1500, 99), (10**6, 4), (100, 99)):
        monkeypatch.setattr(read_ahead, "PIXELS", limit)
        begun, given, taken = [], 0, []
        watched = (taken.append(path) or path for path in input_images)

        def prepare(image, begun=begun):
            begun.append(image.width * image.height)
            return np.asarray(image)

        for window in read_ahead.windows(watched, prepare, workers=2, most=most):
            here = len(window)
            assert 1 <= here <= most
            assert len(taken) <= given + here + most + 1
            assert sum(begun) - sum(sizes[:given]) <= max(limit, sizes[given])
            given += here
        assert given == len(begun) == len(input_images)
        assert not window, "the last one is let go of too"


def test_unreadable_images_have_error_rows_at_their_place(file, input_images, bad_images):
    mixed = [*bad_images[:4], input_images[0], *bad_images[4:], *input_images[1:3]]
    answers = ClassRunner(file, batch_size=2)(mixed, top_k=1)
    assert [answer.image for answer in answers] == mixed
    assert [answer.error is None for answer in answers] == [path in input_images for path in mixed]
    for path, answer in zip(mixed, answers, strict=True):
        if path in bad_images:
            with pytest.raises(BadImage) as told:
                read_image(path)
            assert (answer.error, answer.predictions) == (told.value.reason, ())


def test_what_the_graph_cannot_compute_is_the_error_of_its_images(input_images):
    def answer(images):
        if images.shape[1] == 20:
            raise WeightsError("onnxruntime cannot compute it (no room)")
        rows = np.full((len(images), len(NAMES)), 0.25, np.float32)
        rows[0, 0] = np.nan if images.shape[1] == 9 else 0.25
        return rows

    answers = ClassRunner(Recorder(answer), batch_size=1)(input_images)
    told = {read_image(a.image).height: a.error for a in answers}
    assert told[20] == "onnxruntime cannot compute it (no room)"
    assert told[9] == "the network overflowed in fp32; export it as fp32"
    assert told[7] is None
    wrong = ClassRunner(Recorder(lambda images: np.ones((len(images), 5))))
    with pytest.raises(WeightsError, match=r"shape \[\d, 5\] for \d images and 4 classes"):
        wrong(input_images)


def test_torch_is_not_loaded(file, input_images):
    code = (
        "import sys; from vit.exported.load_exported import runner_like;"
        "print(runner_like(sys.argv[1])([sys.argv[2]])[0].predictions[0][0]);"
        "sys.exit(bool({'torch', 'onnx', 'transformers', 'tokenizers', 'tqdm'} & set(sys.modules)))"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(file), input_images[0]]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == NAMES[expected(input_images[:1]).argmax()] + "\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": None}, "was not written by vit export"),
        ({"graph": "decoder"}, "is the decoder of a captioner, not a classifier"),
        ({"classes": None}, r"its metadata are damaged \('classes'\)"),
        ({"classes": "[1, 2]"}, "damaged .classes are no list of names"),
        ({"classes": '["a", "b", "c", "a"]'}, "damaged .*two have one name"),
        ({"classes": "[" * 100_000}, "its metadata are damaged"),
        ({"classes": '["a", "b", "c"]'}, r"probabilities of shape \['batch', 4\], and names 3"),
        ({"preprocessing": "{}"}, r"damaged \(preprocessing has \[\]; expected"),
        ({"preprocessing": "\x1b[31m"}, "its metadata are damaged"),
        ({"precision": None}, "its metadata are damaged"),
    ],
    ids=str,
)
def test_metadata_that_are_wrong_are_said(tmp_path, change, message):
    metadata = {k: v for k, v in (METADATA | change).items() if v is not None}
    with pytest.raises(WeightsError, match=message) as told:
        ClassRunner(written(tmp_path / "a.onnx", metadata))
    assert "\x1b" not in str(told.value)
    assert str(told.value).startswith(f"{tmp_path / 'a.onnx'}")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"kind": TensorProto.FLOAT}, r"takes tensor\(float\) of shape .*, expected bytes"),
        ({"image": ("batch", 16, 16, 3)}, r"takes tensor\(uint8\) of shape \['batch', 16, 16, 3\]"),
        ({"image": ("batch", "height", "width", 4)}, "expected bytes"),
        ({"count": 6}, "names 4 classes"),
    ],
    ids=str,
)
def test_graphs_of_another_shape_are_refused(tmp_path, graph, message):
    with pytest.raises(WeightsError, match=message):
        ClassRunner(written(tmp_path / "a.onnx", model=graph_of(**graph)))


def test_other_inputs_and_missing_files_are_refused(tmp_path, file):
    model = graph_of()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    with pytest.raises(WeightsError, match=r"computes \['images'\] -> \['scores', 'embedding'\]"):
        ClassRunner(written(tmp_path / "a.onnx", model=model))
    with pytest.raises(WeightsError, match="is missing, or not a file"):
        ClassRunner(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(WeightsError, match="no usable ONNX file"):
        ClassRunner(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"no usable ONNX file \(it is empty\)"):
        ClassRunner(tmp_path / "empty.onnx")
    with pytest.raises(WeightsError, match="is a classifier; open it with ClassRunner"):
        CaptionRunner(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"providers": ["Abacus"]}, "provider='Abacus'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"workers": 0}, "workers=0"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_settings_out_of_range_are_refused(file, settings, message):
    with pytest.raises(ConfigError, match=message):
        ClassRunner(file, **settings)


def test_wrong_calls_are_refused_at_once(file):
    runner = ClassRunner(file)
    with pytest.raises(ConfigError, match="top_k=0"):
        runner.stream([], top_k=0)
    for call in (runner.stream, runner.probabilities):
        with pytest.raises(ConfigError, match="one path; give a list"):
            call("a.png")
    with pytest.raises(ConfigError, match=r"output='tokens': .* gives probabilities, embedding"):
        runner.outputs(["a.png"], ["tokens"])
    with pytest.raises(ConfigError, match="are those of the graph"):
        ClassRunner(Recorder(), threads=1)
    assert runner([]) == []


def test_other_outputs_on_request(file, input_images):
    rows = list(ClassRunner(file).outputs([*input_images, "none.png"], ["embedding"]))
    assert isinstance(rows.pop(), BadImage)
    means = [np.asarray(read_image(path), dtype=np.float64).mean((0, 1)) for path in input_images]
    np.testing.assert_allclose(np.stack([row["embedding"] for row in rows]), means, atol=1e-3)


def test_threads_are_those_asked_for(file):
    assert Session(file, threads=1)._session.get_session_options().intra_op_num_threads == 1
    images = np.zeros((1, 2, 2, 3), np.uint8)
    with pytest.raises(WeightsError, match="onnxruntime cannot compute it"):
        Session(file)({"images": images.astype(np.float32)})


class TestFilesOfWeights:
    """Weights are taken from NAME.onnx.data and from nowhere else."""

    def save(self, path, location, place="graph"):
        model = graph_of()
        (matrix,) = (x for x in model.graph.initializer if x.name == "matrix")
        onnx.external_data_helper.set_external_data(matrix, location, length=len(matrix.raw_data))
        (path.parent / "weights").write_bytes(matrix.raw_data)
        matrix.ClearField("raw_data")
        if place != "graph":
            tensor = TensorProto()
            tensor.CopyFrom(matrix)
            model.graph.initializer.remove(matrix)
            constant = helper.make_node("Constant", [], ["matrix"], value=tensor)
            if place == "function":
                model.functions.append(
                    helper.make_function(
                        "own", "F", [], ["matrix"], [constant], [helper.make_opsetid("", 18)]
                    )
                )
            elif place == "branch":
                branch = helper.make_graph([constant], "b", [], [])
                model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=branch))
            else:
                model.graph.node.insert(0, constant)
        return written(path, model=model)

    def test_beside_the_file_and_of_its_name(self, tmp_path, input_images):
        path = self.save(tmp_path / "fruit.onnx", "fruit.onnx.data")
        with pytest.raises(WeightsError, match=r"fruit.onnx.data is missing, where the weights of"):
            ClassRunner(path)
        (tmp_path / "weights").rename(tmp_path / "fruit.onnx.data")
        rows = list(ClassRunner(path).probabilities(input_images))
        np.testing.assert_allclose(np.stack(rows), expected(input_images), atol=1e-6)

    @pytest.mark.parametrize("place", ["graph", "node", "branch", "function"])
    @pytest.mark.parametrize("name", ["weights", "../weights", "/etc/passwd", "./a.onnx.data"])
    def test_other_names_are_refused_wherever_they_are(self, tmp_path, name, place):
        path = self.save(tmp_path / "a.onnx", name, place)
        with pytest.raises(WeightsError, match=f"wants weights of {name}, and only a.onnx.data"):
            ClassRunner(path)


def test_metadata_are_read_as_onnx_reads_them(tmp_path):
    odd = METADATA | {"猫": "\x1b\n", "": "", "long": "x" * 40_000}
    assert metadata_of(written(tmp_path / "a.onnx", odd)) == odd


def test_damaged_bytes_are_an_error_or_other_metadata(tmp_path, file):
    content, random = file.read_bytes(), np.random.default_rng(0)
    for place in random.integers(1, len(content), 300).tolist():
        damaged = bytearray(content[:place] if place % 3 == 0 else content)
        if place % 3:
            damaged[place] ^= 1 << place % 8
        (tmp_path / "a.onnx").write_bytes(damaged)
        with suppress(WeightsError):
            assert isinstance(metadata_of(tmp_path / "a.onnx"), dict)


class TestRunnerLike:
    """What `vit predict` opens by the ending .onnx or .xml."""

    def test_the_file_says_what_it_is(self, file, tmp_path):
        like = runner_like(file, batch_size=3, workers=1, threads=1, device=None, precision="auto")
        assert isinstance(like, ClassRunner)
        assert (like.batch_size, like.workers) == (3, 1)
        assert isinstance(runner_like(file, precision="fp32", keep_aspect=False), ClassRunner)
        with pytest.raises(WeightsError, match="was not written by vit export"):
            runner_like(written(tmp_path / "a.onnx", {}))
        with pytest.raises(WeightsError, match="is the decoder of a captioner; give its encoder"):
            runner_like(written(tmp_path / "a.onnx", {"graph": "decoder"}))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"device": "cuda"}, "device='cuda': exported networks are computed by the CPU"),
            ({"merge_tokens": 1}, "merge_tokens=1: an exported network cannot do that"),
            ({"precision": "bf16"}, "precision='bf16': the exported network computes in fp32"),
            ({"search": Search(beams=2)}, "beams=2: this network writes no captions"),
            ({"engine": "abacus"}, "engine='abacus': choose one of onnx, openvino"),
        ],
        ids=str,
    )
    def test_settings_without_effect_are_refused(self, file, settings, message):
        with pytest.raises(ConfigError, match=message):
            runner_like(file, **settings)

    def test_another_engine_is_asked_by_its_name(self, file, input_images, monkeypatch):
        opened = []

        def session(path, **settings):
            opened.append((path, settings))
            return Recorder()

        module = types.ModuleType("vit.exported.openvino_session")
        module.Session = session
        monkeypatch.setitem(sys.modules, "vit.exported.openvino_session", module)
        rows = list(runner_like("a.xml", engine="openvino").probabilities(input_images))
        np.testing.assert_allclose(np.stack(rows), expected(input_images), atol=1e-6)
        runner_like(file, engine="openvino", threads=2)
        assert opened == [("a.xml", {}), (file, {"threads": 2})]


@pytest.mark.parametrize("style", ["jsonl", "csv", "table"])
def test_the_command_writes_rows_of_an_exported_file(file, input_images, bad_images, style, capfd):
    mixed = [input_images[0], bad_images[0], input_images[1]]
    assert main(["predict", str(file), *mixed, "--format", style, "-k", "2"]) == 1
    out, err = capfd.readouterr()
    rows = out.splitlines()[style != "jsonl" :]
    assert len(rows) == 3
    assert "1 of 3 images failed" in err
    answers = ClassRunner(file)(mixed, top_k=2)
    for row, answer in zip(rows, answers, strict=True):
        if answer.error is not None:
            assert answer.error in row
        elif style == "jsonl":
            scored = [{"label": label, "score": score} for label, score in answer.predictions]
            assert json.loads(row) == {"image": answer.image, "predictions": scored}
        else:
            assert answer.predictions[0][0] in row
    assert main(["predict", str(file), *mixed, "--merge-tokens", "1"]) == 2
    assert "merge_tokens=1: an exported network cannot do that" in capfd.readouterr().err


def test_what_is_put_together_depends_on_a_block_alone(tmp_path, monkeypatch):
    """A list that is gone on with from a block has the batches that it would have had."""
    sides = np.random.default_rng(0).integers(1, 40, (60, 2))
    paths = [str(tmp_path / f"{number}.png") for number in range(60)]
    for path, (width, height) in zip(paths, sides.tolist(), strict=True):
        Image.new("RGB", (width, height)).save(path)
    (tmp_path / "30.png").write_bytes((tmp_path / "30.png").read_bytes()[:60])
    for limit in (200, 900, 1600, 4000):
        monkeypatch.setattr(read_ahead, "PIXELS", limit)

        def parts(first, limit=limit):
            found = read_ahead.windows(iter(paths[first:]), np.asarray, workers=2, most=12)
            return [[path for path, _ in window] for window in found]

        whole = parts(0)
        for first in range(12, 60, 12):
            left = parts(first)
            assert whole[-len(left) :] == left
