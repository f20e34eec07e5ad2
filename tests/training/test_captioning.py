"""Captions are learned by the loop that learns classes, with all that it promises."""

import dataclasses
import functools
import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoModel

from tests.training.children import complete, differences, seen, train
from tests.training.runs import SHORT, events
from vit.config.setting_layers import make_config, read_settings
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.tokenizer import train_tokenizer
from vit.data.dataset import ConstantTransform, ImageDataset
from vit.data.dataset_types import Sample
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import SampleKey
from vit.errors import BadImage, ConfigError, DataError
from vit.event_log import ranking_metric
from vit.inference.evaluate import evaluate
from vit.model.captioner import Captioner, caption_losses
from vit.tasks.captioning import Captioning, CaptioningWithClasses, is_chosen
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.settings_from_data import open_data
from vit.training.setup import decoder_weights
from vit.training.train import train as train_here
from vit.weights.convert import convert
from vit.weights.load_model import from_pretrained, open_pretrained
from vit.weights.safetensors_io import read_tensors
from vit.weights.saved_model import load_run

QUIET = {"dropout": 0, "drop_path": 0, "decoder_dropout": 0, "decoder_drop_path": 0}
QUIET |= {"caption_dropout": 0, "ema": 0}
FEW: dict[str, Any] = {**SHORT, "batch_size": 8}


@pytest.fixture(scope="module")
def learned(caption_config, tmp_path_factory):
    """A finished training of a captioner, which has learned; its folder is not to be written to."""
    config = caption_config(**QUIET, epochs=25, smoothing=0, min_crop=1, lr=1e-2)
    return train_here(config, tmp_path_factory.mktemp("learned") / "run")


def test_a_captioner_learns_to_say_what_it_sees(learned):
    last = events(learned.folder)[-1]
    assert last["val_exact"] == 1.0
    assert last["val_captioned"] == last["val_images"]
    assert last["val_loss_shuffled"] > 2 * last["val_loss"]
    assert learned.scores["exact"] == 1.0
    assert learned.val_top1 is None
    loaded = load_run(learned.folder)
    assert isinstance(loaded.model, Captioner)
    assert loaded.model.num_classes == 0
    assert loaded.tokenizer.encode(["a red thing"])


@pytest.mark.slow
def test_both_tasks_from_one_encoder(caption_config, tmp_path):
    config = caption_config(**QUIET, task="classify,caption", epochs=25, smoothing=0, lr=1e-2)
    result = train_here(config, tmp_path / "run")
    last = events(tmp_path / "run")[-1]
    assert result.val_top1 == 1.0
    assert last["val_exact"] > 0.6
    assert last["val_loss"] > last["val_caption_loss"]
    assert load_run(tmp_path / "run").classes == ("blue", "green", "red")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["caption", "classify,caption"])
def test_an_interrupted_run_ends_as_an_undisturbed_one(caption_config, tmp_path, task):
    config = caption_config(task=task, workers=2, checkpoint_steps=2)
    complete(train, config, tmp_path / "whole", log=tmp_path / "log")
    stops = itertools.count()
    for step in (2, 7):
        arguments = (config, tmp_path / "parts", next(stops) > 0, None, (step, 0))
        with pytest.raises(AssertionError, match=str(128 + signal.SIGTERM)):
            complete(train, *arguments, log=tmp_path / "log")
    complete(train, config, tmp_path / "parts", True, log=tmp_path / "log")
    assert differences(tmp_path / "parts", tmp_path / "whole") == []
    name = "tokenizer.json"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_two_processes_equal_one(caption_config, tmp_path):
    config = caption_config(**QUIET, precision="fp64", epochs=4, task="classify,caption")
    tensors = []
    for processes in (1, 2):
        place = tmp_path / str(processes)
        (place / "seen").mkdir(parents=True)
        given = (config, place / "run", False, place / "seen")
        complete(train, *given, log=place / "log", processes=processes)
        tensors.append(read_tensors(find_checkpoints(place / "run/checkpoints")[0])[0])
    one, two = (tmp_path / number for number in "12")
    assert seen(one / "seen") == seen(two / "seen")
    for mine, theirs in zip(events(two / "run"), events(one / "run"), strict=True):
        for name in ("train_loss", "val_loss", "val_loss_shuffled", "val_caption_loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-9)
        for name in ("val_top1", "val_bleu4", "val_cider", "val_exact", "val_distinct"):
            assert mine[name] == theirs[name]
    weights = [name for name in tensors[0] if name.startswith("model/")]
    assert any("decoder" in name for name in weights)
    for name in weights:
        torch.testing.assert_close(tensors[1][name], tensors[0][name], atol=1e-10, rtol=0)


@pytest.mark.slow
def test_micro_batches_equal_a_whole_batch(caption_config, tmp_path):
    for parts in (1, 3):
        config = caption_config(**QUIET, precision="fp64", accumulate=parts)
        train_here(config, tmp_path / str(parts))
    losses = [[e["train_loss"] for e in events(tmp_path / name)] for name in "13"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.fixture
def words(caption_data):
    samples = [
        Sample(str(caption_data / f"train/red/{number}.png"), 0, (f"{number} one", f"{number} two"))
        for number in range(5)
    ]
    tokenizer = train_tokenizer([c for s in samples for c in s.captions])
    ids = CaptionIds([s.captions for s in samples], tokenizer, 64)
    prepared = ConstantTransform(Preprocessing.from_config(make_config({}).data, 16))
    return samples, tokenizer, functools.partial(ImageDataset, samples, prepared, caption_ids=ids)


def spoken(tokenizer, rows) -> list[str]:
    return [tokenizer.decode(row.tolist()) for row in rows]


def test_an_epoch_draws_a_caption_by_its_counters(words):
    samples, tokenizer, dataset = words
    drawn = []
    for epoch in range(20):
        keys = [SampleKey(epoch, sample, 0, pass_index=epoch) for sample in range(5)]
        said = spoken(tokenizer, dataset(seed=3).__getitems__(keys).caption_ids)
        assert all(text in sample.captions for text, sample in zip(said, samples, strict=True))
        again = dataset(seed=3).__getitems__(keys[::-1])
        assert spoken(tokenizer, again.caption_ids) == said[::-1]
        assert again.mismatched_ids is None
        drawn.append(said)
    assert len({tuple(said) for said in drawn}) > 10
    twos = sum(text.endswith("two") for said in drawn for text in said)
    assert 30 < twos < 70


def test_validation_pairs_each_caption_once_with_another_image(words):
    _, tokenizer, dataset = words
    batch = dataset().__getitems__([SampleKey(0, sample, 0) for sample in range(5)])
    assert spoken(tokenizer, batch.caption_ids) == [f"{number} one" for number in range(5)]
    own, others = spoken(tokenizer, batch.caption_ids), spoken(tokenizer, batch.mismatched_ids)
    assert sorted(others) == sorted(own)
    assert all(mine != other for mine, other in zip(own, others, strict=True))


def test_the_loss_is_that_of_the_words_alone():
    torch.manual_seed(0)
    pad, words = 7, torch.tensor([[1, 2, 3, 4], [1, 5, 7, 7]])
    logits = torch.randn(2, 3, 8, dtype=torch.float64)
    summed, count = (part.sum() for part in caption_losses(logits, words, pad))
    chosen = [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 5)]
    by_hand = -sum(F.log_softmax(logits[row, place], 0)[word] for row, place, word in chosen)
    torch.testing.assert_close(summed, by_hand)
    assert count == 4
    longer = F.pad(words, (0, 2), value=pad)
    wide = torch.cat([logits, torch.randn(2, 2, 8, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(
        caption_losses(wide, longer, pad, smoothing=0.1)[0],
        caption_losses(logits, words, pad, smoothing=0.1)[0],
    )


@pytest.mark.slow
def test_a_frozen_encoder_stays_and_a_slow_one_is_slow(caption_config, colour_run, tmp_path):
    def moved(**changes: Any) -> dict[str, float]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        config = caption_config(**{**QUIET, "weights": str(colour_run), **changes})
        train_here(config, out)
        after = load_run(out).model.state_dict()
        before = load_run(colour_run).model.state_dict()
        return {
            name: float((after[name] - tensor).abs().max())
            for name, tensor in before.items()
            if name in after
        }

    frozen = moved(method="linear", **SHORT)
    assert len(frozen) > 20
    assert set(frozen.values()) == {0.0}
    slow = moved(encoder_lr=1e-6, **SHORT, optimizer="adamw")
    assert 0 < max(slow.values()) < 1e-4
    fast = moved(encoder_lr=1e-3, **SHORT, optimizer="adamw")
    assert max(fast.values()) > 1e-4


@pytest.fixture(scope="module")
def colour_run(tmp_path_factory, caption_data, tiny_config) -> Path:
    """A classifier of the colours, whose pooling norms what it pooled."""
    out = tmp_path_factory.mktemp("run") / "classes"
    return train_here(tiny_config(**SHORT, data=str(caption_data), pooling="mean"), out).folder


@pytest.mark.slow
def test_a_captioner_goes_on_from_a_captioner_and_becomes_a_classifier(
    learned, caption_config, tmp_path, capsys
):
    first = learned.folder
    train_here(caption_config(**SHORT, weights=str(first)), tmp_path / "more")
    assert "decoder initialised from the pretrained weights" in capsys.readouterr().err
    tokenizers = [(run / "tokenizer.json").read_bytes() for run in (first, tmp_path / "more")]
    assert tokenizers[0] == tokenizers[1]
    words = tmp_path / "words.json"
    words.write_text(train_tokenizer(["other words", "other words"]).to_json(), encoding="utf-8")
    other = caption_config(**SHORT, weights=str(first), tokenizer=str(words))
    train_here(other, tmp_path / "other")
    assert "decoder reinitialised" in capsys.readouterr().err
    unread = {"decoder_depth": 4, "decoder_drop_path": 0, "caption_dropout": 0}
    photos = {"hflip": 0.5, "min_crop": 0.08, "method": "full", "probe_first": False}
    classify = caption_config(**SHORT, task="classify", weights=str(first), **unread, **photos)
    assert train_here(classify, tmp_path / "classes").val_top1 is not None


def test_the_encoder_of_a_captioner_opens_in_other_libraries(learned, tmp_path):
    run, images = learned.folder, torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        _, memory = load_run(run).model.encode_images(images)
    _, lines = convert(run, "timm", tmp_path / "timm")
    assert "note: only the encoder is written: the decoder has no place in that folder" in lines
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), memory, atol=1e-5, rtol=0)
    convert(run, "huggingface", tmp_path / "hf")
    model = AutoModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found = model(images, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(found, memory, atol=1e-5, rtol=0)


def test_from_pretrained_gives_the_captioner_or_its_encoder(learned):
    run = learned.folder
    whole = from_pretrained(run, notify=None)
    assert isinstance(whole, Captioner)
    images, ids = torch.randn(2, 3, 16, 16), torch.tensor([[1, 2], [1, 3]])
    expected = load_run(run).model(images, ids)
    torch.testing.assert_close(whole(images, ids).caption_logits, expected.caption_logits)
    said = []
    classifier = from_pretrained(run, num_classes=5, notify=said.append)
    assert classifier(images).shape == (2, 5)
    assert "left out: the decoder, since classes were given" in said


@pytest.mark.slow
def test_a_finished_run_on_a_captioner_is_repeated_by_its_own_settings(
    learned, caption_config, tmp_path
):
    more = caption_config(**SHORT, weights=str(learned.folder), seed=3)
    train_here(more, tmp_path / "more")
    stored = read_settings(tmp_path / "more/config.yaml")
    train_here(make_config(stored), tmp_path / "again")
    for name in ("tokenizer.json", "model.safetensors"):
        whole = (tmp_path / "more" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == whole, name


def test_weights_of_a_decoder_are_not_taken_for_other_words(learned, caption_config):
    source = open_pretrained(learned.folder)
    assert source.decoder is not None
    texts = [f"altogether different sentences of many letters {n}" for n in range(24)]
    size = source.decoder.tokenizer.size
    other = train_tokenizer(texts, vocab_size=size)
    assert other.size == size
    config = dataclasses.replace(caption_config(), decoder=source.decoder.config)
    said: list[str] = []
    assert decoder_weights(source, config, other, said.append) == {}
    assert "decoder reinitialised" in said[0]
    kept = decoder_weights(source, config, source.decoder.tokenizer, said.append)
    assert len(kept) == len(source.decoder.state) > 20


def test_whole_micro_batches_that_cannot_be_read_are_left_out(caption_config, list_of, tmp_path):
    data = list_of([["a thing"]] * 16)
    config = caption_config(
        **FEW, accumulate=8, data=str(data), on_bad_image="skip", val_share=0.25
    )
    held = {path.name for path in data.glob("*.png")}
    held &= {Path(sample.path).name for sample in open_data(config).val}
    damaged = [path for path in sorted(data.glob("*.png")) if path.name not in held][:9]
    for path in damaged:
        content = bytearray(path.read_bytes())
        at = content.index(b"IDAT") + 6
        content[at : at + 4] = b"xxxx"
        path.write_bytes(content)
    result = train_here(config, tmp_path / "run")
    assert 0 < len(result.failed) <= 9


@pytest.mark.slow
def test_experts_in_the_decoder_are_balanced_too(caption_config, tmp_path):
    config = caption_config(
        feedforward="moe", decoder_feedforward="moe", num_experts=3, moe_every=1, epochs=2
    )
    train_here(config, tmp_path / "run")
    last = events(tmp_path / "run")[-1]
    blocks = [layer["block"] for layer in last["routers"]]
    assert blocks == [1, 2, "decoder 1", "decoder 2"]
    assert all(sum(layer["load"]) == pytest.approx(1, abs=1e-3) for layer in last["routers"])
    assert events(tmp_path / "run", "step")[0]["balance_loss"] > 0


def test_an_encoder_learns_slower_than_what_was_chosen(caption_config, colour_run, tmp_path):
    train_here(caption_config(**SHORT, weights=str(colour_run), lr=1e-4), tmp_path / "run")
    stored = read_settings(tmp_path / "run/config.yaml")
    assert stored["encoder_lr"] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "probe", "weights": "x"}, "a probe fits one class an image"),
        ({"decoder_heads": 3}, "decoder_dim=16 does not split into 3 heads"),
        ({"decoder_feedforward": "moe"}, "choose both"),
        ({"pooling": "mean"}, "pooling=mean: task=caption alone has no head"),
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"tokenizer": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"caption_tokens": 3}, "caption_tokens=3: 72 of 72 training captions are longer"),
        ({"method": "linear", "encoder_lr": 1e-3}, r"encoder_lr=0\.001: method=linear does not re"),
    ],
)
def test_settings_that_captions_do_not_bear_are_refused(
    caption_config, colour_run, tmp_path, changes, said
):
    if changes.get("method") == "linear":
        changes = {**changes, "weights": str(colour_run)}
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        train_here(caption_config(**changes), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "model.safetensors").exists()


SCRIPTS = (
    *("một con mèo nhỏ màu đỏ", "一只红色的小猫", "قطة حمراء صغيرة", "लाल बिल्ली"),
    *("🐈‍⬛ 👍🏽 red", "แมวสีแดง", "кот, «рыжий»"),
)


@pytest.fixture
def list_of(tmp_path):
    """Writes images and a metadata.jsonl that says of each what it is given."""

    def write(said: list[Any]) -> Path:
        root = tmp_path / "list"
        root.mkdir()
        lines = []
        for number, captions in enumerate(said):
            colour = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
            Image.new("RGB", (18, 20), colour).save(root / f"{number:03d}.png")
            lines.append(json.dumps({"file_name": f"{number:03d}.png", "captions": captions}))
        (root / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return root

    return write


def test_captions_of_any_script_one_or_twenty_an_image(caption_config, list_of, tmp_path):
    many = [f"{SCRIPTS[number % 7]} {number}" for number in range(20)]
    data = list_of([[SCRIPTS[n % 7]] if n % 2 else many for n in range(24)])
    train_here(caption_config(**FEW, data=str(data)), tmp_path / "run")
    tokenizer = load_run(tmp_path / "run").tokenizer
    for text in SCRIPTS:
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    assert len(events(tmp_path / "run")) == 1


def test_empty_and_endless_captions_are_left_out_and_told(
    caption_config, list_of, tmp_path, capsys
):
    endless = " ".join(f"word{n}" for n in range(10_000))
    said = [["a red thing"]] * 20 + [["", "a thing"], [" "], [endless, "short"], [endless]]
    train_here(caption_config(**FEW, data=str(list_of(said))), tmp_path / "run")
    told = capsys.readouterr().err
    assert "2 captions, empty or repeated" in told
    assert "2 training captions and 0 of validation that are longer" in told or "1 training" in told
    assert load_run(tmp_path / "run").decoder.caption_tokens < 10
    train_here(caption_config(**SHORT, caption_tokens=6), tmp_path / "other")
    told = capsys.readouterr().err
    assert "left out 36 training captions and 21 of validation" in told
    assert "caption_tokens=6" in told


def test_an_image_of_the_list_that_is_missing(caption_config, list_of, tmp_path, capsys):
    data = list_of([["a thing"]] * 20)
    (data / "007.png").unlink()
    with pytest.raises(BadImage, match=r"007\.png.*--on-bad-image skip") as caught:
        train_here(caption_config(**FEW, data=str(data)), tmp_path / "run")
    assert "\n" not in str(caught.value)
    config = caption_config(**FEW, data=str(data), on_bad_image="skip")
    result = train_here(config, tmp_path / "run")
    assert [Path(name).name for name in result.failed] == ["007.png"]


@pytest.mark.slow
def test_held_out_images_are_known_whichever_folder_names_them(caption_config, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    rows = ["image,caption"]
    for number in range(20):
        Image.new("RGB", (18, 20), (number * 12, 9, 99)).save(photos / f"{number}.png")
        rows.append(f"{number}.png,a thing")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    data = {"data": str(tmp_path / "list.csv"), **FEW}
    for images, other in ((str(photos), None), (None, str(photos))):
        run = train_here(caption_config(**data, images=images), tmp_path / f"run {images is None}")
        for asked in (images, other):
            scores = evaluate(run.folder, data["data"], images=asked, precision="fp32")
            assert scores["count"] == 4, (images, asked)


def test_a_decoder_that_does_not_look_is_named_after_a_third_of_the_run():
    config = make_config({"task": "caption", "epochs": 9})
    seeing = {"epoch": 3, "val_loss": 1.0, "val_loss_shuffled": 1.5}
    blind = {**seeing, "val_loss_shuffled": 1.005}
    warning = Captioning().warning
    assert warning(seeing, config) is None
    for change in ({"epoch": 2}, {"val_images": 1}, {"val_exact": 1.0}):
        assert warning({**blind, **change}, config) is None
    assert warning({**blind, "val_exact": 0.9}, config) is not None
    note = warning(blind, config)
    assert "ignores the images" in note
    assert note.endswith(
        "start from a trained encoder with --weights SOURCE; hide words with --caption-dropout "
        "0.3; train longer with --epochs 18"
    )
    # what the run does already is no advice
    settings = {"task": "caption", "epochs": 9, "caption_dropout": 0.3, "weights": "runs/encoder"}
    note = warning(blind, make_config(settings))
    assert not re.search("--caption-dropout|--weights", note)
    assert note.endswith("; train longer with --epochs 18")
    both = {**seeing, "val_loss": 3.0, "val_caption_loss": 1.0}
    assert CaptioningWithClasses().warning(both, config) is None


def test_better_is_cider_then_loss_and_the_loss_alone_for_both_tasks():
    low = {"val_loss": 1.0, "val_cider": 0.5}
    rank = Captioning().rank
    assert rank({**low, "val_cider": 0.6, "val_loss": 2.0}) > rank(low)
    assert rank({**low, "val_loss": 0.9}) > rank(low)
    few = {**low, "val_images": 20}
    assert rank({**few, "val_loss": 0.9, "val_cider": 0.1}) > rank(few)
    few = {**low, "val_images": 5000, "val_captioned": 20}  # --caption-samples 20
    assert rank({**few, "val_loss": 0.9, "val_cider": 0.1}) > rank(few)
    assert ranking_metric(few) == "val_loss"
    assert ranking_metric({**few, "val_captioned": 100}) == "val_cider"
    both = {**low, "val_top1": 0.5}
    rank = CaptioningWithClasses().rank
    assert rank({**both, "val_loss": 0.9, "val_cider": 0.1}) > rank(both)


@pytest.mark.parametrize(("count", "most"), [(10, 3), (7, 7), (5, 9), (1, 1), (800, 400), (801, 2)])
def test_images_that_get_a_caption_are_evenly_spread(count, most):
    chosen = is_chosen(torch.arange(count), count, most).nonzero().flatten()
    assert len(chosen) == min(count, most)
    gaps = chosen.diff()
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1
