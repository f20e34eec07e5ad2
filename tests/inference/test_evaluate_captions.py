"""evaluate of a captioner: the numbers of the training's validation, by hand, and what is said."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.inference.captioners import SAID, save_captioner, write_captions
from tests.markers import same_initial_weights
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


@pytest.fixture(scope="module")
def data(tiny_data, tmp_path_factory) -> Path:
    """27 images in class folders of train/ and val/, with one or two captions each."""
    root = tmp_path_factory.mktemp("captioned")
    for split in ("train", "val"):
        shutil.copytree(tiny_data / "val", root / split)
        paths = sorted((root / split).rglob("*.*"))
        names = [path.relative_to(root / split).as_posix() for path in paths]
        # most have the same first caption, which a short training learns
        firsts = [SAID[4] if n * n % 11 > 3 else "a dog on a red table" for n in range(len(names))]
        said = {name: [firsts[n], f"{SAID[4]} red"][: 1 + n % 2] for n, name in enumerate(names)}
        write_captions(root / split, said)
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("captioner"))


def images(data: Path) -> list[str]:
    return [str(path) for path in sorted((data / "val").rglob("*.*g"))]


def references(data: Path) -> list[tuple[str, ...]]:
    text = (data / "val" / "metadata.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    said = {str(data / "val" / row["file_name"]): tuple(row["captions"]) for row in rows}
    return [said[path] for path in images(data)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"search": Search(beams=3, max_tokens=4)}, {"keep_aspect": True}],
    ids=["greedy", "beams", "aspect"],
)
def test_the_scored_captions_are_those_of_the_predictor(run, data, settings):
    scores = evaluate(run, str(data), **settings, **PRECISE)
    found = Predictor(run, **settings, **PRECISE)(images(data))
    told = [prediction.caption for prediction in found]
    expected = caption_scores(told, references(data))
    assert scores.keys() == KEYS
    assert {name: scores[name] for name in expected} == expected
    whole = "keep_aspect" in settings
    assert (scores["loss"] != evaluate(run, str(data), **PRECISE)["loss"]) == whole
    assert (scores["count"], scores["failed"]) == (27, [])
    assert 0 < scores["chrf"] < 1
    for row in scores["examples"]:
        place = images(data).index(row["image"])
        assert row["caption"] == told[place]
        assert row["reference"] == references(data)[place][0]
    assert len({row["image"] for row in scores["examples"]}) == 5


def test_a_group_has_no_meaning_for_captions(run, data):
    with pytest.raises(ConfigError, match="group: intervals are those of classes, and this"):
        evaluate(run, str(data), group=r"(\d)\.", **PRECISE)


def test_intervals_of_classes_beside_captions_take_groups_as_independent(data, tmp_path):
    folder = save_captioner(tmp_path / "run", classes=CLASSES)
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    said = {Path(p).relative_to(copy / "val").as_posix(): SAID[:1] for p in images(copy)}
    said[min(said)] = ["a blue cat on a red dog on a blue table"]  # too long: the image is left out
    write_captions(copy / "val", said)
    scores = evaluate(folder, str(copy), group=r"(\d)\.", **PRECISE)
    kept = images(copy)[1:]
    found = Predictor(folder, **PRECISE)(kept)
    right = torch.tensor([p.predictions[0][0] == Path(p.image).parent.name for p in found])
    numbers = number_groups([Path(path).stem for path in kept])
    assert scores["groups"] == 9
    assert scores["top1_interval"] == share_interval(right, numbers)
    assert scores["top1_interval"] != share_interval(right, None)
    assert scores["slices"]


def test_a_page_is_refused_before_captions_are_written(run, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Predictor, "batches", lambda *_: pytest.fail("images are read"))
    words = ["--device", "cpu", "--precision", "fp32", "--html", str(tmp_path / "page.html")]
    assert main(["evaluate", str(run), str(data), *words]) == 2
    assert "html: pages show classifiers" in capsys.readouterr().err


@torch.no_grad()
def test_the_losses_equal_those_computed_directly(run, data):
    loaded = load_run(run)
    first = [texts[0] for texts in references(data)]
    alike = [sum(first[n] == first[n - by] for n in range(27)) for by in range(13, 21)]
    assert alike[0] > min(alike)  # half of the images away, more of them have the same caption
    sums = {0: [0.0, 0], 13 + alike.index(min(alike)): [0.0, 0]}
    for place, path in enumerate(images(data)):
        image = loaded.preprocessing(Image.open(path).convert("RGB"))
        memory = loaded.model.encode_images(loaded.preprocessing.normalise(image[None]))[1]
        for away, total in sums.items():
            caption = references(data)[(place + away) % 27][0]
            ids = [*loaded.tokenizer.encode([caption])[0], loaded.tokenizer.end]
            logits = loaded.model.decoder(torch.tensor([[loaded.tokenizer.begin, *ids]]), memory)
            loss = F.cross_entropy(logits[0, :-1], torch.tensor(ids), reduction="sum")
            total[0] += float(loss)
            total[1] += len(ids)
    scores = evaluate(run, str(data), **PRECISE)
    own, others = (loss / words for loss, words in sums.values())
    assert scores["loss"] == pytest.approx(own, rel=1e-5)
    assert scores["loss_shuffled"] == pytest.approx(others, rel=1e-5)
    assert own != pytest.approx(others, rel=1e-4)


@pytest.fixture(scope="module", params=["caption", "classify,caption"])
def trained(request, data, tmp_path_factory):
    """A short training, and the event of its best epoch."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 1, "num_heads": 2}
    settings = {
        "data": str(data),
        "task": request.param,
        "epochs": 12,
        "batch_size": 9,
        "lr": 2e-2,
        "decoder_depth": 1,
        "decoder_dropout": 0.0,
        "workers": 0,
        "device": "cpu",
    }
    train(make_config({**tiny, **settings, **PRECISE}), folder)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    if request.param == "caption":
        return folder, max(events, key=lambda e: (e["val_cider"], -e["val_loss"]))
    return folder, min(events, key=lambda e: e["val_loss"])


@same_initial_weights
def test_evaluation_reproduces_the_scores_of_the_training(trained, data):
    folder, event = trained
    scores = evaluate(folder, str(data), **PRECISE)
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


def test_classes_are_scored_as_for_a_classifier(tmp_path, data):
    folder = save_captioner(tmp_path, classes=CLASSES)
    scores = evaluate(folder, str(data), **PRECISE)
    assert scores.keys() == KEYS | CLASS_KEYS
    found = Predictor(folder, **PRECISE)(images(data))
    right = sum(p.predictions[0][0] == Path(p.image).parent.name for p in found)
    assert scores["top1"] == right / 27
    assert [row["label"] for row in scores["per_class"]] == list(CLASSES)


def test_a_decoder_that_ignores_the_images_gives_a_warning(run, data):
    loaded, notes = load_run(run), []
    with torch.no_grad():
        for block in loaded.model.decoder.blocks:
            block.cross_attn.proj.weight.zero_()
    scores = evaluate(loaded, str(data), notify=notes.append, **PRECISE)
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
def test_captions_without_an_end_token_give_a_note(run, data):
    notes: list[str] = []
    evaluate(run, str(data), notify=notes.append, search=Search(min_tokens=2, max_tokens=2))
    assert "27 of 27 captions cut off at the maximum length" in notes


def test_long_captions_are_left_out_of_the_loss_with_a_note(run, data, tmp_path):
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    said = {Path(p).relative_to(copy / "val").as_posix(): SAID[:1] for p in images(copy)}
    names, long = sorted(said), "a blue cat on a red dog on a blue table"
    said |= {names[0]: [long], names[1]: [long, SAID[1]], names[2]: [SAID[1], long]}
    write_captions(copy / "val", said)
    notes: list[str] = []
    scores = evaluate(run, str(copy), notify=notes.append, **PRECISE)
    assert scores["count"] == 26
    assert (
        "left 3 captions of more than 10 tokens out of the loss, and 1 image with no other" in notes
    )
    write_captions(copy / "val", {name: [long] for name in names})
    with pytest.raises(DataError, match="no caption has at most 10 tokens"):
        evaluate(run, str(copy), **PRECISE)


@pytest.mark.auto_precision
def test_unreadable_images_are_listed_and_not_counted(run, data, tmp_path):
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    lost = images(copy)[3]
    Path(lost).write_bytes(b"")
    scores = evaluate(run, str(copy), **PRECISE)
    assert scores["count"] == 26
    assert [row["image"] for row in scores["failed"]] == [lost]
    for path in images(copy):
        Path(path).write_bytes(b"")
    with pytest.raises(DataError, match="none of 27 images"):
        evaluate(run, str(copy))


def test_only_images_that_training_held_out_are_evaluated(run, data, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    alone = Path(shutil.copytree(data / "val", tmp_path / "alone"))
    held_out = ["apple/0.png", "class10/3.jpg", "class2/4.png"]
    record = {"root": str(alone.resolve()), "seed": 0, "val_share": 0.1, "val": held_out}
    (folder / "split.json").write_text(json.dumps(record))
    for place in (alone, alone / "metadata.jsonl"):
        scores = evaluate(folder, str(place), **PRECISE)
        assert scores["count"] == 3
        names = sorted(
            Path(row["image"]).relative_to(alone).as_posix() for row in scores["examples"]
        )
        assert names == held_out
    listed = tmp_path / "list.jsonl"
    shutil.move(alone / "metadata.jsonl", listed)
    assert evaluate(folder, str(listed), images=str(alone), **PRECISE)["count"] == 3


@pytest.mark.auto_precision
def test_generation_settings_are_refused_for_a_classifier(tiny_run, tiny_data):
    with pytest.raises(ConfigError, match=r"images='x': .* is not a list"):
        evaluate(tiny_run, str(tiny_data), images="x")
    with pytest.raises(ConfigError, match=r"beams=2: .*writes no captions"):
        evaluate(tiny_run, str(tiny_data), search=Search(beams=2))
