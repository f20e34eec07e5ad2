"""Kept pictures: those that were asked for, complete or not at all, and up to date."""

import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.config import AugmentConfig
from vit.data import cache as cache_module
from vit.data.cache import open_cache, side_for
from vit.data.cache_file import NOWHERE
from vit.data.dataset import Always
from vit.data.loading import TrainingLoader
from vit.data.preprocessing import Preprocessing
from vit.data.samples import Sample
from vit.data.schedule import Schedule
from vit.data.transforms import training_transform
from vit.errors import DataError


@pytest.fixture
def paths(tmp_path, picture) -> list[str]:
    found = []
    for number in range(6):
        path = tmp_path / "pictures" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        picture(40 + number, 30, number).save(path)
        found.append(str(path))
    return found


def built(paths, tmp_path, **settings):
    told = []
    folder = tmp_path / "cache"
    settings = {"side": 20, "kind": "disk", "folder": folder, "say": told.append, **settings}
    return open_cache(paths, **settings), told


def test_pictures_are_kept_at_the_side_that_crops_need(paths, tmp_path):
    cache, told = built(paths, tmp_path)
    assert len(told) == 1
    assert "6 pictures with a short side of 20 px" in told[0]
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            small = image.resize((round(image.width * 2 / 3), 20), Image.Resampling.BICUBIC)
        pixels = cache.pixels(number)
        assert np.abs(pixels.astype(int) - np.asarray(small)).max() <= 2


def test_small_pictures_are_kept_as_they_are(paths, tmp_path):
    cache, _ = built(paths, tmp_path, side=100)
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            assert np.array_equal(cache.pixels(number), np.asarray(image))


def test_it_is_built_once_and_again_after_a_change(paths, tmp_path, picture):
    built(paths, tmp_path)
    assert built(paths, tmp_path)[1] == []
    assert len(built(paths, tmp_path, side=16)[1]) == 1
    assert len(built(paths[:-1], tmp_path)[1]) == 1
    picture(41, 30, 99).save(paths[1])
    cache, told = built(paths, tmp_path)
    assert len(told) == 1
    fresh, _ = built(paths, tmp_path, folder=tmp_path / "other")
    assert np.array_equal(cache.pixels(1), fresh.pixels(1))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_index_is_built_anew(paths, tmp_path, damage):
    cache, _ = built(paths, tmp_path)
    content = bytearray(cache.file.read_bytes())
    content[150] ^= 1
    cache.file.write_bytes(content if damage == "flip" else content[:60])
    again, told = built(paths, tmp_path)
    assert len(told) == 1
    assert again.pixels(0).shape == (20, 27, 3)


def test_bad_pictures_have_no_place_and_stay_bad(paths, tmp_path):
    Path(paths[2]).write_bytes(b"no picture")
    os.unlink(paths[4])
    cache, _ = built(paths, tmp_path)
    assert [cache.pixels(number) is None for number in range(6)] == [n in (2, 4) for n in range(6)]
    assert cache.index["place"][2] == NOWHERE
    batches = list(loaded(paths, cache))
    bad = {failed.path for batch in batches for failed in batch.failed}
    assert bad == {paths[2], paths[4]}


def loaded(paths, cache, workers=0, start=0):
    samples = [Sample(path, 0) for path in paths]
    transform = training_transform(
        AugmentConfig(min_crop=0.3), Preprocessing(image_size=(16, 16)), quick=True
    )
    schedule = Schedule(count=len(samples), seed=0, batch_size=2)
    loader = TrainingLoader(
        samples,
        Always(transform),
        schedule,
        epochs=2,
        workers=workers,
        on_bad_image="skip",
        cache=cache,
    )
    yield from loader.epoch(0, start)
    yield from loader.epoch(1)
    loader.close()


def test_batches_come_from_it_on_any_number_of_processes_and_after_a_resume(paths, tmp_path):
    cache, _ = built(paths, tmp_path)
    for path in paths:
        os.unlink(path)
    alone = [batch.images for batch in loaded(paths, cache)]
    assert all(len(images) == 2 for images in alone)
    for others in (loaded(paths, cache, workers=2), loaded(paths, cache, start=2)):
        images = [batch.images for batch in others]
        assert all(map(torch.equal, images, alone[-len(images) :]))


def test_another_process_maps_it_anew(paths, tmp_path):
    cache, _ = built(paths, tmp_path)
    sent = pickle.dumps(cache)
    assert len(sent) < 2000
    assert np.array_equal(pickle.loads(sent).pixels(3), cache.pixels(3))


def test_no_room_is_told_before_anything_is_written(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "room_in", lambda *_args, **_: 1000)
    with pytest.raises(DataError, match=r"6 pictures need 0\.00 GiB, and 0\.00 GiB of space"):
        built(paths, tmp_path)
    assert not list((tmp_path / "cache").glob("pictures-*[!k]"))


def test_memory_is_free_when_the_last_process_ends(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "SHARED", tmp_path)
    cache, told = built(paths, tmp_path, kind="ram", folder=None)
    assert "GiB of memory" in told[0]
    assert cache.file.exists()
    cache.forget()
    assert not cache.file.exists()
    assert cache.pixels(5).shape == (20, 30, 3)


def slow_build(paths, folder, marks):
    original = cache_module.read_pixels

    def slow(path, least):
        Path(marks, f"{os.getpid()}-{Path(path).name}").touch()
        time.sleep(0.1)
        return original(path, least)

    cache_module.read_pixels = slow
    open_cache(paths, side=20, kind="disk", folder=folder, threads=1)


def started(paths, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir(exist_ok=True)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=slow_build, args=(paths, tmp_path / "cache", marks))
    process.start()
    return process, marks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_build_leaves_nothing_that_is_used(paths, tmp_path):
    process, marks = started(paths, tmp_path)
    while not any(marks.iterdir()):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(list((tmp_path / "cache").glob("*.building-*"))) == 1
    _, told = built(paths, tmp_path)
    assert len(told) == 1
    assert not list((tmp_path / "cache").glob("*.building-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_build_it_once(paths, tmp_path):
    processes = [started(paths, tmp_path) for _ in range(2)]
    for process, _ in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(processes[0][1].iterdir())) == len(paths)


def test_the_side_keeps_crops_of_the_mean_area_from_being_enlarged():
    assert side_for(224, 1.0) == 224
    assert side_for(224, 0.08) == 305
