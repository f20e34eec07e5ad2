"""evaluate of a captioner: the numbers of the training's validation, by hand, and what is said."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.inference.answers import right_answers
from tests.inference.captioners import SAID, write_captions
from tests.markers import same_initial_weights
from tests.slow_cases import mostly_slow
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.errors import ConfigError, DataError
from vit.evaluation.caption_metrics import caption_scores
from vit.evaluation.intervals import number_groups, share_interval
from vit.generation.generation_config import Search
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.tasks.captioning import CaptionEvaluation
from vit.training.train import train
from vit.weights.saved_model import load_run

KEYS = {
    *("count", "loss", "loss_shuffled", "bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider"),
    *("chrf", "distinct", "exact", "examples", "failed"),
}
CLASS_KEYS = {
    *("top1", "top5", "top1_interval", "class_loss", "macro_f1", "balanced_accuracy", "ece"),
    *("nll", "brier", "ece_chance", "ece_debiased", "per_class"),
    *("nll_interval", "brier_interval", "balanced_accuracy_interval", "macro_f1_interval"),
    *("slices", "confusion"),
}
CLASSES = ("apple", "class10", "class2")
PRECISE = {"precision": "fp32"}


def images(data: Path) -> list[str]:
    return [str(path) for path in sorted((data / "val").rglob("*.*g"))]


def references(data: Path) -> list[tuple[str, ...]]:
    text = (data / "val" / "metadata.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    said = {str(data / "val" / row["file_name"]): tuple(row["captions"]) for row in rows}
    return [said[path] for path in images(data)]


@pytest.mark.parametrize(
    "settings",
    mostly_slow([{}, {"search": Search(beams=3, max_tokens=4)}, {"keep_aspect": True}]),
    ids=["greedy", "beams", "aspect"],
)
def test_the_scored_captions_are_those_of_the_predictor(captioner, captioned_data, settings):
    scores = evaluate(captioner, str(captioned_data), **settings, **PRECISE)
    found = Predictor(captioner, **settings, **PRECISE)(images(captioned_data))
    told = [prediction.caption for prediction in found]
    expected = caption_scores(told, references(captioned_data))
    assert scores.keys() == KEYS
    assert {name: scores[name] for name in expected} == expected
    whole = "keep_aspect" in settings
    assert (scores["loss"] != evaluate(captioner, str(captioned_data), **PRECISE)["loss"]) == whole
    assert (scores["count"], scores["failed"]) == (27, [])
    assert 0 < scores["chrf"] < 1
    for row in scores["examples"]:
        place = images(captioned_data).index(row["image"])
        assert row["caption"] == told[place]
        assert row["reference"] == references(captioned_data)[place][0]
    assert len({row["image"] for row in scores["examples"]}) == 5


def test_a_group_has_no_meaning_for_captions(captioner, captioned_data):
    with pytest.raises(ConfigError, match="group: intervals are those of classes, and this"):
        evaluate(captioner, str(captioned_data), group=r"(\d)\.", **PRECISE)


LONG = "a blue cat on a red dog on a blue table"


def caption_again(data: Path, folder: Path, *changed: list[str]) -> Path:
    """A copy of the images with one caption each, but for the first ones, `changed`."""
    copy = Path(shutil.copytree(data, folder / "data"))
    names = [Path(path).relative_to(copy / "val").as_posix() for path in images(copy)]
    said = [*changed, *[SAID[:1]] * (len(names) - len(changed))]
    write_captions(copy / "val", dict(zip(names, said, strict=True)))
    return copy


@pytest.mark.slow
def test_intervals_of_classes_beside_captions_take_groups_as_independent(
    captioned_data, run_of_both_heads, tmp_path
):
    copy = caption_again(captioned_data, tmp_path, [LONG])  # too long: the image is left out
    scores = evaluate(run_of_both_heads, str(copy), group=r"(\d)\.", **PRECISE)
    kept = images(copy)[1:]
    right = torch.tensor(right_answers(run_of_both_heads, kept))
    numbers = number_groups([Path(path).stem for path in kept])
    assert scores["groups"] == 9
    assert scores["top1_interval"] == share_interval(right, numbers)
    assert scores["top1_interval"] != share_interval(right, None)
    assert scores["slices"]


def test_a_page_is_refused_before_captions_are_written(
    captioner, captioned_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Predictor, "batches", lambda *_: pytest.fail("images are read"))
    words = ["--device", "cpu", "--precision", "fp32", "--html", str(tmp_path / "page.html")]
    assert main(["evaluate", str(captioner), str(captioned_data), *words]) == 2
    assert "html: pages show classifiers" in capsys.readouterr().err


@torch.no_grad()
def test_the_losses_equal_those_computed_directly(captioner, captioned_data):
    loaded = load_run(captioner)
    first = [texts[0] for texts in references(captioned_data)]
    alike = [sum(first[n] == first[n - by] for n in range(27)) for by in range(13, 21)]
    assert alike[0] > min(alike)  # half of the images away, more of them have the same caption
    sums = {0: [0.0, 0], 13 + alike.index(min(alike)): [0.0, 0]}
    for place, path in enumerate(images(captioned_data)):
        image = loaded.preprocessing(Image.open(path).convert("RGB"))
        memory = loaded.model.encode_images(loaded.preprocessing.normalise(image[None]))[1]
        for away, total in sums.items():
            caption = references(captioned_data)[(place + away) % 27][0]
            ids = [*loaded.tokenizer.encode([caption])[0], loaded.tokenizer.end]
            logits = loaded.model.decoder(torch.tensor([[loaded.tokenizer.begin, *ids]]), memory)
            loss = F.cross_entropy(logits[0, :-1], torch.tensor(ids), reduction="sum")
            total[0] += float(loss)
            total[1] += len(ids)
    scores = evaluate(captioner, str(captioned_data), **PRECISE)
    own, others = (loss / words for loss, words in sums.values())
    assert scores["loss"] == pytest.approx(own, rel=1e-5)
    assert scores["loss_shuffled"] == pytest.approx(others, rel=1e-5)
    assert own != pytest.approx(others, rel=1e-4)


@pytest.fixture(
    scope="module", params=[pytest.param("caption", marks=pytest.mark.slow), "classify,caption"]
)
def trained(request, captioned_data, tmp_path_factory):
    """A short training, and the event of its best epoch."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 1, "num_heads": 2}
    decoder = {"decoder_depth": 1, "decoder_dropout": 0.0}
    steps = {"epochs": 12, "batch_size": 9, "lr": 2e-2, "workers": 0, "device": "cpu"}
    settings = {"data": str(captioned_data), "task": request.param, **tiny, **decoder, **steps}
    train(make_config({**settings, **PRECISE}), folder)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    if request.param == "caption":
        return folder, max(events, key=lambda e: (e["val_cider"], -e["val_loss"]))
    return folder, min(events, key=lambda e: e["val_loss"])


@same_initial_weights
def test_evaluation_reproduces_the_scores_of_the_training(trained, captioned_data):
    folder, event = trained
    scores = evaluate(folder, str(captioned_data), **PRECISE)
    assert 0 < event["val_bleu4"] < 1
    assert 0 < event["val_exact"] < 1
    for name in ("bleu4", "rouge_l", "cider", "chrf", "distinct", "exact", "loss_shuffled"):
        assert scores[name] == pytest.approx(event[f"val_{name}"], rel=1e-5), name
    loss = event.get("val_caption_loss", event["val_loss"])
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    if "val_top1" in event:
        assert scores.keys() == KEYS | CLASS_KEYS
        assert scores["top1"] == event["val_top1"]
        both = scores["loss"] + scores["class_loss"]
        assert both == pytest.approx(event["val_loss"], rel=1e-5)


def test_a_decoder_that_ignores_the_images_gives_a_warning(captioner, captioned_data):
    loaded, notes = load_run(captioner), []
    with torch.no_grad():
        for block in loaded.model.decoder.blocks:
            block.cross_attn.proj.weight.zero_()
    scores = evaluate(loaded, str(captioned_data), notify=notes.append, **PRECISE)
    assert scores["loss"] == pytest.approx(scores["loss_shuffled"], rel=1e-6)
    assert any("warning: the decoder hardly uses the images" in note for note in notes)


@pytest.mark.parametrize(
    ("count", "shuffled", "exact", "warned"),
    [(9, 2.0, 0.5, 1), (9, 2.019, 0.5, 1), (9, 2.021, 0.5, 0), (1, 2.0, 0.5, 0), (9, 2.0, 1.0, 0)],
)
def test_the_warning_depends_on_a_margin_of_one_percent(count, shuffled, exact, warned):
    scores = {"count": count, "loss": 2.0, "loss_shuffled": shuffled, "exact": exact}
    assert len(CaptionEvaluation.notes(SimpleNamespace(unended=0), scores)) == warned


@pytest.mark.auto_precision
def test_captions_without_an_end_token_give_a_note(captioner, captioned_data):
    notes: list[str] = []
    search = Search(min_tokens=2, max_tokens=2)
    evaluate(captioner, str(captioned_data), notify=notes.append, search=search)
    assert "27 of 27 captions cut off at the maximum length" in notes


def test_long_captions_are_left_out_of_the_loss_with_a_note(captioner, captioned_data, tmp_path):
    some = [[LONG], [LONG, SAID[1]], [SAID[1], LONG]]
    copy = caption_again(captioned_data, tmp_path / "some", *some)
    notes: list[str] = []
    scores = evaluate(captioner, str(copy), notify=notes.append, **PRECISE)
    assert scores["count"] == 26
    told = "left 3 captions of more than 10 tokens out of the loss, and 1 image with no other"
    assert told in notes
    copy = caption_again(captioned_data, tmp_path / "all", *[[LONG]] * 27)
    with pytest.raises(DataError, match="no caption has at most 10 tokens"):
        evaluate(captioner, str(copy), **PRECISE)


def test_only_images_that_training_held_out_are_evaluated(captioner, captioned_data, tmp_path):
    """In a list beside them too; tests/inference/test_evaluate.py has the folder."""
    folder = Path(shutil.copytree(captioner, tmp_path / "run"))
    alone = Path(shutil.copytree(captioned_data / "val", tmp_path / "alone"))
    held_out = ["apple/0.png", "class10/3.jpg", "class2/4.png"]
    record = {"root": str(alone.resolve()), "seed": 0, "val_share": 0.1, "val": held_out}
    (folder / "split.json").write_text(json.dumps(record))
    scores = evaluate(folder, str(alone / "metadata.jsonl"), **PRECISE)
    names = sorted(Path(row["image"]).relative_to(alone).as_posix() for row in scores["examples"])
    assert (scores["count"], names) == (3, held_out)
    listed = tmp_path / "list.jsonl"
    shutil.move(alone / "metadata.jsonl", listed)
    assert evaluate(folder, str(listed), images=str(alone), **PRECISE)["count"] == 3


@pytest.mark.auto_precision
def test_generation_settings_are_refused_for_a_classifier(tiny_run, tiny_data):
    with pytest.raises(ConfigError, match=r"images='x': .* is not a list"):
        evaluate(tiny_run, str(tiny_data), images="x")
    with pytest.raises(ConfigError, match=r"beams=2: .*writes no captions"):
        evaluate(tiny_run, str(tiny_data), search=Search(beams=2))
