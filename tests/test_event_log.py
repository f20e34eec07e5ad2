"""Damaged lines of metrics.jsonl are named, and the others are read."""

import json

import pytest

from vit.event_log import read_event_log

STEP = json.dumps({"event": "step", "step": 1}).encode() + b"\n"
EPOCH = json.dumps({"event": "epoch", "epoch": 1, "val_loss": 1.0, "seconds": 2.0, "x": "é"})


@pytest.mark.parametrize(
    ("damaged", "number", "cut"),
    [
        (b'{"event": "epoch", "epoch": 2, "val_', 3, True),
        (b'{"event": "epoch", "x": "\xc3', 3, True),  # in the middle of a character
        (bytes(4096), 3, True),
        (bytes(4096) + b"\n", 3, False),
        (b'["event"]\n' + STEP, 3, False),
        (b'"event"\n', 3, False),
        (b"7\n\n", 3, False),
        (b'{"epoch": 1}\n', 3, False),
        (b'{"event": "epoch"}\n', 3, False),
        (b'{"event": "epoch", "epoch": 2, "val_loss": "1"}\n', 3, False),
        (b'{"event": ["epoch"]}\n', 3, False),
        (b"[" * 100_000 + b"\n", 3, False),
    ],
)
@pytest.mark.parametrize("kinds", [(), ("epoch",)])
def test_a_damaged_line_is_left_out_and_named(tmp_path, damaged, number, cut, kinds):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(STEP + EPOCH.encode() + b"\n" + damaged)
    log = read_event_log(path, *kinds)
    assert [one for one in log.events if one["event"] == "epoch"] == [json.loads(EPOCH)]
    assert log.damage.startswith(f"line {number} of metrics.jsonl")
    assert log.cut == cut


def test_a_whole_file_is_read_with_and_without_its_last_end_of_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_event_log(path) == ([], "", False)
    path.write_bytes(b"")
    assert read_event_log(path) == ([], "", False)
    path.write_bytes(STEP + EPOCH.encode())
    assert read_event_log(path) == ([json.loads(STEP), json.loads(EPOCH)], "", False)
    assert read_event_log(path, "soup").events == []
    path.unlink()
    path.mkdir()
    assert read_event_log(path).damage == "metrics.jsonl cannot be read: Is a directory"
