"""`vit check`: the contract of its JSON, its page, its exit codes."""

import json
import shutil
from pathlib import Path

import pytest

import vit
from vit.commands.main import main
from vit.data import image_io


def checked(data, folder, *words):
    answer, page = folder / "found.json", folder / "page.html"
    files = ["--json", str(answer), "--html", str(page), "--no-cache", "-j", "1"]
    code = main(["check", str(data), *files, *words])
    return code, json.loads(answer.read_text(encoding="utf-8")), page.read_text(encoding="utf-8")


def test_errors_give_exit_code_1_and_are_in_text_json_and_html(tiny_data, tmp_path, capsys):
    data = Path(shutil.copytree(tiny_data / "val", tmp_path / "data"))
    (data / "<script>alert(1)<x").mkdir()
    (data / "apple" / "0.png").write_bytes(b"")
    code, told, page = checked(data, tmp_path)
    assert code == 1
    assert told["images"] == 27
    assert told["classes"] == 3
    kinds = {problem["kind"]: problem for problem in told["problems"]}
    assert kinds["empty_file"]["image"] == str(data / "apple" / "0.png")
    assert kinds["empty_file"]["severity"] == kinds["empty_class"]["severity"] == "error"
    assert "apple/0.png" in page
    assert "<script>alert" not in page
    assert page.count("<script") == 1  # that of the page itself
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    out = capsys.readouterr().out
    assert "empty_file" in out
    assert "vit train stops at these errors; --on-bad-image skip leaves out unreadable" in out


def test_a_dataset_without_errors_gives_exit_code_0(tiny_data, tmp_path, capsys):
    code, told, _ = checked(tiny_data / "val", tmp_path)
    assert code == 0
    assert not told["severities"]["error"]
    assert "27 images" in capsys.readouterr().out


def test_the_limit_of_pixels_is_a_flag_whatever_was_checked_before(
    tiny_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_io, "_limit", [image_io.MAX_PIXELS])  # is set back after the test
    words = ["check", str(tiny_data / "val"), "-j", "1"]
    assert main(words) == 0
    assert main([*words, "--max-pixels", "50"]) == 1
    printed = capsys.readouterr().out
    assert "more than 50 pixels; raise --max-pixels" in printed
    assert "or make it smaller; vit train --tiles reads an 8-bit TIFF of any size" in printed
    suggest = ["suggest", str(tiny_data / "val"), "--weights", "missing", "--max-pixels", "50"]
    suggest += ["--precision", "fp32", "--device", "cpu"]
    assert main(suggest) == 2
    assert "--max-pixels" not in capsys.readouterr().err


@pytest.mark.auto_precision
def test_weights_add_a_check_of_features(tiny_run, tiny_data, tmp_path, capsys):
    words = ["--weights", str(tiny_run), "--device", "cpu"]
    code, told, _ = checked(tiny_data / "val", tmp_path, *words)
    assert code == 0
    assert told["images"] == 27
    # the network is not trained: its features cannot tell these classes, so nothing is suspected
    agreement = told["neighbour_agreement"]
    assert agreement < 0.6
    assert f"have the same label for {agreement:.1%}" in capsys.readouterr().out
    assert told["kinds"]["weak_features"] == 1
    assert "suspected_label" not in told["kinds"]


def test_images_of_one_folder_are_checked_by_a_list_of_labels(tiny_data, tmp_path, capsys):
    names = sorted(path for path in (tiny_data / "val").rglob("*.png"))[:12]
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, path in enumerate(names):
        (photos / f"{number}.png").write_bytes(path.read_bytes())
    lines = ["image,label", *(f"{n}.png,{'' if n > 9 else 'ab'[n % 2]}" for n in range(12))]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    assert main(["check", str(photos)]) == 1
    refused = capsys.readouterr().out
    assert "if a list has the labels of these images, add --labels LIST" in refused
    assert ": .\n" not in refused
    rows = [
        {
            "image": str(photos / f"{n}.png"),
            "label": "ab"[n % 2],
            "label_score": 0.1,
            "predictions": [{"label": "ba"[n % 2], "score": 0.9}],
        }
        for n in range(10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--labels", str(tmp_path / "list.csv"), "--rows", str(tmp_path / "rows.jsonl")]
    code, told, _ = checked(photos, tmp_path, *words)
    assert (code, told["images"]) == (0, 10)
    assert "the predictions agree with 0% of the labels, and 50%" in capsys.readouterr().err
    # a list that was edited is not replaced
    words = ["check", str(photos), *words, "--write-list", str(tmp_path / "suspects.csv")]
    assert main(words) == 0
    assert "all: --html FILE" in capsys.readouterr().out
    assert main(words) == 2
    assert "suspects.csv exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--html", str(tmp_path / "page.html")]) == 0
    captured = capsys.readouterr()
    assert "page.html written; open it in a browser" in captured.err
    assert "all: --html FILE" not in captured.out
    report = vit.check(str(photos), labels=str(tmp_path / "list.csv"))
    assert len(report.listing.images) == 10


def test_rows_of_other_images_are_refused(tiny_data, tmp_path, refusal):
    row = {"image": "other.png", "label": "apple", "label_score": 0.5, "predictions": []}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row))
    words = ("check", tiny_data, "--rows", rows)
    assert "none of its 1 image, such as other.png, is in the data" in refusal(*words)
    assert "give one of both" in refusal(*words, "--weights", "runs/x")
