"""The image cache: right pixels, rebuilt after changes, shared by processes, bounded in size."""

import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.slow_cases import mostly_slow
from vit.atomic_files import locked
from vit.config import AugmentConfig
from vit.data import image_cache as cache_module
from vit.data.dataloader import TrainingLoader
from vit.data.dataset import ConstantTransform
from vit.data.dataset_types import Sample
from vit.data.image_cache import UNREADABLE, ImageCache, cache_side, open_cache
from vit.data.instrument_images import ChannelSpec
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import MicroBatchSampler
from vit.data.transforms import TrainingTransform
from vit.errors import DataError


@pytest.fixture
def paths(tmp_path, pil_image) -> list[str]:
    found = []
    for number in range(6):
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pil_image(40 + number, 30, number).save(path)
        found.append(str(path))
    return found


def built(paths, tmp_path, **settings):
    notes = []
    folder = tmp_path / "cache"
    settings = {"side": 20, "kind": "disk", "folder": folder, "notify": notes.append, **settings}
    return open_cache(paths, **settings), notes


def test_images_are_cached_at_the_side_that_crops_need(paths, tmp_path):
    cache, notes = built(paths, tmp_path)
    assert len(notes) == 1
    assert "6 images with a short side of 20 px" in notes[0]
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            small = image.resize((round(image.width * 2 / 3), 20), Image.Resampling.BICUBIC)
        pixels = cache.pixels(number)
        assert np.abs(pixels.astype(int) - np.asarray(small)).max() <= 2


def test_small_images_are_cached_unchanged(paths, tmp_path):
    cache, _ = built(paths, tmp_path, side=100)
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            assert np.array_equal(cache.pixels(number), np.asarray(image))


def test_deep_images_are_cached_with_their_intensity_range(tmp_path):
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) * 16
    Image.fromarray(values).save(tmp_path / "deep.tif")
    caches = [
        built([str(tmp_path / "deep.tif")], tmp_path, intensity_range=deep)[0]
        for deep in ((0.0, 4080.0), (0.0, 65535.0), None)
    ]
    assert np.array_equal(caches[0].pixels(0)[..., 0], values // 16)
    assert caches[1].pixels(0).max() == caches[2].pixels(0).max() == 16
    assert len({cache.file for cache in caches}) == 3


@pytest.mark.parametrize("kind", mostly_slow(["uint8", "uint16", "float32"]))
@pytest.mark.parametrize("workers", [0, 2])
def test_channels_are_cached_in_their_type_and_crops_are_the_same(tmp_path, kind, workers):
    random = np.random.default_rng(0)
    files = [str(tmp_path / f"{number}.npy") for number in range(6)]
    for number, path in enumerate(files):
        np.save(path, random.integers(0, 255, (30 + number, 40, 5)).astype(kind))
    spec = channels_of(kind)
    cache, notes = built(files, tmp_path, side=100, channels=spec)
    assert len(notes) == 1
    for number, path in enumerate(files):
        pixels = cache.pixels(number)
        assert pixels.dtype == kind
        assert np.array_equal(pixels, np.load(path)[..., [4, 0, 2]])
    whole, kept = (
        [batch.images for batch in loaded(files, each, workers, channels=spec)]
        for each in (None, cache)
    )
    assert whole[0].dtype == getattr(torch, kind)
    assert all(map(torch.equal, whole, kept))
    size = os.stat(cache.file).st_size
    assert (
        sum(cache.pixels(n).nbytes for n in range(6))
        < size
        < 1024 + sum(cache.pixels(n).nbytes for n in range(6))
    )


def test_large_channels_are_cached_at_the_side_that_crops_need(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (50, 60, 5)).astype(np.uint16)
    np.save(tmp_path / "large.npy", values)
    file, spec = [str(tmp_path / "large.npy")], channels_of("uint16")
    cache, _ = built(file, tmp_path, side=20, channels=spec)
    pixels = cache.pixels(0)
    assert pixels.shape == (20, 24, 3)
    for number, channel in enumerate((4, 0, 2)):
        band = Image.fromarray(values[..., channel].astype(np.float32))
        small = np.asarray(band.resize((24, 20), Image.Resampling.BICUBIC))
        assert np.abs(pixels[..., number] - small).max() <= 0.51
    other = dataclasses.replace(spec, order=(4, 0, 1))
    assert built(file, tmp_path, side=20, channels=other)[0].file != cache.file


def channels_of(kind: str) -> ChannelSpec:
    """The last, first and third of five channels."""
    return ChannelSpec(
        value_type=kind, count=5, order=(4, 0, 2), low=(0.0,) * 3, high=(250.0,) * 3,
        mean=(0.5,) * 3, std=(0.2,) * 3,
    )  # fmt: skip


def test_the_cache_is_built_once_and_again_after_a_change(paths, tmp_path, pil_image):
    built(paths, tmp_path)
    assert built(paths, tmp_path)[1] == []
    assert len(built(paths, tmp_path, side=16)[1]) == 1
    assert len(built(paths[:-1], tmp_path)[1]) == 1
    pil_image(41, 30, 99).save(paths[1])
    cache, notes = built(paths, tmp_path)
    assert len(notes) == 1
    fresh, _ = built(paths, tmp_path, folder=tmp_path / "other")
    assert np.array_equal(cache.pixels(1), fresh.pixels(1))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_cache_with_a_damaged_index_is_rebuilt(paths, tmp_path, damage):
    cache, _ = built(paths, tmp_path)
    content = bytearray(cache.file.read_bytes())
    content[150] ^= 1
    cache.file.write_bytes(content if damage == "flip" else content[:60])
    again, notes = built(paths, tmp_path)
    assert len(notes) == 1
    assert again.pixels(0).shape == (20, 27, 3)


def test_bad_images_are_not_cached_and_still_raise_their_error(paths, tmp_path):
    Path(paths[2]).write_bytes(b"no image")
    os.unlink(paths[4])
    cache, _ = built(paths, tmp_path)
    assert [cache.pixels(number) is None for number in range(6)] == [n in (2, 4) for n in range(6)]
    assert cache.index["offset"][2] == UNREADABLE
    batches = list(loaded(paths, cache))
    bad = {failed.path for batch in batches for failed in batch.failed}
    assert bad == {paths[2], paths[4]}


def loaded(paths, cache, workers=0, start=0, channels=None):
    samples = [Sample(path, 0) for path in paths]
    size = Preprocessing(image_size=(16, 16), channels=channels)
    transform = TrainingTransform(AugmentConfig(min_crop=0.3), size, fast_crop=True)
    sampler = MicroBatchSampler(count=len(samples), seed=0, batch_size=2)
    loader = TrainingLoader(
        samples,
        ConstantTransform(transform),
        sampler,
        epochs=2,
        workers=workers,
        cache=cache,
    )
    yield from loader.epoch(0, start)
    yield from loader.epoch(1)
    loader.close()


def test_cached_batches_are_equal_for_any_number_of_processes_and_after_resuming(paths, tmp_path):
    cache, _ = built(paths, tmp_path)
    for path in paths:
        os.unlink(path)
    alone = [batch.images for batch in loaded(paths, cache)]
    assert all(len(images) == 2 for images in alone)
    for others in (loaded(paths, cache, workers=2), loaded(paths, cache, start=2)):
        images = [batch.images for batch in others]
        assert all(map(torch.equal, images, alone[-len(images) :]))


def test_an_unpickled_cache_maps_the_file_itself(paths, tmp_path):
    cache, _ = built(paths, tmp_path)
    sent = pickle.dumps(cache)
    assert len(sent) < 2000
    assert np.array_equal(pickle.loads(sent).pixels(3), cache.pixels(3))


def test_a_lack_of_space_is_reported_before_anything_is_written(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "free_bytes", lambda *_args, **_: 1000)
    with pytest.raises(DataError, match=r"6 images need 0\.0 MiB, and 0\.0 MiB of space"):
        built(paths, tmp_path)
    assert not list((tmp_path / "cache").glob("images-*[!k]"))


def test_memory_is_freed_when_the_last_process_ends(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "SHARED_MEMORY", tmp_path)
    cache, notes = built(paths, tmp_path, kind="ram", folder=None)
    assert "MiB of memory" in notes[0]
    assert cache.file.exists()
    cache.unlink()
    assert not cache.file.exists()
    assert cache.pixels(5).shape == (20, 30, 3)


def slow_build(paths, folder, marks):
    original = cache_module.read_pixels

    def slow(path, min_size, **settings):
        Path(marks, f"{os.getpid()}-{Path(path).name}").touch()
        time.sleep(0.1)
        return original(path, min_size, **settings)

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
def test_files_of_a_killed_build_are_deleted(paths, tmp_path):
    process, marks = started(paths, tmp_path)
    while not any(marks.iterdir()):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(list((tmp_path / "cache").glob("*.building-*"))) == 1
    _, notes = built(paths, tmp_path)
    assert len(notes) == 1
    assert not list((tmp_path / "cache").glob("*.building-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_build_the_cache_once(paths, tmp_path):
    processes = [started(paths, tmp_path) for _ in range(2)]
    for process, _ in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(processes[0][1].iterdir())) == len(paths)


def test_the_cached_side_does_not_upsample_crops_of_mean_area():
    assert cache_side(224, 1.0) == 224
    assert cache_side(224, 0.08) == 305


def one_image(path, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 20), colour).save(path)
    os.utime(path, (0, 0))


def test_a_replaced_image_of_the_same_name_size_and_time_is_detected(tmp_path, monkeypatch):
    for folder, colour in (("a", "red"), ("b", "blue")):
        one_image(tmp_path / folder / "x.bmp", colour)
    for folder, first in (("a", 255), ("b", 0)):
        monkeypatch.chdir(tmp_path / folder)
        cache, _ = built(["x.bmp"], tmp_path)
        assert cache.pixels(0)[0, 0, 0] == first
    shutil.copy2(tmp_path / "a" / "x.bmp", tmp_path / "b" / "x.bmp")
    cache, notes = built(["x.bmp"], tmp_path)
    assert len(notes) == 1
    assert cache.pixels(0)[0, 0, 0] == 255


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="/dev/shm is of Linux")
@pytest.mark.parametrize("how", ["open", "link"])
def test_a_shared_folder_that_other_users_can_write_is_refused(paths, tmp_path, monkeypatch, how):
    monkeypatch.setattr(cache_module, "SHARED_MEMORY", tmp_path)
    folder, elsewhere = tmp_path / f"vit-toolkit-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how == "open":
        folder.mkdir()
        folder.chmod(0o770)
    else:
        folder.symlink_to(elsewhere)
    with pytest.raises(DataError, match="is not a folder of this user alone"):
        built(paths, tmp_path, kind="ram", folder=None)
    assert not list(folder.iterdir())


def test_a_cache_deleted_while_it_is_opened_is_rebuilt(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "SHARED_MEMORY", tmp_path)
    first, _ = built(paths, tmp_path, kind="ram", folder=None)
    original = cache_module.read_valid_index

    def read_and_delete(file, expected):
        index = original(file, expected)
        file.unlink(missing_ok=True)
        return index

    monkeypatch.setattr(cache_module, "read_valid_index", read_and_delete)
    second, notes = built(paths, tmp_path, kind="ram", folder=None)
    assert len(notes) == 1
    assert np.array_equal(first.pixels(3), second.pixels(3))


def test_pixels_and_index_belong_to_the_same_file(paths, tmp_path, pil_image):
    cache, _ = built(paths, tmp_path)
    pil_image(60, 50, 99).save(paths[0])
    built(paths, tmp_path)
    with pytest.raises(FileNotFoundError, match="replaced by another cache"):
        ImageCache(cache.file, cache.index)


def test_unlinking_waits_for_processes_that_open_the_cache(paths, tmp_path):
    pytest.importorskip("fcntl")
    cache, _ = built(paths, tmp_path)
    thread = threading.Thread(target=cache.unlink)
    with locked(cache.file.with_suffix(".lock")):
        thread.start()
        thread.join(0.1)
        assert cache.file.exists()
    thread.join()
    assert not cache.file.exists()


def test_the_least_recently_used_caches_are_evicted(paths, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    used, _ = built(paths[:1], tmp_path)  # the oldest, and open
    files = [used.file]
    for number in (1, 2, 3):
        cache, _ = built(paths[number : number + 1], tmp_path)
        files.append(cache.file)
        del cache
    foreign = tmp_path / "cache" / f"images-{24 * '0'}"
    foreign.write_bytes(b"not a cache")
    for at, file in enumerate([foreign, *files]):
        os.utime(file, (at, at))
    built(paths[1:2], tmp_path)  # its use makes it the youngest
    size = max(file.stat().st_size for file in files)
    monkeypatch.setattr(cache_module, "MAX_TOTAL_BYTES", 3.5 * size)
    _, notes = built(paths[5:], tmp_path)
    assert [file.exists() for file in files] == [True, True, False, False]
    assert foreign.exists()
    assert "deleted 2 unused caches" in notes[0]
    assert len(notes) == 2
