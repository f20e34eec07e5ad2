"""Whatever a kill or a power failure leaves of a log, what is kept is a number of whole blocks."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from vit.errors import ConfigError, RunError
from vit.output import resumable_output
from vit.output.resumable_output import (
    Block,
    BlockLog,
    FileLock,
    ResumableOutput,
    describe_differences,
    merge_blocks,
    read_blocks,
    read_settings,
)

BLOCKS = [
    Block(0, 2, b"one\ntwo\n", b"\0\n" * 8, [], {"failed": 0}),
    Block(2, 2, b"three\nfour\n", b"\n\xff" * 8, [(1, "cut")], {"failed": 1}),
    Block(4, 1, b"five\n", b"\1\2" * 4, [], {"failed": 1}),
]
SETTINGS = {"top_k": 5, "list": "a" * 64, "same": None}


def write_log(path, blocks=BLOCKS, *, resume=False):
    log = BlockLog(path, SETTINGS, resume=resume)
    for block in blocks:
        log.append(block)
    log.close()
    return path


def resumed(path):
    """Number of blocks after the log was opened again; the file has these blocks and no more."""
    log = BlockLog(path, SETTINGS, resume=True)
    log.close()
    blocks = [(one.first, one.rows, one.vectors, one.totals) for one, _ in read_blocks(path)]
    number = len(blocks)
    assert blocks == [(one.first, one.rows, one.vectors, one.totals) for one in BLOCKS[:number]]
    assert log.images == sum(block.images for block in BLOCKS[:number])
    assert log.totals == (BLOCKS[number - 1].totals if number else {})
    assert path.read_bytes() == write_log(path.with_name("same"), BLOCKS[:number]).read_bytes()
    return number


def test_a_log_cut_anywhere_is_cut_back_to_a_block(tmp_path):
    path = write_log(tmp_path / "log")
    whole = path.read_bytes()
    kept = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept.append(resumed(path))
    assert kept == sorted(kept)
    assert {*kept} == {*range(len(BLOCKS) + 1)}


def test_bytes_that_the_disk_lost_are_not_taken_for_rows(tmp_path):
    path = write_log(tmp_path / "log")
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for position in range(header, len(whole)):
        path.write_bytes(whole[:position] + b"\0" * (len(whole) - position))
        assert resumed(path) < len(BLOCKS)
    for position in range(header, len(whole)):
        path.write_bytes(whole[:position] + b"?" + whole[position + 1 :])
        assert resumed(path) < len(BLOCKS) or whole[position] == ord("?")


def test_bytes_after_the_last_block_are_dropped(tmp_path):
    path = write_log(tmp_path / "log")
    for rest in (b"six\nsev", b"[]\n", b"null\n", b"00000000 [5, 1]\n", b"\xff\n", b"1 " * 99):
        with path.open("ab") as file:
            file.write(rest)
        assert resumed(path) == len(BLOCKS)


def test_a_log_continues_where_it_stopped(tmp_path):
    path = write_log(tmp_path / "log", BLOCKS[:1])
    write_log(path, BLOCKS[1:], resume=True)
    assert path.read_bytes() == write_log(tmp_path / "whole").read_bytes()


def test_a_torn_header_begins_again_and_another_file_is_refused(tmp_path):
    path = write_log(tmp_path / "log")
    assert read_settings(path) == SETTINGS
    path.write_bytes(path.read_bytes()[:9])
    assert read_settings(path) == {}
    for other in (b'{"image": "a.jpg"}\n', b"image,label_1\n", b"[]\n", b"\xff\xfe\n"):
        path.write_bytes(other)
        with pytest.raises(RunError, match="not written by this version of vit: start again with"):
            read_settings(path)


def test_only_a_log_of_the_same_settings_is_continued(tmp_path):
    output = ResumableOutput(str(tmp_path / "a.csv"))
    output.open_log(0, SETTINGS, resume=False).close()
    assert output.stored_settings() == SETTINGS
    now = {"top_k": 3, "list": "b" * 64, "same": None}
    assert describe_differences(SETTINGS, now) == ["another list", "top k (5, now 3)"]
    with FileLock(output.targets) as lock:
        assert output.begin(lock, SETTINGS, resume=True, overwrite=False) is None
        assert output.logs()
        with pytest.raises(RunError, match="begun with another list; top k"):
            output.begin(lock, now, resume=True, overwrite=False)
        assert output.begin(lock, now, resume=False, overwrite=True) is None
    assert os.listdir(tmp_path) == []


def test_only_our_own_unfinished_files_are_taken_for_such(tmp_path):
    ours = ["a.csv.partial", "a.csv.partial.2-of-3", "a.csv.partial.stop"]
    for name in [*ours, "a.csv", "a.csv.partial.bak", "b.csv.partial", "xa.csv.partial"]:
        (tmp_path / name).touch()
    output = ResumableOutput(str(tmp_path / "a.csv"))
    assert [path.name for path in output.leftovers()] == ours
    assert [path.name for path in output.logs()] == ours[:2]


def test_blocks_of_several_processes_come_in_the_order_of_the_images(tmp_path):
    output = ResumableOutput(str(tmp_path / "all"), processes=3)
    for rank in range(3):
        log = output.open_log(rank, {}, resume=False)
        for number in range(rank, 7, 3):
            log.append(Block(2 * number, 2, b"%d\n" % number * 2, errors=[(0, f"of {number}")]))
        log.close()
    logs = [output.log_path(rank) for rank in range(3)]
    assert [block.errors for block in merge_blocks(logs, 14)] == [
        [[0, f"of {n}"]] for n in range(7)
    ]
    with pytest.raises(RunError, match="damaged after 14 rows of 15"):
        list(merge_blocks(logs, 15))
    output.finish(b"head\n", 14, 0)
    expected = b"head\n" + b"".join(b"%d\n" % number * 2 for number in range(7))
    assert (tmp_path / "all").read_bytes() == expected
    assert os.listdir(tmp_path) == ["all"]


def append_until_killed(path):
    log = BlockLog(path, SETTINGS, resume=True)
    while True:
        log.append(numbered_block(log.images))


def numbered_block(first, images=64):
    rows = b"".join(b"image %d\n" % number for number in range(first, first + images))
    return Block(first, images, rows, rows * 3, totals={"images": first + images})


@pytest.mark.slow
def test_a_process_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    output = ResumableOutput(str(tmp_path / "a.txt"))
    context, images = multiprocessing.get_context("spawn"), 0
    for _ in range(4):
        process = context.Process(target=append_until_killed, args=(output.log_path(0),))
        process.start()
        while output.rows() < images + 3000:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        images = output.rows()
    log = output.open_log(0, SETTINGS, resume=True)
    assert log.images == log.totals["images"] == images >= 12000
    log.close()
    output.finish(b"", images, 0)
    expected = b"".join(b"image %d\n" % number for number in range(images))
    assert output.out.read_bytes() == expected


def test_two_predictions_do_not_write_one_file(tmp_path):
    out = tmp_path / "found.csv"
    with FileLock([out]) as first, FileLock([out]) as second:
        first.acquire()
        first.acquire(shared=True)
        second.acquire(shared=True)  # of the same prediction
        with (
            FileLock([tmp_path / "other.csv", out]) as third,
            pytest.raises(RunError, match=r"found\.csv\.partial is being written by another"),
        ):
            third.acquire()
        assert os.listdir(tmp_path) == ["found.csv.partial.lock"]
        (tmp_path / "found.csv.partial.lock").unlink()
        with FileLock([out]) as fourth:
            fourth.acquire()
            (tmp_path / "found.csv.partial.lock").rename(tmp_path / "moved")
            with pytest.raises(RunError, match="is being written by another"):
                fourth.acquire()
            (tmp_path / "moved").rename(tmp_path / "found.csv.partial.lock")
    assert os.listdir(tmp_path) == []


def test_a_lock_file_is_closed_first_where_open_ones_are_not_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("vit.output.resumable_output.POSIX", False)
    unlink = Path.unlink
    with FileLock([tmp_path / "a.csv"]) as lock:
        lock.acquire()
        (handle,) = lock._handles.values()

        def delete(path, **options):
            if not handle.closed:
                raise PermissionError("another process uses the file")
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", delete)
    assert os.listdir(tmp_path) == []


SIZE, DIM = 3, 4


@pytest.fixture
def vectors():
    random = np.random.default_rng(0)
    found = [random.normal(size=DIM).astype(np.float32) for _ in range(8)]
    found[0] = found[5] = None
    return found


@pytest.fixture
def blocks(vectors):
    errors = {0: [(0, "empty")], 3: [(2, "cut")]}
    return [
        Block(
            first,
            len(vectors[first : first + SIZE]),
            b"",
            resumable_output.encode_vectors(vectors[first : first + SIZE], DIM),
            errors.get(first, []),
        )
        for first in range(0, len(vectors), SIZE)
    ]


def test_npy_is_what_numpy_writes(tmp_path, vectors, blocks):
    resumable_output.write_embeddings(tmp_path / "x.npy", blocks, 8, DIM)
    expected = np.stack([np.full(4, np.nan, np.float32) if v is None else v for v in vectors])
    np.save(tmp_path / "expected.npy", expected)
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy", mmap_mode="r"), expected)


def test_the_name_says_the_format():
    resumable_output.check_embeddings("x.npy")
    with pytest.raises(ConfigError, match=r"name it \.npy"):
        resumable_output.check_embeddings("x.csv")
