"""`vit suggest`: a list to fill in that training reads, its JSON, its page, its exit codes."""

import json
import shutil

from vit.commands.main import main
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits


def test_the_list_is_filled_in_and_read_by_training(tiny_data, tiny_run, tmp_path, capsys):
    data, out = str(tiny_data / "val"), tmp_path / "list.csv"
    words = ["suggest", data, "--weights", str(tiny_run), "--device", "cpu"]
    words += ["--precision", "fp32", "-j", "1", "-n", "12", "--out", str(out)]
    answer, page = tmp_path / "answer.json", tmp_path / "page.html"
    assert main([*words, "--json", str(answer), "--html", str(page)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "12 images of 27 suggested: typical of the images" in shown.err
    header, *rows = out.read_text().splitlines()
    assert header == "image,label,likely"
    told = json.loads(answer.read_text())
    assert [one["image"] for one in told["suggested"]] == [row.split(",")[0] for row in rows]
    assert (told["images"], told["order"], told["failed"]) == (27, "typical", [])
    text = page.read_text()
    assert text.count("<img") == 12
    assert rows[0].split(",")[0] in text

    labels = [f"{row.split(',')[0]},{'ab'[n % 2]}," for n, row in enumerate(rows[:10])]
    out.write_text("\n".join([header, *labels, *rows[10:]]) + "\n")
    splits = open_splits(DatasetSpec(data, label_list=str(out)), val_share=0.2, seed=0)
    assert splits.classes == ("a", "b")
    assert len(splits.train) + len(splits.val) == 10

    more = ["--out", str(tmp_path / "more.csv"), "--labels", str(out), "-n", "3"]
    capsys.readouterr()
    assert main([*words, *more]) == 0
    assert (
        f"more.csv written; fill in its column label, append it to {out}, "
        f"then vit train {data} --labels {out} --weights {tiny_run}" in capsys.readouterr().err
    )

    assert main(words) == 2  # the labels of an annotator are not replaced
    assert "exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert out.read_text().splitlines()[1] == labels[0]


def test_without_a_file_the_list_is_standard_output_and_broken_images_are_exit_code_1(
    tiny_data, tiny_run, tmp_path, capsys
):
    (tmp_path / "photos").mkdir()
    shutil.copy(tiny_data / "val/apple/0.png", tmp_path / "photos/whole.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"")
    words = ["suggest", str(tmp_path / "photos"), "--weights", str(tiny_run), "--device", "cpu"]
    assert main([*words, "--precision", "fp32", "-n", "1"]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["image,label,likely", "whole.png,,"]
    assert "vit suggest: left out broken.png: " in shown.err
