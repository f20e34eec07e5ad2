"""A kill in the middle and --resume: every row once, and every byte as if nothing had been."""

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.commands.interruptions import run_interrupted
from tests.slow_cases import mostly_slow
from tests.training.children import Job
from vit.inference.torch_engine import TorchEngine
from vit.output.resumable_output import ResumableOutput, merge_blocks
from vit.weights.safetensors_io import read_tensors, write_tensors

pytestmark = pytest.mark.auto_precision

SIZE = 4


@pytest.fixture
def inputs(input_images, bad_images):
    """27 images, and some that fail, in every block of them."""
    mixed = [*input_images]
    for number, path in enumerate(bad_images):
        mixed.insert(4 * number + 1, path)
    return mixed


@pytest.fixture
def whole(predict, inputs, tmp_path):
    """The bytes of a file that nothing disturbed."""

    def make(name, *words):
        (tmp_path / "whole").mkdir()
        predict(*inputs, "-b", SIZE, "--out", tmp_path / "whole" / name, *words)
        return (tmp_path / "whole" / name).read_bytes()

    return make


def rows_in(partial, images):
    """The rows of so many images in the log of one process, as the file will have them."""
    return b"".join(block.rows for block in merge_blocks([partial], images))


@pytest.mark.parametrize(
    ("name", "how", "block"),
    mostly_slow(
        [("a.jsonl", "torn", 3), ("a.csv", "kill", 1), ("a.txt", "torn", 0), ("b.csv", "torn", 8)],
        4,
    ),
)
def test_killed_and_resumed(predict, refusal, inputs, whole, tiny_run, tmp_path, name, how, block):
    out, partial = tmp_path / name, tmp_path / f"{name}.partial"
    words = [*inputs, "-b", str(SIZE), "--out", str(out)]
    command = ["predict", str(tiny_run), *words]
    with Job(run_interrupted, command, block, how, log=tmp_path / "log") as job:
        assert job.wait() == [-signal.SIGKILL], job.said()
    expected = whole(name)
    rows = SIZE * block
    assert not out.exists()
    assert rows_in(partial, rows) in expected
    unfinished = f"{partial} is unfinished and holds {rows} rows; continue with --resume, or start"
    assert unfinished in refusal(*command)
    code, shown, err = predict(*words, "--resume")
    assert (code, shown) == (1, [])
    resuming = f"vit predict: resuming after {rows} of {len(inputs)} images in {partial}"
    assert err[:-1] == [resuming] * (rows > 0)
    assert err[-1].startswith(f"vit predict: {len(inputs) - 27} of {len(inputs)} images failed")
    assert out.read_bytes() == expected
    assert sorted(os.listdir(tmp_path)) == sorted(["bad", name, f"{name}.done", "log", "whole"])


@pytest.mark.parametrize(("how", "code"), [("term", 143), ("int", 130)])
def test_a_signal_ends_after_its_block(predict, interrupted, inputs, whole, tmp_path, how, code):
    out = tmp_path / "a.jsonl"
    words = (*inputs, "-b", SIZE, "--out", out, "--resume")
    found, shown, err = interrupted(*words, how=how)
    name = {"term": "SIGTERM", "int": "Ctrl-C"}[how]
    assert (found, shown) == (code, [])
    assert err == [
        f"vit predict: stopped by {name}; {3 * SIZE} rows are kept in {out}.partial: continue with "
        "--resume"
    ]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert predict(*words)[0] == 1
    assert out.read_bytes() == whole("a.jsonl")


def test_a_full_disk_keeps_what_is_whole(predict, refusal, tiny_run, inputs, whole, tmp_path):
    out = tmp_path / "a.csv"
    words = (*inputs, "-b", SIZE, "--out", out)
    expected = whole("a.csv")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(expected) // 2, limits[1]))
    try:
        said = refusal("predict", tiny_run, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{out}.partial could not be written: File too large" in said
    assert "rows are kept" in said
    assert "--resume" in said
    assert predict(*words, "--resume")[0] == 1
    assert out.read_bytes() == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-k", "1"], "top k (3, now 1)"),
        (["--device", "cpu", "--workers", "1", "--top-k", "2"], "top k (3, now 2)"),
        (["--format", "csv"], "format (jsonl, now csv)"),
        (["--threshold", "0.5"], "threshold (None, now 0.5)"),
        (["--precision", "bf16"], "precision (fp32, now bf16)"),
        (["-b", "2"], "batch size (4, now 2)"),
        (["--keep-aspect"], "keep aspect (False, now True)"),
        (["--merge-tokens", "1"], "merge tokens (None, now 1)"),
        (["more.jpg"], "images (34, now 35); another list of images"),
        (["--sort-into", "sorted"], "sort into (None, now "),
    ],
)
def test_only_the_same_is_continued(
    interrupted, refusal, tiny_run, inputs, tmp_path, monkeypatch, words, reason
):
    monkeypatch.chdir(tmp_path)
    usual = ["--out", "a.jsonl", "--precision", "fp32", "-b", SIZE]
    interrupted(*inputs, *usual, block=1)
    left = (tmp_path / "a.jsonl.partial").read_bytes()
    more = (*words, *usual) if words == ["more.jpg"] else (*usual, *words)
    said = refusal("predict", tiny_run, *inputs, *more, "--resume")
    assert f"a.jsonl.partial was begun with {reason}" in said
    assert "--overwrite" in said
    assert (tmp_path / "a.jsonl.partial").read_bytes() == left


def test_full_memory_keeps_rows_of_its_batch_size(
    predict, refusal, tiny_run, inputs, tmp_path, monkeypatch
):
    calls, run = [], TorchEngine.compute

    def full_later(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return run(*arguments)

    monkeypatch.setattr(TorchEngine, "compute", full_later)
    words = (*inputs, "--out", tmp_path / "a.csv", "-b", SIZE, "-j", 1, "--precision", "fp32")
    said = refusal("predict", tiny_run, *words)
    assert "out of memory: use another --device" in said
    assert "and the same batch size, or start again with --overwrite" in said
    assert predict(*words, "--resume")[0] == 1


def test_another_model_does_not_continue(interrupted, refusal, inputs, tiny_run, tmp_path):
    other = shutil.copytree(tiny_run, tmp_path / "run")
    words = (*inputs, "-b", SIZE, "--out", tmp_path / "a.csv")
    interrupted(*words, block=1)
    tensors, metadata = read_tensors(tiny_run / "model.safetensors")
    tensors["head.bias"] = tensors["head.bias"] + 1
    write_tensors(other / "model.safetensors", tensors, metadata)
    assert "was begun with another model" in refusal("predict", other, *words, "--resume")


def test_the_arithmetic_that_was_picked_is_kept(predict, interrupted, inputs, whole, tmp_path):
    out = tmp_path / "a.jsonl"
    words = (*inputs, "-b", SIZE, "--out", out)
    interrupted(*words, "--precision", "bf16")
    assert predict(*words, "--resume")[0] == 1
    assert out.read_bytes() == whole("a.jsonl", "--precision", "bf16")


def test_begin_again_or_from_nothing(
    predict, interrupted, refusal, tiny_run, inputs, whole, tmp_path
):
    out = tmp_path / "a.jsonl"
    words = (*inputs, "-b", SIZE, "--out", out)
    kept = f"the disk is full; 8 rows are kept in {out}.partial: continue with --resume"
    assert interrupted(*words, "--resume")[2] == [f"vit predict: {kept}"]
    assert predict(*words, "--overwrite")[0] == 1
    assert out.read_bytes() == whole("a.jsonl")
    said = refusal("predict", tiny_run, *inputs[1:], "--out", out, "--resume")
    assert "a.jsonl exists; choose another name, or add --overwrite" in said


def test_nothing_stays_where_no_row_was_whole(interrupted, inputs, tmp_path):
    _, _, (said,) = interrupted(*inputs, "--out", tmp_path / "a.jsonl", block=0)
    assert "no rows are kept" in said
    assert os.listdir(tmp_path) == ["bad"]


def test_a_finished_file_beside_an_unfinished_one(
    predict, interrupted, refusal, tiny_run, input_images, tmp_path
):
    out = tmp_path / "a.jsonl"
    words = (*input_images, "-b", SIZE, "--out", out)
    assert predict(*words)[0] == 0
    finished = out.read_bytes()
    out.write_text("precious\n")
    interrupted(*words, "--overwrite")
    assert out.read_text() == "precious\n"
    assert "--overwrite" in refusal("predict", tiny_run, *words, "--resume")
    assert predict(*words, "--resume", "--overwrite")[0] == 0
    assert out.read_bytes() == finished


def test_a_partial_file_of_an_earlier_version_is_not_continued(
    predict, refusal, tiny_run, input_images, tmp_path
):
    (tmp_path / "a.jsonl.partial").write_text('{"image": "0.png", "predictions": []}\n')
    words = (*input_images, "--out", tmp_path / "a.jsonl")
    for more, reason in (
        ([], "is unfinished"),
        (["--resume"], "was not written by this version of vit: start again with --overwrite"),
    ):
        assert reason in refusal("predict", tiny_run, *words, *more)
    assert predict(*words, "--overwrite")[0] == 0
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_progress_is_told_now_and_then(predict, input_images, tmp_path, monkeypatch):
    monkeypatch.setattr("vit.commands.command_output.SECONDS", 0.0)
    monkeypatch.setattr("vit.inference.prediction_job.MIN_IMAGES_FOR_SUMMARY", 21)
    code, _, err = predict(*input_images, "-b", SIZE, "--out", tmp_path / "a.csv")
    assert code == 0
    assert [line.split(" images,")[0] for line in err[:-1]] == [
        f"vit predict: {done} of 27" for done in range(4, 27, 4)
    ]
    assert all("images/s" in line for line in err)
    assert err[-1].endswith("images/s, 0 failed")


def test_what_is_complete_is_not_predicted_again(
    predict, refusal, tiny_run, inputs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, vectors = tmp_path / "a.jsonl", tmp_path / "a.npy"
    words = ("-b", SIZE, "--out", out, "--embeddings", vectors, "--sort-into", "sorted", "--resume")
    assert predict(*inputs, *words)[0] == 1
    expected = out.read_bytes()
    (tmp_path / "a.jsonl.partial.stop").touch()  # of a kill after the last rename
    code, _, err = predict(*inputs, *words)
    assert (code, len(err)) == (1, 2)
    assert err[0] == f"vit predict: {out} is complete"
    assert err[1].startswith(f"vit predict: {len(inputs) - 27} of {len(inputs)} images failed")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.jsonl.done", "a.npy", "bad", "sorted"]
    others = [inputs[1], inputs[0], *inputs[2:]]
    for images, more, reason in (
        (others, [], "was begun with another list of images"),
        (inputs, ["--sort-into", "new"], "was begun with sort into"),
        (inputs, ["--format", "csv"], "was begun with format (jsonl, now csv)"),
    ):
        assert reason in refusal("predict", tiny_run, *images, *words, *more)
    out.write_bytes(b"edited")
    said = refusal("predict", tiny_run, *inputs, *words)
    assert "a.jsonl was changed since it was complete" in said
    vectors.unlink()
    said = refusal("predict", tiny_run, *inputs, *words)
    assert "a.jsonl exists; choose another name" in said
    out.unlink()
    assert predict(*inputs, *words, "--overwrite")[0] == 1
    assert out.read_bytes() == expected


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume"]])
def test_nobody_begins_while_another_finishes(predict, input_images, tmp_path, monkeypatch, more):
    """Not even between the last row and the last rename."""
    words = (*input_images, "-b", SIZE, "--out", tmp_path / "a.csv")
    said = []
    finish = ResumableOutput.finish

    def finishing(files, *arguments):
        monkeypatch.setattr(ResumableOutput, "finish", finish)
        before = sorted(os.listdir(tmp_path))
        assert before == ["a.csv.partial", "a.csv.partial.lock"]
        said.append(predict(*words, *more))
        assert sorted(os.listdir(tmp_path)) == before
        finish(files, *arguments)

    monkeypatch.setattr(ResumableOutput, "finish", finishing)
    assert predict(*words)[0] == 0
    code, _, err = said[0]
    assert (code, len(err)) == (2, 1)
    assert ("is being written by another process" if more else "is unfinished") in err[0]
    assert os.listdir(tmp_path) == ["a.csv"]


def test_what_another_has_finished_in_between_stays(
    refusal, tiny_run, input_images, tmp_path, monkeypatch
):
    out = tmp_path / "a.csv"
    begin = ResumableOutput.begin

    def beginning(files, *arguments, **settings):
        out.write_text("of another")
        return begin(files, *arguments, **settings)

    monkeypatch.setattr(ResumableOutput, "begin", beginning)
    said = refusal("predict", tiny_run, *input_images, "--out", out)
    assert "a.csv exists" in said
    assert "kept" not in said
    assert out.read_text() == "of another"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_damaged_log_begins_again(predict, interrupted, input_images, tmp_path):
    words = (*input_images, "-b", SIZE, "--out", tmp_path / "a.csv")
    interrupted(*words)
    log = tmp_path / "a.csv.partial"
    log.write_bytes(log.read_bytes().split(b"\n")[0] + b"\nwhat?\n")
    code, _, err = predict(*words, "--resume")
    assert (code, err) == (0, [])
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(input_images)


def test_the_remedy_is_not_what_was_given(interrupted, refusal, tiny_run, input_images, tmp_path):
    words = (*input_images, "-b", SIZE, "--out", tmp_path / "a.csv")
    interrupted(*words)
    said = refusal("predict", tiny_run, *words, "-k", 1, "--resume", "--overwrite")
    assert said.endswith("or start again with --overwrite and without --resume")


def test_a_link_stays_and_leads_to_the_rows(predict, input_images, tmp_path):
    (tmp_path / "far").mkdir()
    for name, words in (("a.csv", []), ("b.csv", ["--explain", tmp_path / "drawn"])):
        link = tmp_path / name
        link.symlink_to(tmp_path / "far" / name)
        assert predict(*input_images[:2], "--out", link, *words)[0] == 0
        assert link.is_symlink()
        assert len(link.read_text().splitlines()) == 3
    assert sorted(os.listdir(tmp_path / "far")) == ["a.csv", "b.csv"]


@pytest.mark.parametrize("size", [221, 300])
def test_a_name_that_is_too_long_is_said_at_once(
    refusal, tiny_run, input_images, tmp_path, monkeypatch, size
):
    monkeypatch.setattr(
        "vit.inference.prediction_job.Predictor", lambda *_, **__: pytest.fail("too late")
    )
    out = tmp_path / f"{'x' * (size - 4)}.csv"
    said = refusal("predict", tiny_run, *input_images, "--out", out)
    assert f"the name has {size} bytes; give one of 220 at most" in said


def test_the_file_is_on_the_disk_before_it_gets_its_name(
    predict, input_images, tmp_path, monkeypatch
):
    events = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(handle):
        if (path := Path(os.readlink(f"/proc/self/fd/{handle}"))).is_file():
            events.append(path.name)
        fsync(handle)

    def record_replace(path, target):
        events.append(f"-> {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    assert predict(*input_images, "--out", tmp_path / "a.csv")[0] == 0
    assert events == [f".a.csv.{os.getpid()}.tmp", "-> a.csv"]


@pytest.mark.parametrize("step", ["a.csv", "a.csv.partial"])
def test_a_kill_while_the_file_gets_its_name_loses_nothing(
    predict, inputs, whole, tmp_path, monkeypatch, step
):
    """Before the rename, and before the log is deleted."""
    words = (*inputs, "-b", SIZE, "--out", tmp_path / "a.csv")
    replace, unlink = Path.replace, Path.unlink

    def killed_replace(path, target):
        if target.name == step:
            raise OSError(5, "killed")
        return replace(path, target)

    def killed_unlink(path, **options):
        if path.name == step:
            raise OSError(5, "killed")
        return unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed_replace)
        patch.setattr(Path, "unlink", killed_unlink)
        assert predict(*words)[0] == 2
    expected = whole("a.csv")
    code, _, err = predict(*words, "--resume", *["--overwrite"] * (step != "a.csv"))
    assert code == 1
    assert f"resuming after {len(inputs)} of" in err[0]
    assert (tmp_path / "a.csv").read_bytes() == expected
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "a.csv.done", "bad", "whole"]
