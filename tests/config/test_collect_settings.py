"""Settings of Python calls: DATA, a file, a dict or a Config, and settings by name."""

from pathlib import Path

import pytest

from vit.config.collect_settings import call_settings
from vit.config.setting_layers import make_config
from vit.errors import ConfigError
from vit.training.checkpoint.run_folder import write_config


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("data: photos\nlr: 1e-3\nepochs: 20\n")
    return path


def test_data_and_settings_by_name_are_settings():
    expected = {"data": "photos/", "epochs": 5, "image_size": 32}
    assert call_settings("photos/", {"epochs": 5, "img_size": 32}) == expected
    assert call_settings(Path("photos"), {}) == {"data": "photos"}
    assert call_settings(None, {"data": "photos"}) == {"data": "photos"}
    assert call_settings({"data": "photos"}, {"epochs": 5}) == {"data": "photos", "epochs": 5}


def test_a_file_has_the_settings_that_are_not_given(file):
    found = call_settings(str(file), {"epochs": 40})
    assert found == {"data": "photos", "lr": 0.001, "epochs": 40}
    assert found.origins == {"data": "file", "lr": "file", "epochs": "flag"}
    assert call_settings(file, {"data": "other"})["data"] == "other"


def test_a_flag_switches_off_what_depends_on_it_in_a_file(file):
    policy = "auto_augment: randaugment\nrandaugment_magnitude: 10\n"
    mixing = "mixup: 0.8\ncutmix: 1.0\nmix_probability: 0.5\ncutmix_share: 0.4\n"
    file.write_text(f"data: photos\n{policy}{mixing}min_crop: 0.5\ncrop_ratio: 1.5\n")
    for chosen, left_out in (
        ({}, set()),
        ({"auto_augment": "three"}, {"randaugment_magnitude"}),
        ({"mixup": 0.0}, {"cutmix_share"}),
        ({"mixup": 0.0, "cutmix": 0.0}, {"cutmix_share", "mix_probability"}),
        ({"min_crop": 1.0}, {"crop_ratio"}),
    ):
        found = call_settings(file, chosen)
        make_config(found)
        assert call_settings(file, {}).keys() - found.keys() == left_out
    with pytest.raises(ConfigError, match="randaugment_magnitude"):  # somebody chose both
        make_config(call_settings(file, {"aa": "three", "randaugment_magnitude": 12}))
    file.write_text("data: photos\nrandaugment_magnitude: 10\n")
    with pytest.raises(ConfigError, match="randaugment_magnitude"):
        make_config(call_settings(file, {}))


def test_a_run_of_another_version_is_repeated_without_settings_of_other_tasks(tmp_path):
    write_config(tmp_path, make_config({"data": "photos", "smoothing": 0.2}))
    path = tmp_path / "config.yaml"
    notes = []
    found = call_settings(str(path), {"lr": 1e-2}, notify=notes.append)
    assert (found["smoothing"], found["lr"], notes) == (0.2, 1e-2, [])
    make_config(found)
    text = path.read_text().replace("local_views: 0", "local_views: 4")
    path.write_text(text)
    found = call_settings(str(path), {}, notify=notes.append)
    assert "local_views" not in found
    make_config(found)
    assert notes == [f"note: {path}: not used by this training: local_views=4"]
    path.write_text(text.split("\n", 1)[1])  # a file of one's own
    with pytest.raises(ConfigError, match="local_views"):
        make_config(call_settings(str(path), {}))


@pytest.mark.parametrize(
    ("stored", "given", "kept", "note"),
    [
        ("weights: timm/x\n", {"weights": "auto"}, {"weights": "timm/x"}, ""),
        ("weights: timm/x\n", {"weights": "timm/y"}, {"weights": "timm/y"}, ""),
        ("", {"weights": "auto"}, {"weights": "auto"}, ""),
        ("steps: 1234\n", {"time": "2h"}, {"steps": 1234}, "its 1,234 steps"),
        ("", {"time": "2h"}, {}, "its length"),
        ("", {}, {}, ""),
    ],
)
def test_a_resumed_run_keeps_what_it_has_chosen(file, tmp_path, stored, given, kept, note):
    whole = {"data": "photos", "lr": 0.001, "epochs": 20}
    (tmp_path / "config.yaml").write_text(file.read_text() + stored)
    notes = []
    for data in ("photos", None):
        found = call_settings(data, given, out=tmp_path, resume=True, notify=notes.append)
        assert found == {**whole, **kept}
        assert found.complete
    assert notes == ([f"note: time=2h is not used: the run keeps {note}"] * 2 if note else [])


PLAN = "epochs: 30\nwarmup_epochs: 3\n"
TIMED = """
steps: 40
epochs: 4
schedule: wsd
warmup_epochs: 0.4
cooldown_epochs: 3
cooldown_shares: [0.5]
cooldown_steps: [10]
"""


@pytest.mark.parametrize(
    ("text", "flags", "expected", "left_out"),
    [
        (PLAN, {}, {"epochs": 30, "warmup_epochs": 3}, ""),
        (PLAN, {"epochs": 30}, {"epochs": 30, "warmup_epochs": 3}, ""),
        (PLAN, {"epochs": 2}, {"epochs": 2}, "warmup_epochs"),
        (PLAN, {"epochs": 5, "warmup_epochs": 2}, {"epochs": 5, "warmup_epochs": 2}, ""),
        ("warmup_epochs: 3", {"epochs": 40}, {"epochs": 40, "warmup_epochs": 3}, ""),
        (
            *(TIMED, {"steps": 20, "cooldown_epochs": 1}),
            {"steps": 20, "epochs": 4, "schedule": "wsd", "cooldown_epochs": 1},
            "cooldown_shares, cooldown_steps, warmup_epochs",
        ),
        (TIMED, {"time": "5m"}, {"time": "5m", "schedule": "wsd"}, ""),
    ],
)
def test_the_schedule_of_a_file_is_for_its_length(file, text, flags, expected, left_out):
    file.write_text(text)
    notes = []
    found = call_settings(file, {"data": "photos", **flags}, notify=notes.append)
    make_config(found)
    assert found == {"data": "photos", **expected}
    note = f"note: without the file's {left_out}: they are for another length"
    assert notes == ([note] if left_out else [])


def test_a_config_is_left_alone():
    config = make_config({"data": "photos"})
    assert call_settings(config, {}) is config


@pytest.mark.parametrize(
    ("first", "settings", "message"),
    [
        (5, {}, r"data=5 \(int\): give a folder, a list, a name, a dict or a Config"),
        (["photos"], {}, r"data=\['photos'\] \(list\): give a folder"),
        (b"photos", {}, r"data=b'photos' \(bytes\): give"),
        (None, {"epochs": 5}, "no data given"),
        ("photos", {"data": "other"}, "data is given twice"),
        ({"epochs": 3}, {"epochs": 5}, "epochs is given twice"),
        ("photos", {"epohcs": 5}, "epohcs is not a setting; did you mean epochs"),
        ("photos", {"epochs": "many"}, "epochs='many' is not a whole number"),
        (make_config({"data": "photos"}), {"epochs": 5}, "epochs: a Config is complete"),
        ("nope.yaml", {}, "nope.yaml: No such file"),
        ("empty.yaml", {}, "empty.yaml has no data: give data="),
    ],
)
def test_what_cannot_be_meant_is_one_line(first, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match=message) as error:
        call_settings(first, settings)
    assert "\n" not in str(error.value)
