"""`vit convert` writes folders that timm and transformers open with our answers."""

import dataclasses
import json
import shutil

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from vit.commands.main import main
from vit.config import Config
from vit.inference.predictor import Predictor
from vit.weights.load_model import build_from_state, open_pretrained
from vit.weights.saved_model import load_run, save_model

FOREIGN = "is no folder that vit convert wrote"


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_network_converted_and_read_back_is_the_same(tiny_run, tmp_path, capsys, to):
    assert convert(tiny_run, "--to", to, "--out", tmp_path / "out") == 0
    said = capsys.readouterr()
    assert "parity on " in said.err
    assert "outputs differ by" in said.err
    assert "Loading weights" not in said.err  # no bars of transformers
    assert str(tmp_path / "out") in said.out
    ours, back = load_run(tiny_run), open_pretrained(tmp_path / "out")
    assert back.classes == ours.classes
    # a rounding away: transformers says to how many pixels an image is resized, not which share
    assert back.preprocessing is not None
    assert back.preprocessing.crop_share == pytest.approx(ours.preprocessing.crop_share, abs=0.05)
    state = ours.model.state_dict()
    assert state.keys() == back.state.keys()
    assert all(torch.equal(state[name], back.state[name]) for name in state)


def test_timm_opens_the_folder_with_its_class_names(tiny_run, tmp_path):
    convert(tiny_run, "--to", "timm", "--out", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == ["apple", "class10", "class2"]
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), load_run(tiny_run).model(images), atol=1e-4, rtol=0)


def test_a_transformers_pipeline_gives_the_same_predictions(tiny_run, tiny_data, tmp_path):
    out = tmp_path / "out"
    convert(tiny_run, "--to", "huggingface", "--out", out)
    processor = AutoImageProcessor.from_pretrained(out)
    classify = pipeline(
        "image-classification",
        model=AutoModelForImageClassification.from_pretrained(out),
        image_processor=processor,
    )
    input_images = [str(path) for path in sorted((tiny_data / "val").rglob("*.jpg"))]
    ours = Predictor(tiny_run, device="cpu", precision="fp32")(input_images)
    assert len(ours) > 9
    for mine, theirs in zip(ours, classify(input_images), strict=True):
        assert mine.predictions[0][0] == theirs[0]["label"]
        scores = {answer["label"]: answer["score"] for answer in theirs}
        assert dict(mine.predictions) == pytest.approx(scores, abs=0.01)


def test_the_model_card_describes_the_model(tiny_run, tmp_path):
    convert(tiny_run, "--to", "timm", "--out", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "apple, class10, class2" in card


@pytest.mark.parametrize(
    ("weights", "data", "base", "datasets"),
    [
        ("timm/vit_tiny.augreg@main", "photos/birds", "timm/vit_tiny.augreg", None),
        ("hf/facebook/deit", "hf:uoft-cs/cifar10:plain", "facebook/deit", ["uoft-cs/cifar10"]),
        ("runs/other", "digits", None, None),
    ],
)
def test_the_hub_reads_base_model_dataset_and_scores_of_the_card(
    weights, data, base, datasets, tiny_run, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "config.yaml").write_text(f"weights: {weights}\ndata: {data}\n")
    best = {"event": "epoch", "epoch": 1, "step": 5, "val_loss": 0.5, "val_top1": 0.875, "lr": 0.1}
    (run / "metrics.jsonl").write_text(json.dumps(best) + "\n")
    convert(run, "--to", "timm", "--out", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md").data
    assert (card.base_model, card.datasets) == (base, datasets)
    (score,) = card.eval_results
    assert (card.model_name, score.task_type) == ("out", "image-classification")
    assert (score.metric_type, score.metric_value) == ("accuracy", 0.875)
    assert score.dataset_name == data.split("/")[-1]
    assert score.dataset_type == (datasets or ["imagefolder"])[0]


def test_an_existing_folder_is_replaced_only_with_overwrite(refusal, tiny_run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("dear")
    words = ("convert", tiny_run, "--to", "timm", "--out", tmp_path / "mine")
    assert "exists" in refusal(*words)
    assert FOREIGN in refusal(*words, "--overwrite")
    assert (tmp_path / "mine/diary.txt").read_text() == "dear"
    assert convert(tiny_run, "--to", "timm", "--out", tmp_path / "out") == 0
    assert convert(tiny_run, "--to", "huggingface", "--out", tmp_path / "out", "--overwrite") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"]
    assert not list(tmp_path.glob(".*"))


def test_only_what_vit_convert_wrote_is_overwritten(refusal, tiny_run, tmp_path):
    run, theirs, ours = (tmp_path / name for name in ("run", "theirs", "ours"))
    onto = ("--to", "timm", "--overwrite", "--out")
    for folder in (run, theirs):
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tiny_run / name, folder)
    state = {name: tensor.clone() for name, tensor in load_run(run).model.state_dict().items()}
    save_file(state, theirs / "model.safetensors", {"format": "pt"})
    for folder in (run, theirs):
        assert FOREIGN in refusal("convert", tiny_run, *onto, folder)
    (run / "metrics.jsonl").write_text("")
    assert FOREIGN in refusal("convert", tiny_run, *onto, run)
    load_run(run)
    assert convert(tiny_run, "--to", "timm", "--out", ours) == 0
    for source in (ours, ours / "model.safetensors"):
        said = refusal("convert", source, *onto, ours)
        assert "holds the source, which is not overwritten" in said
    (tmp_path / "link").symlink_to(ours)
    assert FOREIGN in refusal("convert", tiny_run, *onto, tmp_path / "link")
    open_pretrained(ours)


def test_a_folder_is_not_replaced_by_one_that_answers_otherwise(
    tiny_run, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    assert convert(tiny_run, "--to", "timm", "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr("vit.weights.convert.OUTPUT_TOLERANCE", -1.0)
    for to in ("timm", "huggingface"):
        assert convert(tiny_run, "--to", to, "--out", out, "--overwrite") == 2
        assert f"{to} answers otherwise" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert convert(tiny_run, "--to", "timm", "--out", tmp_path / "new") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_offline_the_folder_is_written_and_the_error_names_the_upload_command(
    vit, tiny_run, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = tmp_path / "out"
    words = ("convert", tiny_run, "--to", "timm", "--out", out, "--push", "ada/pets")
    code, _, err = vit(*words)
    assert (code, "hf upload ada/pets" in err[-1]) == (2, True)
    assert (out / "model.safetensors").is_file()


def trained_with(run, folder, **settings):
    """A run folder of the same weights, trained with other `settings`."""
    loaded = load_run(run)
    config = dataclasses.replace(loaded.config, **settings)
    folder.mkdir()
    save_model(
        folder,
        build_from_state(config, loaded.model.state_dict()),
        config=Config(model=config),
        classes=loaded.classes,
        preprocessing=loaded.preprocessing,
    )
    (folder / "metrics.jsonl").write_text(
        '{"event": "epoch", "epoch": 1, "val_top1": 0.5, "val_loss": 1.0}\n'
    )
    return folder


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_run_with_token_merging_is_refused_with_a_remedy_that_works(
    tiny_run, tmp_path, capsys, to
):
    run, out = trained_with(tiny_run, tmp_path / "run", merge_tokens=1), tmp_path / "out"
    assert convert(run, "--to", to, "--out", out) == 2
    said = capsys.readouterr().err
    assert "merge_tokens=1; --merge-tokens 0 leaves merging out" in said
    assert len(said.splitlines()) == 1
    assert convert(run, "--to", to, "--out", out, "--merge-tokens", 0) == 0
    assert "note: without the merge_tokens=1 of its training" in capsys.readouterr().err
    state, back = load_run(tiny_run).model.state_dict(), open_pretrained(out)
    assert all(torch.equal(state[name], back.state[name]) for name in state)
    assert "Scores" not in (out / "README.md").read_text(encoding="utf-8")


def test_settings_that_the_other_library_lacks_are_notes(tiny_run, tmp_path, capsys):
    run = trained_with(tiny_run, tmp_path / "run", patch_sizes=(4,), patch_dropout=0.5)
    assert convert(run, "--to", "timm", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "note: patch_sizes=(4,) is not written" in said
    assert "note: patch_dropout=0.5 is not written" in said
    assert "Scores" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
