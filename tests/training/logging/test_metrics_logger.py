"""metrics.jsonl continues at its checkpoint; a run that waits for images has advice."""

import json

import pytest

from vit.config import DataConfig
from vit.errors import RunError
from vit.training.logging import metrics_logger
from vit.training.logging.metrics_logger import MetricsFile, data_wait_note
from vit.training.train import train


def test_metrics_truncated_to_a_checkpoint_have_no_gap(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for number in range(3):
        metrics.write({"event": "epoch", "epoch": number})
    size = metrics.size() // 3
    metrics.truncate(size)
    assert metrics.size() == size
    metrics.write({"event": "epoch", "epoch": 7})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 7]
    shorter = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="is shorter than"):
        shorter.truncate(10_000)
    shorter.close()


def event(share: float, seconds: float) -> dict[str, float]:
    return {"data_wait": share, "seconds": seconds}


def test_advice_about_slow_data_fits_the_settings():
    assert data_wait_note(event(0.1, 100), DataConfig()) is None
    assert data_wait_note(event(0.9, 1), DataConfig()) is None
    told = data_wait_note(event(0.4, 100), DataConfig())
    assert told is not None
    assert told.startswith("note: 40% of the epoch was spent waiting for images: --cache ram")
    for kind in ("disk", "ram", "device"):
        told = data_wait_note(event(0.4, 100), DataConfig(cache=kind))
        assert told is not None
        assert "--cache disk" not in told


def test_advice_about_slow_data_is_logged_once(tiny_config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics_logger, "MAX_WAIT_SHARE", -1.0)
    monkeypatch.setattr(metrics_logger, "MIN_WAIT_SECONDS", -1.0)
    train(tiny_config(epochs=2), tmp_path / "run")
    assert capsys.readouterr().err.count("waiting for images") == 1
