"""`vit predict` and `vit evaluate` of captioners: every format, every flag, and what is refused."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.inference.captioners import SAID, write_captions
from vit.generation.generation_config import Search
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.text import printable

pytestmark = pytest.mark.auto_precision


@pytest.fixture
def input_images(input_images) -> list[str]:
    return input_images[:6]


def test_json_lines_equal_the_captions_of_the_predictor(vit, captioner, input_images, bad_images):
    images = [*input_images, bad_images[0]]
    code, out, err = vit("predict", captioner, *images, "--format", "jsonl")
    found = Predictor(captioner)(images)
    unended = [p.captions[0].ended for p in found if p.captions].count(False)
    assert 0 < unended < 6
    for line, told in zip(out, found, strict=True):
        record = json.loads(line)
        expected = {"image": told.image, "caption": told.caption, "score": told.score}
        if told.error is not None:
            expected = {"image": told.image, "error": told.error}
        elif not told.captions[0].ended:
            expected["ended"] = False
        assert record == expected
    assert code == 1
    assert err[0] == f"vit predict: {unended} of 6 captions cut off at the maximum length"
    assert "1 of 7 images failed" in err[1]
    assert len(err) == 2


def test_generation_flags_change_the_captions(vit, captioner, input_images):
    words = (*input_images, "--format", "jsonl", "--precision", "fp32")
    for flags, search in (
        (
            "--beams 3 --n-best 2 --length-penalty 0.5",
            Search(beams=3, n_best=2, length_penalty=0.5),
        ),
        (
            "--temperature 0.7 --top-p 0.9 --sample-top-k 20 --seed 5 --max-tokens 6",
            Search(temperature=0.7, top_p=0.9, top_k=20, seed=5, max_tokens=6),
        ),
        ("--repetition-penalty 2 --min-tokens 3", Search(repetition_penalty=2, min_tokens=3)),
    ):
        _, out, _ = vit("predict", captioner, *words, *flags.split())
        found = Predictor(captioner, search=search, precision="fp32")(input_images)
        rows = [json.loads(line) for line in out]
        assert [row["caption"] for row in rows] == [told.caption for told in found]
        assert [row["score"] for row in rows] == [told.score for told in found]
        for row, told in zip(rows, found, strict=True):
            assert ("captions" in row) == (search.n_best > 1)
            scored = [(caption["caption"], caption["score"]) for caption in row.get("captions", [])]
            if scored:
                assert scored == [(caption.text, caption.score) for caption in told.captions]


@pytest.mark.parametrize(
    ("name", "flags", "columns"),
    [
        ("captioner", "", "caption,score"),
        ("captioner", "--beams 2 --n-best 2", "caption_1,score_1,caption_2,score_2"),
        ("speaking", "-k 2", "label_1,score_1,label_2,score_2,caption,caption_score"),
        (
            "speaking",
            "-k 1 --beams 2 --n-best 2",
            "label_1,score_1,caption_1,caption_score_1,caption_2,caption_score_2",
        ),
    ],
)
def test_csv_has_a_column_for_each_caption_and_score(
    vit, request, input_images, bad_images, name, flags, columns
):
    model = request.getfixturevalue(name)
    images = [*input_images[:2], bad_images[0]]
    _, out, _ = vit(
        "predict", model, *images, "--format", "csv", "--csv-digits", "full", *flags.split()
    )
    header, *rows = csv.reader(out)
    assert header == ["image", *columns.split(","), "error"]
    assert len(set(header)) == len(header)
    best, scores = Search(beams=2, n_best=2) if "beams" in flags else None, []
    found = Predictor(model, search=best)(images, top_k=2 if "-k 2" in flags else 1)
    for row, told in zip(rows, found, strict=True):
        pairs = [*told.predictions, *((printable(c.text), c.score) for c in told.captions)]
        cells = [str(cell) for pair in pairs for cell in pair]
        blank = [""] * (len(header) - 2 - len(cells))
        assert row == [told.image, *cells, *blank, told.error or ""]
        scores += [told.score]
    assert scores[0] != scores[1]


def test_a_captioner_with_classes_outputs_captions_and_classes(vit, speaking, input_images):
    _, out, _ = vit("predict", speaking, input_images[0], "-k", 2, "--format", "jsonl")
    (told,) = Predictor(speaking)(input_images[:1], top_k=2)
    record = json.loads(out[0])
    assert record["caption"] == told.caption
    assert [row["label"] for row in record["predictions"]] == [x for x, _ in told.predictions]
    _, out, _ = vit("predict", speaking, input_images[0])
    assert out[0].split() == ["image", *["label", "score"] * 3, "caption", "caption_score"]
    assert printable(told.caption) in out[1]
    assert f"{told.score:.3f}" in out[1]


def test_the_table_shows_captions_on_one_line(vit, captioner, input_images, bad_images):
    _, out, _ = vit("predict", captioner, *input_images, bad_images[0])
    assert out[0].split() == ["image", "caption", "score"]
    for line, told in zip(out[1:-1], Predictor(captioner)(input_images), strict=True):
        assert line.split() == [told.image, *printable(told.caption).split(), f"{told.score:.3f}"]
    assert "error: " in out[-1]
    words = ("--beams", 2, "--n-best", 2)
    assert vit("predict", captioner, input_images[0], *words)[1][0].split()[1:] == [
        *("caption_1", "score_1", "caption_2", "score_2")
    ]


def test_explain_plots_the_words_of_captions(
    vit, refusal, captioner, input_images, bad_images, tmp_path
):
    words = (*input_images[:2], bad_images[0], "--format", "jsonl")
    plain = vit("predict", captioner, *words)
    drawn = vit("predict", captioner, *words, "--explain", tmp_path / "x")
    assert drawn == plain
    names = sorted(name for name in os.listdir(tmp_path / "x") if name[0] != ".")
    assert names == ["0001-0.json", "0001-0.png", "0002-1.json", "0002-1.png"]
    said = refusal("predict", captioner, *words, "--explain", tmp_path / "x")
    assert "has files; choose another folder, or add --overwrite" in said
    (tmp_path / "x" / "0001-0.png").write_text("old")
    assert vit("predict", captioner, *words, "--explain", tmp_path / "x", "--overwrite") == plain
    assert (tmp_path / "x" / "0001-0.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    assert vit("predict", captioner, *words, "--explain", tmp_path / "empty") == plain


@pytest.fixture
def data(tiny_data, tmp_path) -> Path:
    root = tmp_path / "data"
    shutil.copytree(tiny_data / "val", root)
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.*"))]
    write_captions(root, {name: [SAID[place % 5]] for place, name in enumerate(names)})
    return root


def test_evaluate_prints_and_writes_the_scores_of_the_function(vit, captioner, data, tmp_path):
    path = tmp_path / "scores.json"
    words = ("--beams", 2, "--max-tokens", 3, "--json", path)
    code, out, err = vit("evaluate", captioner, data, *words)
    assert code == 0
    notes: list[str] = []
    search = Search(beams=2, max_tokens=3)
    scores = evaluate(captioner, str(data), search=search, notify=notes.append)
    assert json.loads(path.read_text(encoding="utf-8")) == scores
    text = "\n".join(out)
    for name in ("loss", "loss_shuffled", "cider"):
        assert f"{scores[name]:.4f}" in text
    for name in ("bleu1", "bleu4", "rouge_l", "chrf", "exact"):
        assert f"{scores[name]:.2%}" in text
    assert printable(scores["examples"][0]["caption"]) in text
    assert scores["examples"][0]["reference"] in text
    assert err == [f"vit evaluate: {note}" for note in notes]
    code, out, _ = vit("evaluate", captioner, data / "metadata.jsonl", "--images", data)
    assert code == 0


def test_evaluate_prints_the_scores_of_captions_and_classes(vit, speaking, data):
    code, out, _ = vit("evaluate", speaking, data)
    assert code == 0
    text = "\n".join(out)
    assert "BLEU-4" in text
    assert "top-1" in text
    assert "weakest classes" in text


def test_a_network_without_embeddings_is_refused_without_a_flag_that_nobody_gave(
    vit, captioner, tiny_data, tmp_path
):
    words = (tiny_data / "val", "--weights", captioner)
    for command, *more in (("suggest", "-n", 2, "--out", tmp_path / "list.csv"), ("check",)):
        code, _, err = vit(command, *words, *more)
        assert code == 2
        assert err[-1].startswith(f"vit {command}: this network has no embeddings: ")
