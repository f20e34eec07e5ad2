"""Damaged checkpoints, full and read-only disks, changed data: one clear line, nothing lost."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import disks
from tests.training.children import Job, command, complete, differences, train
from vit.config.setting_layers import write_settings
from vit.errors import WeightsError
from vit.training.checkpoint.checkpoint import (
    CheckpointState,
    find_checkpoints,
    load_checkpoint,
    take_snapshot,
    write_checkpoint,
)
from vit.weights.safetensors_io import read_tensors, write_tensors

SMALL = {"batch_size": 6, "checkpoint_steps": 1}
STOP = 10  # of 18 steps

Stopped = Callable[[], Path]


@pytest.fixture(scope="module")
def own_data(colour_data, tmp_path_factory) -> Path:
    """A copy of the colours, to be left as it was found."""
    return shutil.copytree(colour_data, tmp_path_factory.mktemp("own") / "data")


@pytest.fixture(scope="module")
def words(tiny_config, own_data, tmp_path_factory) -> list[str]:
    """The command line of a small run, up to its folder."""
    settings = tmp_path_factory.mktemp("settings") / "settings.yaml"
    write_settings(settings, tiny_config(**SMALL, num_classes=3, data=str(own_data)))
    return ["train", "-c", str(settings), "--out"]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory) -> Path:
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    complete(command, [*words, str(folder / "run")], log=folder / "log")
    return folder / "run"


@pytest.fixture(scope="module")
def stopped_once(tiny_config, own_data, tmp_path_factory) -> Path:
    """A run on `own_data` that a signal stopped in its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tiny_config(**SMALL, data=str(own_data))
    arguments = (config, folder / "run", False, None, (STOP - 1, 0))
    with Job(train, *arguments, log=folder / "log") as job:
        assert job.wait() == [143], job.said()
    assert [path.name for path in find_checkpoints(folder / "run/checkpoints")] == [
        f"step-{step:08d}.safetensors" for step in (STOP, STOP - 1)
    ]
    return folder / "run"


@pytest.fixture
def stopped(stopped_once, tmp_path) -> Path:
    """A copy of that run."""
    return shutil.copytree(stopped_once, tmp_path / "stopped")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refusal(said: str) -> str:
    """The only line that is no note."""
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith("vit train: ")]
    assert len(lines) == 1, said
    return lines[0]


def refused(words: list[str], log: Path) -> str:
    """What a command says that ends with code 2."""
    log.unlink(missing_ok=True)
    with Job(command, words, log=log) as job:
        assert job.wait() == [2], job.said()
    return refusal(job.said())


def flipped(content: bytes, place: int, bit: int) -> bytes:
    """With one bit changed."""
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def is_noticed(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        read_tensors(path)
    except WeightsError:
        return True
    return False


@pytest.mark.slow
def test_every_changed_byte_of_a_checkpoint_is_noticed(stopped, tmp_path):
    newest = find_checkpoints(stopped / "checkpoints")[0]
    raw, draw, copy = newest.read_bytes(), random.Random(0), tmp_path / newest.name
    assert not is_noticed(copy, raw)
    damaged: dict[str, bytes] = {}
    while len(damaged) < 200:
        place, bit = draw.randrange(len(raw)), draw.randrange(8)
        damaged[f"bit {bit} of byte {place}"] = flipped(raw, place, bit)
    for size in (0, 1, 7, 8, len(raw) - 1, *draw.sample(range(9, len(raw) - 1), 45)):
        damaged[f"cut to {size} bytes"] = raw[:size]
    assert len(damaged) == 250
    assert [name for name, content in damaged.items() if not is_noticed(copy, content)] == []


@pytest.mark.slow
def test_a_damaged_header_is_noticed_wherever_it_is(stopped, tmp_path):
    newest = find_checkpoints(stopped / "checkpoints")[0]
    raw, copy = newest.read_bytes(), tmp_path / newest.name
    end = 8 + int.from_bytes(raw[:8], "little")
    for place in (*range(8), *range(8, end, 211), *range(end - 8, end)):
        for bit in range(8):
            assert is_noticed(copy, flipped(raw, place, bit)), f"bit {bit} of byte {place}"


@pytest.mark.slow
def test_a_truncated_checkpoint_is_skipped_for_the_one_before_it(
    stopped, whole, tiny_config, words, tmp_path
):
    newest = find_checkpoints(stopped / "checkpoints")[0]
    for cut in (0, newest.stat().st_size - 1):
        folder = tmp_path / f"torn at {cut}"
        shutil.copytree(stopped, folder)
        torn = folder / "checkpoints" / newest.name
        torn.write_bytes(newest.read_bytes()[:cut])
        log = tmp_path / f"{cut}.log"
        said = complete(command, [*words, str(folder), "--resume"], log=log)
        assert re.search(rf"{newest.name}.* is damaged: .*; going on from the checkpoint", said)
        assert f"resuming at step {STOP - 1} of 18" in said
        assert differences(folder, whole) == [], f"cut to {cut} bytes"


def test_a_run_with_only_damaged_checkpoints_is_refused_and_kept(stopped, words, tmp_path):
    for path in find_checkpoints(stopped / "checkpoints"):
        path.write_bytes(flipped(path.read_bytes(), -100, 0))
    before = contents(stopped)
    line = refused([*words, str(stopped), "--resume"], tmp_path / "log")
    assert "every checkpoint is damaged" in line
    assert contents(stopped) == before


def on_a_disk(target: Callable[..., int], words: list[str], tmp_path: Path, *rest: int) -> str:
    """Run one of disks.py; answers with what was said."""
    place, log = tmp_path / "disk", tmp_path / "disk.log"
    for folder in (place, tmp_path / "kept"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    log.unlink(missing_ok=True)
    words = [*words, str(place / "run")]
    with Job(target, words, place, tmp_path / "kept", *rest, log=log) as job:
        codes = job.wait()
    if codes == [disks.CANNOT]:
        pytest.skip(f"no disk can be mounted here: {job.said()}")
    assert codes == [0], job.said()
    return job.said()


def assert_full_and_resumed(said: str, files: str, kept: Path, whole: Path) -> None:
    """One line for the full disk; and with room again, the end of the undisturbed run."""
    first, _ = said.split("-- resumed\n")
    full = rf"disk/run/(checkpoints/)?({files}) could not be written: the disk is full.*: free some"
    assert re.search(full, refusal(first)), refusal(first)
    assert json.loads((kept / "codes").read_text()) == [2, 0]
    assert not [*(kept / "stopped").rglob("*.tmp")]
    for path in find_checkpoints(kept / "stopped/checkpoints"):
        read_tensors(path)
    assert differences(kept / "ended", whole) == []


# before a step that leaves the first checkpoint, ends an epoch, is in the middle, is the last
@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "left"),
    [(5, 60_000), (0, 0), (0, 100_000), (8, 0), (11, 150_000), (17, 4096)],
)
def test_a_full_disk_stops_a_run_that_continues_when_there_is_room(
    whole, words, tmp_path, step, left
):
    files = r"step-\d+\.safetensors|model\.safetensors|config\.json|metrics\.jsonl"
    said = on_a_disk(disks.full, words, tmp_path, step, left, step)
    assert_full_and_resumed(said, files, tmp_path / "kept", whole)
    assert [path.name for path in find_checkpoints(tmp_path / "kept/stopped/checkpoints")] == [
        f"step-{number:08d}.safetensors" for number in (step, step - 1) if number > 0
    ]


@pytest.mark.slow
def test_a_disk_too_full_for_metrics_is_reported(tiny_config, tmp_path):
    # 36 steps and no checkpoint among them: the metrics are the first that need another page
    changes: dict[str, Any] = {"batch_size": 1, "mixup": 0, "cutmix": 0, "num_classes": 3}
    write_settings(tmp_path / "settings.yaml", tiny_config(**changes, epochs=1, warmup_epochs=0))
    words = ["train", "-c", str(tmp_path / "settings.yaml"), "--out"]
    complete(command, [*words, str(tmp_path / "whole")], log=tmp_path / "whole.log")
    said = on_a_disk(disks.full, words, tmp_path, 5, 0, 0)
    assert_full_and_resumed(said, r"metrics\.jsonl", tmp_path / "kept", tmp_path / "whole")


@pytest.mark.slow
def test_a_read_only_disk_is_refused_and_the_run_is_intact(whole, words, tmp_path):
    said = on_a_disk(disks.read_only, words, tmp_path, STOP - 1)
    _, resumed, rest = re.split("-- (?:resumed|another)\n", said)
    another, _ = rest.split("-- writable\n")
    for part in (resumed, another):
        assert re.search("cannot be written: .* is read-only", refusal(part))
    kept = tmp_path / "kept"
    assert json.loads((kept / "codes").read_text()) == [143, 2, 2, 0]
    assert [path.name for path in (kept / "stopped").iterdir()] == ["run"]
    assert differences(kept / "ended", whole) == []


@pytest.mark.slow
@pytest.mark.parametrize(("add", "remove"), [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("split", ["train", "val"])
def test_changed_images_are_refused_and_the_run_is_intact(
    stopped, own_data, tmp_path, split, add, remove
):
    added, removed = own_data / split / "red/new.png", own_data / split / "blue/2.png"
    before = contents(stopped)
    if add:
        shutil.copy(own_data / split / "red/0.png", added)
    if remove:
        removed.rename(tmp_path / "removed.png")
    try:
        line = refused(["train", "--out", str(stopped), "--resume"], tmp_path / "log")
    finally:
        added.unlink(missing_ok=True)
        if remove:
            (tmp_path / "removed.png").rename(removed)
    assert "the data set changed" in line
    assert contents(stopped) == before


def run_of(optimizer: type[torch.optim.Optimizer], groups: int = 2, **settings) -> Any:
    """A step of a network of two parameters, in one group of the optimiser or in two."""
    network = torch.nn.Linear(2, 2)
    members = [[*network.named_parameters()][place::groups] for place in range(groups)]
    named = [{"names": [n for n, _ in some], "params": [p for _, p in some]} for some in members]
    made = optimizer(named, lr=0.1, **settings)
    network(torch.ones(1, 2)).sum().backward()
    made.step()
    return SimpleNamespace(network=network, optimizer=made, average=None)


def write(run: Any, folder: Path) -> Path:
    rest = {"part": {}, "failed": {}, "data": {}, "scaler": None, "metrics_bytes": 0, "best": []}
    return write_checkpoint(folder, take_snapshot(run), CheckpointState(step=1, epoch=0, **rest))


def test_a_checkpoint_of_another_optimiser_is_refused(tmp_path):
    write(run_of(torch.optim.AdamW), tmp_path)
    message = r"of another optimiser: .* start again with --overw"
    for other in (run_of(torch.optim.AdamW, groups=1), run_of(torch.optim.SGD)):
        with pytest.raises(WeightsError, match=message):
            load_checkpoint(tmp_path, other, print)
    load_checkpoint(tmp_path, run_of(torch.optim.AdamW), print)


def test_a_run_goes_on_with_the_kernels_of_its_own_device(tmp_path):
    """A checkpoint of an older version names those of the device that it was written on."""
    run = run_of(torch.optim.AdamW, fused=True)
    path = write(run, tmp_path)
    tensors, metadata = read_tensors(path)
    state = json.loads(metadata["state"])
    assert not {"fused", "foreach"} & state["groups"][0].keys()
    state["groups"][0] |= {"fused": None, "foreach": True}
    write_tensors(path, tensors, {"state": json.dumps(state)})
    load_checkpoint(tmp_path, run, print)
    used = run.optimizer.param_groups[0]
    assert (used["fused"], used["foreach"]) == (True, None)
