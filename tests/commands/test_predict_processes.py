"""Two processes and one file, the same as of one process, also after a kill."""

import os
import signal

import pytest

from tests.commands.interruptions import run_interrupted
from tests.commands.test_predict_sorting import files_in
from tests.training.children import Job, command

pytestmark = pytest.mark.auto_precision

WORDS = ("-b", "4", "--threshold", "0.6")


@pytest.fixture
def inputs(input_images, bad_images):
    return [*input_images[:10], *bad_images, *input_images[10:]]


@pytest.fixture
def alone(predict, inputs, tmp_path):
    """The bytes that one process writes, and the files that it sorts."""
    (tmp_path / "alone").mkdir()
    out, folder = tmp_path / "alone" / "a.csv", tmp_path / "alone" / "sorted"
    assert predict(*inputs, *WORDS, "--out", out, "--sort-into", folder)[0] == 1
    return out.read_bytes(), files_in(folder)


@pytest.mark.slow
def test_two_processes_write_what_one_does(tiny_run, inputs, alone, tmp_path):
    out, folder = tmp_path / "a.csv", tmp_path / "sorted"
    words = ["predict", str(tiny_run), *inputs, *WORDS, "--out", str(out)]
    words += ["--sort-into", str(folder)]
    with Job(command, words, log=tmp_path / "log", processes=2) as job:
        assert job.wait() == [1, 0], job.said()  # images failed: the first process says so
        lines = job.said().splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"vit predict: 27 images sorted into {folder}")
    assert lines[1].startswith(f"vit predict: {len(inputs) - 27} of {len(inputs)} images failed")
    assert (out.read_bytes(), files_in(folder)) == alone
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "alone", "bad", "log", "sorted"]


@pytest.mark.slow
def test_a_kill_of_two_processes_is_resumed(refusal, tiny_run, inputs, alone, tmp_path):
    out, folder = tmp_path / "a.csv", tmp_path / "sorted"
    words = [*inputs, *WORDS, "--out", str(out), "--sort-into", str(folder)]
    line = ["predict", str(tiny_run), *words]
    with Job(run_interrupted, line, 2, "torn", 1, log=tmp_path / "killed", processes=2) as job:
        assert job.processes[1].join(60) is None
        job.kill()
    left = [name for name in sorted(os.listdir(tmp_path)) if ".partial" in name]
    assert "a.csv.partial.2-of-2" in left
    assert "processes (2, now 1)" in refusal(*line, "--resume")
    with Job(command, [*line, "--resume"], log=tmp_path / "log", processes=2) as job:
        assert job.wait() == [1, 0], job.said()
    assert (out.read_bytes(), files_in(folder)) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [("fail", 2, "the disk is full"), ("term", 143, "stopped by SIGTERM")],
)
def test_what_ends_one_process_ends_all_with_one_line(
    tiny_run, inputs, tmp_path, how, code, reason
):
    out = tmp_path / "a.jsonl"
    words = ["predict", str(tiny_run), *inputs * 20, "-b", "4", "--precision", "fp32"]
    words += ["--out", str(out)]
    with Job(run_interrupted, words, 3, how, 1, log=tmp_path / "log", processes=2) as job:
        assert job.wait() == [code, code], job.said()
        lines = job.said().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"vit predict: {reason}; ")
    assert "rows are kept in" in lines[0]
    assert lines[0].endswith("of 2 processes: continue with --resume")
    assert not out.exists()
    assert signal.SIGKILL not in job.wait()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--out FILE"),
        (["--out", "-"], "--out FILE"),
        (["--out", "a.csv", "--explain", "d"], "without --explain"),
        (["--out", "a.csv", "--temperature", "1"], "--temperature"),
    ],
)
def test_what_several_cannot_do_is_one_line(
    refusal, tiny_run, monkeypatch, tmp_path, words, reason
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert reason in refusal("predict", tiny_run, "a.jpg", *words)
