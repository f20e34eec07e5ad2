"""Pieces, rows and files of predictions by Ray; with Ray itself (slow) on a cluster of two."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from vit.config.inference_config import PredictionConfig
from vit.errors import ConfigError, DataError, RunError, VitError
from vit.generation.generation_config import Caption, Search
from vit.inference import ray_inference
from vit.inference.predictor import Predictor
from vit.inference.ray_inference import (
    AttemptCounter,
    Worker,
    fetched,
    from_text,
    is_url,
    pieces,
    predict_with_ray,
    read_list,
    shares,
    to_text,
    write_rows,
)
from vit.output.prediction_results import FORMATS, Layout, Prediction, csv_settings

NAMES = ["a.png", "b \u2028,\n.png", "猫.png", "\udcff.png"]
WHOLE, CUT = Caption("猫", -0.5, (), True), Caption("", -1.5, (), False)
ROWS = [
    Prediction(NAMES[0], (("cat", 0.1 + 0.2), ("=dog", 1e-17)), captions=(WHOLE,)),
    Prediction(NAMES[1], error="no such file"),
    Prediction(NAMES[2], (("cat", 1.0), ("\udcff", 0.0)), captions=(CUT,)),
]
LAYOUT = Layout(2, ("cat", "=dog", "\udcff"), NAMES, 1)
CHILD = Path(__file__).parent / "ray_child.py"


@pytest.mark.parametrize("row", ROWS, ids=["classes and caption", "error", "cut off"])
def test_a_row_comes_back_as_it_went(row):
    assert from_text(row.image, to_text(row)) == row


@pytest.mark.parametrize(
    ("block", "workers", "size"),
    [(16, 2, 48), (16, 200, 16), (64, 1, 64), (600, 1, 600), (1, 1, 125)],
)
def test_pieces_are_whole_blocks_in_order(block, workers, size):
    pytest.importorskip("pyarrow", reason="the extra ray brings it")
    tables = pieces([f"{number}.png" for number in range(1001)], block, workers)
    assert {len(table) for table in tables[:-1]} <= {size}
    assert [n for table in tables for n in table["number"].to_pylist()] == list(range(1001))


def test_names_survive_in_pieces():
    pytest.importorskip("pyarrow", reason="the extra ray brings it")
    (table,) = pieces([*NAMES, "s3://b/c.png"], 16, 2)
    found = [os.fsdecode(path) for path in table["path"].to_pylist()]
    assert found == [*(os.path.abspath(name) for name in NAMES), "s3://b/c.png"]
    assert len(pieces(NAMES * 25_000, 16, 2)[0]) == 512


def test_workers_give_the_digits_of_one_predictor(tiny_run, input_images, bad_images):
    pytest.importorskip("pyarrow", reason="the extra ray brings it")
    given = [*input_images[:5], bad_images[0], *input_images[5:]]
    images = [*given, f"file://{input_images[0]}", "file:///no"]
    settings = {"precision": "fp32", "batch_size": 4}
    counter = AttemptCounter()
    workers = [Worker(str(tiny_run), settings, 2, counter.attempt) for _ in range(2)]
    answers = []
    for number, piece in enumerate(pieces(images, 4, 1)):
        table = workers[number % 2](piece)
        answers += zip(table["number"].to_pylist(), table["answer"].to_pylist(), strict=True)
    assert [number for number, _ in answers] == list(range(len(images)))
    local = [image.removeprefix("file://") for image in images]
    expected = Predictor(tiny_run, **settings)(local, top_k=2)
    for (_, text), other, image in zip(answers, expected, images, strict=True):
        found = from_text(image, text)
        assert found.image == image
        assert (found.predictions, found.error) == (other.predictions, other.error)


def test_words_are_drawn_by_the_number_in_the_whole_list(captioner, input_images):
    pytest.importorskip("pyarrow", reason="the extra ray brings it")
    settings = {"precision": "fp32", "batch_size": 4, "search": Search(temperature=2.0)}
    worker = Worker(str(captioner), settings, 1, AttemptCounter().attempt)
    texts = [t for piece in pieces(input_images, 4, 2) for t in worker(piece)["answer"].to_pylist()]
    found = [from_text("", text).caption for text in texts]
    assert found == [row.caption for row in Predictor(captioner, **settings)(input_images)]


@pytest.mark.auto_precision
def test_a_piece_that_kills_is_given_up(tiny_run, input_images):
    pytest.importorskip("pyarrow", reason="the extra ray brings it")
    worker = Worker(str(tiny_run), {"batch_size": 4}, 1, AttemptCounter().attempt)
    piece, other = pieces(input_images, 4, 1)[:2]

    def errors(given):
        return {from_text("", text).error for text in worker(given)["answer"].to_pylist()}

    assert [errors(piece) for _ in range(3)] == [{None}] * 3
    assert errors(piece) == {"workers died 3 times at this image, or at one of its piece of 4"}
    assert errors(other) == {None}


@pytest.mark.parametrize("style", FORMATS)
def test_text_is_written_as_by_one_process(style, tmp_path):
    header, line = FORMATS[style](LAYOUT)
    mark = "\ufeff" if style == "csv" else ""  # captions may have any letters
    expected = (mark + header + "".join(map(line, ROWS))).encode("utf-8", "backslashreplace")
    (tmp_path / "link").symlink_to("x")
    assert write_rows(str(tmp_path / "link"), style, LAYOUT, iter(ROWS)) == 1
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "x").read_bytes() == expected


@pytest.mark.parametrize("separator", [None, "comma", "tab"])
def test_csv_of_a_chosen_separator_has_a_byte_order_mark(separator, tmp_path):
    columns = csv_settings(PredictionConfig(csv_separator=separator), "csv")
    layout = Layout(2, ("cat", "dog"), ["a.png"], **columns)
    write_rows(str(tmp_path / "x.csv"), "csv", layout, iter(()))
    assert (tmp_path / "x.csv").read_text().startswith("\ufeff") == (separator is not None)


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path):
    def broken():
        yield ROWS[0]
        raise RunError("Ray gave up")

    with pytest.raises(RunError, match="Ray gave up"):
        write_rows(str(tmp_path / "x.jsonl"), "jsonl", LAYOUT, broken())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "\ufeffnumber,image\r\n1,a.png\r\n2,\"b,\n.png\"\r\n", ["a.png", "b,\n.png"]),
        ("x.jsonl", '{"image": "a"}\n\n{"image": "猫", "error": "?"}\n', ["a", "猫"]),
        ("x.csv", "picture\na.png\n", "x.csv, row 1: there is no text in the column 'image'"),
        ("x.jsonl", '{"image": "a"}\n["b"]\n', "x.jsonl, line 2: a list; expected an object"),
        ("x.jsonl", '{"image": "a"}\n{"image', "x.jsonl, line 2: not JSON"),
        ("x.csv", "image\n\udcff\n", "x.csv, line 2: not UTF-8"),
    ],
)  # fmt: skip
def test_lists_are_read_or_refused(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    if isinstance(expected, list):
        assert read_list(str(tmp_path / name)) == expected
    else:
        with pytest.raises(DataError, match=expected):
            read_list(str(tmp_path / name))


def test_fetched_images_go_away(input_images):
    with fetched([input_images[0], f"file://{input_images[1]}", "nowhere://x"]) as (paths, errors):
        assert paths[0] == input_images[0]
        assert Path(paths[1]).read_bytes() == Path(input_images[1]).read_bytes()
        assert errors.keys() == {2}
        assert errors[2].startswith("cannot be fetched: ")
    assert not Path(paths[1]).exists()
    assert [is_url(name) for name in ("a/b.png", "C:\\x.png")] == [False, False]


@pytest.mark.parametrize(
    ("resources", "device", "workers", "expected"),
    [
        ({"CPU": 8.0}, None, None, (8, {"num_cpus": 1})),
        ({"CPU": 8.0}, "cpu", 3, (3, {"num_cpus": 1})),
        ({"CPU": 8.0, "GPU": 2.0}, None, None, (2, {"num_gpus": 1, "num_cpus": 4})),
        ({"CPU": 8.0, "GPU": 2.0}, "cuda", 1, (1, {"num_gpus": 1, "num_cpus": 4})),
        ({"CPU": 8.0, "GPU": 2.0}, "cpu", None, (8, {"num_cpus": 1})),
    ],
)
def test_a_worker_takes_a_core_or_a_gpu(resources, device, workers, expected):
    assert shares(resources, device, workers) == expected


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device='cuda': this Ray cluster has no GPU"):
        shares({"CPU": 2.0}, "cuda", None)


def predict_nothing(top_k: int) -> None:
    settings = {"workers": 1}
    predict_with_ray("x", ["a"], "b", style="jsonl", top_k=top_k, settings=settings, notify=print)


def test_without_ray_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(VitError, match=r"ray is not installed: pip install 'vit-toolkit\[ray\]'"):
        predict_nothing(1)


def test_a_number_of_classes_of_a_captioner_is_refused(monkeypatch):
    """With a cluster that only says what the network is."""
    about = {"several": False, "classes": []}
    ray = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 1.0},
        remote=lambda **_share: lambda _about: SimpleNamespace(remote=lambda *_: about),
        get=lambda found: found,
    )
    monkeypatch.setattr(ray_inference, "cluster", lambda _workers: nullcontext(ray))
    for name in ("ordered_and_quiet", "raise_worker_errors"):
        monkeypatch.setattr(ray_inference, name, nullcontext)
    with pytest.raises(ConfigError, match="top_k=3: this network writes captions and has no class"):
        predict_nothing(3)


def child(run, out, style, dies, images) -> subprocess.CompletedProcess[str]:
    """A process of its own: Ray leaves threads and sockets behind."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": "local"}
    return subprocess.run(
        [sys.executable, CHILD, run, out, style, dies, *images],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["once", "always", "never"])
def test_two_workers_write_the_file_of_one_process(
    tiny_run, input_images, bad_images, tmp_path, dies
):
    pytest.importorskip("ray.data", reason="the extra ray is not installed")
    images = [*input_images[:9], bad_images[0], *input_images[9:], *input_images]
    out = tmp_path / "x.jsonl"
    ran = child(str(tiny_run), str(out), "jsonl", dies, images)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "x.jsonl.died").exists() == (dies != "never")
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["image"] for row in found] == images
    lost = range(20, 24) if dies == "always" else []
    predictor = Predictor(tiny_run, precision="fp32", batch_size=4)
    line = FORMATS["jsonl"](Layout(2, predictor.classes, images))[1]
    for number, row in enumerate(predictor(images, top_k=2)):
        if number in lost:
            assert found[number]["error"].startswith("workers died 3 times")
        else:
            assert found[number] == json.loads(line(row))
    assert ran.stdout == f"{1 + len(lost)}\n"


@pytest.mark.slow
def test_ray_tells_in_one_line_what_cannot_be(input_images, tmp_path):
    pytest.importorskip("ray.data", reason="the extra ray is not installed")
    ran = child(str(tmp_path), str(tmp_path / "x.jsonl"), "jsonl", "never", input_images)
    assert ran.returncode == 1
    assert "no file of weights" in ran.stderr.strip().splitlines()[-1]
    assert os.listdir(tmp_path) == []
