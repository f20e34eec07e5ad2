"""`vit serve --watch`: what was answered is counted in a file that survives restarts."""

import asyncio
import json

import pytest

import vit
from tests.serving.conftest import running
from vit.commands.main import main
from vit.errors import ConfigError
from vit.serving import server_metrics
from vit.serving.server_metrics import WatchFile


@pytest.fixture
def run(reference_run):
    return reference_run


def test_answers_are_counted_over_restarts(run, files, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(server_metrics, "LINE_IMAGES", 10)
    file = tmp_path / "field.jsonl"
    with running([run], watch=str(file)) as client:
        assert client.get("/models").json["models"][0]["rejects"]
        client.send(files[:6])
        assert file.read_bytes() == b""
        client.send([*files[6:12], ("text.jpg", b"no image")])
        assert file.read_text().count("\n") == 1
        client.post(files[12][1])
    with file.open("a") as out:
        out.write('{"time": "half a')
    with running([run], watch=str(file)) as client:
        client.send(files[13:])
    first, second, half, third = file.read_text().splitlines()
    lines = [json.loads(one) for one in (first, second, third)]
    assert half == '{"time": "half a'
    assert [one["images"] for one in lines] == [12, 1, 14]
    # together they are the images of the calibration
    kept = json.loads((run / "reference.json").read_text())
    for name, count in kept["answers"].items():
        assert sum(one["answers"].get(name, 0) for one in lines) == count
    for one in lines:
        assert sum(one["scores"]) == sum(one["distances"]) == one["images"]
    found = vit.drift(run, file)
    assert (found.images, found.different) == (27, False)


def test_a_line_is_written_after_a_time(run, tmp_path, monkeypatch, files):
    monkeypatch.setattr(server_metrics, "LINE_SECONDS", 0.05)
    file = tmp_path / "field.jsonl"
    with running([run], watch=str(file)) as client:
        client.send(files[:2])

        async def written() -> None:
            while not file.read_bytes().endswith(b"}\n"):
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(written(), 10))
        assert json.loads(file.read_text())["images"] == 2


def test_what_cannot_be_watched_is_refused(run, distance_run, exported, tmp_path, capsys):
    file = str(tmp_path / "field.jsonl")
    for model in (distance_run, exported):
        with (
            pytest.raises(ConfigError, match="has no reference to compare images with: `vit cal"),
            running([model], watch=file),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="one model is watched"),
        running([f"a={run}", f"b={run}"], watch=file),
    ):
        pass
    assert main(["serve", str(run), "--watch", "field.csv"]) == 2
    assert "ends with .jsonl" in capsys.readouterr().err
    assert main(["serve", str(run), "--watch", file, "--engine", "ray"]) == 2
    assert "leave engine out" in capsys.readouterr().err
    missing = str(tmp_path / "none" / "field.jsonl")
    assert main(["serve", str(run), "--watch", missing]) == 2
    assert "create it first" in capsys.readouterr().err


def test_a_full_disk_is_a_note(tmp_path):
    notes = []
    watched = WatchFile(str(tmp_path / "field.jsonl"), notes.append)
    (tmp_path / "field.jsonl").unlink()
    (tmp_path / "field.jsonl").mkdir()

    class Reference:
        calibration = "digest"

        def count(self, rows):
            return {"answers": {"cat": len(rows)}}

    watched.reference, watched.rows = Reference(), ["an output"]
    watched.flush()
    (note,) = notes
    assert note.endswith("field.jsonl could not be written: Is a directory; 1 image not counted")
    assert watched.rows == []
