"""Whatever a kill or a power failure leaves of the files, what is kept is a number of blocks."""

import os

import pytest

from vit.errors import RunError
from vit.output.resumable_output import (
    FileLock,
    Journal,
    check_settings_match,
    differences,
    journal_blocks,
    journal_entries,
    journal_path,
    last_valid_entry,
    merge_parts,
    partial_files,
    partial_path,
    read_header,
)

BLOCKS = [b"head\n", b"one\ntwo\n", b"three\nfour\n", b"five\n"]
ROWS = [0, 2, 4, 5]


def written(folder, pieces=BLOCKS, rows=ROWS, settings=None):
    """A journal of two files, which has every block."""
    out = folder / "found.csv"
    files = {"rows": partial_path(out), "twice": folder / "twice.partial"}
    journal = Journal(journal_path(partial_path(out)), files, settings or {"a": 1}, resume=False)
    for number, piece in zip(rows, pieces, strict=True):
        journal.write(number, {"rows": piece, "twice": piece * 2}, totals={"n": number})
    journal.close(sync=True)
    return journal.path, files


def kept(path, files):
    """What is in the files after work went on, which must be whole blocks of both."""
    journal = Journal(path, files, {}, resume=True)
    journal.close()
    rows = files["rows"].read_bytes()
    assert files["twice"].read_bytes() == b"".join(b * 2 for b in pieces_of(rows))
    number = len(pieces_of(rows))
    assert journal.entry.rows == (ROWS[number - 1] if number else 0)
    assert [entry.rows for entry, _ in journal_entries(path)] == ROWS[:number]
    return number


def pieces_of(rows):
    for number in range(len(BLOCKS) + 1):
        if b"".join(BLOCKS[:number]) == rows:
            return BLOCKS[:number]
    raise AssertionError(f"{rows!r} is no number of blocks")


@pytest.mark.parametrize("which", ["rows", "twice", "journal"])
def test_a_file_cut_anywhere_is_cut_back_to_a_block(tmp_path, which):
    path, files = written(tmp_path)
    everything = {**files, "journal": path}
    whole = {name: file.read_bytes() for name, file in everything.items()}
    first = whole["journal"].index(b"\n") + 1 if which == "journal" else 0
    found = []
    for size in range(first, len(whole[which]) + 1):
        for name, file in everything.items():
            file.write_bytes(whole[name][: size if name == which else None])
        found.append(kept(path, files))
    assert found == sorted(found)
    assert {*found} == {*range(len(BLOCKS) + 1)}


@pytest.mark.parametrize("which", ["rows", "twice"])
def test_what_the_disk_lost_is_not_taken_for_rows(tmp_path, which):
    path, files = written(tmp_path)
    whole = files[which].read_bytes()
    for place in range(len(whole)):
        path, files = written(tmp_path)
        files[which].write_bytes(whole[:place] + b"\0" * (len(whole) - place))
        assert kept(path, files) < len(BLOCKS)


def test_more_than_was_counted_is_dropped(tmp_path):
    path, files = written(tmp_path)
    with files["rows"].open("ab") as file:
        file.write(b"six\nsev")
    assert kept(path, files) == len(BLOCKS)


def test_a_lost_file_begins_again(tmp_path):
    path, files = written(tmp_path)
    files["twice"].unlink()
    assert kept(path, files) == 0


@pytest.mark.parametrize("line", [b"[]\n", b"null\n", b'[1, {"rows": 3}, {}, []]\n', b"\xff\n"])
def test_a_damaged_line_ends_the_journal(tmp_path, line):
    path, files = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[4:]]))
    assert kept(path, files) == 2


def test_work_goes_on_where_it_stopped(tmp_path):
    path, files = written(tmp_path, BLOCKS[:2], ROWS[:2])
    journal = Journal(path, files, {}, resume=True)
    assert journal.entry.totals == {"n": 2}
    for number, piece in zip(ROWS[2:], BLOCKS[2:], strict=True):
        journal.write(number, {"rows": piece, "twice": piece * 2}, totals={"n": number})
    journal.close()
    other = tmp_path / "other"
    other.mkdir()
    path_of_one, files_of_one = written(other)
    assert path.read_bytes() == path_of_one.read_bytes()
    for name, file in files.items():
        assert file.read_bytes() == files_of_one[name].read_bytes()
    assert last_valid_entry(path, files)[0].rows == 5


def test_a_journal_says_what_was_asked(tmp_path):
    path, _ = written(tmp_path, settings={"top_k": 5, "list": "a" * 64, "same": None})
    assert read_header(path) == {"top_k": 5, "list": "a" * 64, "same": None}
    now = {"top_k": 3, "list": "b" * 64, "same": None}
    assert differences(read_header(path), now) == ["another list", "top k (5, now 3)"]
    out = tmp_path / "found.csv"
    check_settings_match(out, read_header(path))
    with pytest.raises(RunError, match="another list; top k"):
        check_settings_match(out, now)
    path.unlink()
    with pytest.raises(RunError, match="lost its journal"):
        check_settings_match(out, now)


def test_only_our_own_unfinished_files_are_taken_for_such(tmp_path):
    ours = ["a.csv.partial", "a.csv.partial.2-of-3", "a.csv.partial.2-of-3.journal"]
    for name in [*ours, "a.csv", "a.csv.partial.bak", "b.csv.partial", "xa.csv.partial"]:
        (tmp_path / name).touch()
    assert [path.name for path in partial_files(tmp_path / "a.csv")] == ours


def test_blocks_of_several_processes_come_in_their_order(tmp_path):
    pieces = [f"{number}\n".encode() * 2 for number in range(7)]
    paths = []
    for rank in range(3):
        path = tmp_path / f"part{rank}"
        journal = Journal(journal_path(path), {"rows": path}, {}, resume=False)
        journal.write(0, {"rows": b"head\n"})
        for number, piece in enumerate(pieces[rank::3], 1):
            journal.write(2 * number, {"rows": piece}, errors=[(0, f"of {piece!r}")])
        journal.close()
        paths.append(path)
    journals = [journal_path(path) for path in paths]
    merge_parts(paths, journals, "rows", tmp_path / "all")
    assert (tmp_path / "all").read_bytes() == b"head\n" + b"".join(pieces)
    assert [after.errors[0][1] for *_, after in journal_blocks(journals)] == [
        f"of {p!r}" for p in pieces
    ]


def test_two_jobs_do_not_write_one_file(tmp_path):
    out = tmp_path / "found.csv"
    with FileLock([out]) as first, FileLock([out]) as second:
        first.acquire()
        first.acquire(shared=True)
        second.acquire(shared=True)  # of the same job
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
