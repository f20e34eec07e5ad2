"""vit.predict does what `vit predict` does, in one call and under the same names."""

import argparse
from dataclasses import fields

import numpy as np
import pytest

import vit
from vit.commands.command_options import SEARCH_FIELDS
from vit.commands.main import main
from vit.commands.predict_command import add_arguments
from vit.errors import ConfigError
from vit.inference.prediction_job import PredictionConfig

pytestmark = pytest.mark.auto_precision


def test_one_call_writes_what_the_command_writes(tiny_run, tiny_data, bad_images, tmp_path):
    inputs = [str(tiny_data / "val"), *bad_images]
    lines, steps, paths = [], [], {}
    for name in ("library", "command"):
        (tmp_path / name).mkdir()
        paths[name] = tmp_path / name / "a.csv", tmp_path / name / "a.npy"
    out, vectors = paths["library"]
    failed = vit.predict(
        tiny_run,
        inputs,
        out=str(out),
        embeddings=str(vectors),
        batch_size=4,
        top_k=2,
        sort_into=str(tmp_path / "sorted"),
        notify=lines.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    total = 27 + len(bad_images)
    assert failed == len(bad_images)
    assert lines[0].startswith("27 images sorted into")
    assert lines[1].startswith(f"{failed} of {total} images failed")
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    out, vectors = paths["command"]
    words = ["-b", "4", "--top-k", "2", "--out", str(out), "--embeddings", str(vectors)]
    assert main(["predict", str(tiny_run), *inputs, *words]) == 1
    for one, other in zip(paths["library"], paths["command"], strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert np.load(vectors).shape == (total, 32)


def test_settings_that_exclude_each_other_are_refused(tiny_run):
    with pytest.raises(ConfigError, match="--resume continues a file"):
        vit.predict(tiny_run, ["a.jpg"], resume=True)


def test_settings_have_the_names_of_the_flags():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {action.dest for action in parser._actions} - {"help", *SEARCH_FIELDS}
    assert flags == {one.name for one in fields(PredictionConfig)} - {"search"}
