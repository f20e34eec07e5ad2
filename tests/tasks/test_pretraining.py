"""Pretraining: a run without labels, exact after a cut, and fine-tuned after."""

import contextlib
import json
import math
import shutil

import numpy as np
import pytest
import torch

import vit
from tests.slow_cases import mostly_slow
from tests.training import children
from tests.training.runs import events
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.config.stored_config import stored_config
from vit.data.dataset_types import Splits
from vit.data.image_objects import to_rgb_image
from vit.data.multi_view import MultiViewTransform, ViewLayout
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.evaluation.feature_quality import (
    effective_rank,
    feature_spread,
    knn_accuracy,
    nearest_images,
)
from vit.inference.predictor import Predictor
from vit.model.projection_head import JointEmbedding
from vit.stop_signals import Interrupted
from vit.tasks import pretraining
from vit.tasks.task import get_task
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.checkpoint.run_folder import require_same_settings, write_config
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.convert import convert
from vit.weights.load_model import from_pretrained
from vit.weights.safetensors_io import read_tensors
from vit.weights.saved_model import load_run

METHODS = ("simclr", "lejepa", "dino", "mae")


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_without_classes_gives_a_run(pretrained, method):
    folder = pretrained[method]
    found = events(folder)
    assert [event["epoch"] for event in found] == [1, 2]
    for event in found:
        assert event["val_images"] == 11
        assert 1 <= event["val_rankme"] <= 16
        assert "val_knn" not in event
    run = load_run(folder)
    assert (run.task_name, run.classes, run.config.num_classes) == (method, (), 0)
    only, _ = read_tensors(folder / "pretraining.safetensors")
    assert {name.split(".")[0] for name in only} == {"decoder" if method == "mae" else "projector"}
    page = (folder / "report.html").read_text()
    assert "effective rank" in page
    assert ("What it predicts" in page) == (method == "mae")


@pytest.mark.parametrize("method", mostly_slow(METHODS, 4))
def test_a_cut_run_continues_to_the_same_bytes(pretrained, config_of, tmp_path, method):
    step = Trainer.after_step

    def cut(self, seen):
        step(self, seen)
        if self.run.step == 3:  # in the second epoch
            self.save_and_wait()
            raise Interrupted("stopped", 15)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "after_step", cut)
        train(config_of(method), tmp_path / "run")
    folder = train(config_of(method), tmp_path / "run", resume=True).folder
    for name in ("model.safetensors", "pretraining.safetensors"):
        assert (folder / name).read_bytes() == (pretrained[method] / name).read_bytes()
    times = {"images_per_second", "data_wait", "seconds"}
    for ours, theirs in zip(events(folder), events(pretrained[method]), strict=True):
        assert {n: v for n, v in ours.items() if n not in times} == {
            n: v for n, v in theirs.items() if n not in times
        }


@pytest.mark.parametrize(
    ("method", "refused"), [("simclr", True), ("lejepa", True), ("dino", True), ("mae", False)]
)
def test_a_run_whose_loss_compares_images_keeps_its_micro_batches(
    config_of, tmp_path, method, refused
):
    write_config(tmp_path, config_of(method, accumulate=1))
    one_line = pytest.raises(ConfigError, match=r"accumulate=2 differs from 1 in .*resumes with")
    with one_line if refused else contextlib.nullcontext():
        splits = Splits((), (), (), (), made=True, root=tmp_path)
        require_same_settings(config_of(method, accumulate=2), tmp_path, splits)


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("method", ["mae", pytest.param("lejepa", marks=pytest.mark.slow)])
def test_a_training_with_labels_goes_on_from_it(pretrained, colour_classes, tmp_path, method):
    settings = {"epochs": 1, "batch_size": 6, "precision": "fp32", "device": "cpu", "workers": 0}
    done = train(
        {"data": str(colour_classes), "weights": str(pretrained[method]), **settings},
        tmp_path / "run",
        report=False,
    )
    assert done.classes == ("blue", "red")
    assert 0 < change(done.folder, pretrained[method]) < 0.02
    assert not (done.folder / "pretraining.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("many", [True, False])
def test_the_number_of_labels_chooses_how_training_goes_on(
    pretrained, colour_classes, tmp_path, monkeypatch, capsys, many
):
    monkeypatch.setattr("vit.training.plan_weights.MANY_LABELS", 10 if many else 100)
    words = [str(colour_classes), "--weights", str(pretrained["mae"]), "--epochs", "8"]
    words += ["--precision", "fp32", "--device", "cpu"]
    saved = str(tmp_path / "plan.yaml")
    assert main(["plan", *words, "--save", saved]) == 0
    printed = capsys.readouterr().out
    assert "dim" in printed
    assert "as pretrained" in printed
    assert ("12 labels are enough" in printed) == many
    words += ["-j", "0", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    assert ("12 labels are few: a probe" in capsys.readouterr().err) != many
    config = stored_config(tmp_path / "run")
    assert config.finetune.method == "full"
    assert config.finetune.probe_first is not many
    training = config.training
    assert (training.optimizer == "muon") == many
    assert (training.layer_decay, training.smoothing) == ((1.0, 0.1) if many else (0.75, 0.0))
    assert config.model.dim == 16
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert main(["train", *words, "--resume"]) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    assert main(["train", "-c", saved, "-j", "0", "--out", str(tmp_path / "saved")]) == 0
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("known_speed")
def test_a_small_batch_of_few_labels_divides_by_copies_and_parts(
    pretrained, colour_classes, tmp_path, capsys
):
    words = [str(colour_classes), "--weights", str(pretrained["mae"]), "--epochs", "1"]
    words += ["--precision", "fp32", "--device", "cpu", "-j", "0", "--report", "fast"]
    words += ["--repeats", "2", "--accumulate", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    assert stored_config(tmp_path / "run").data.batch_size == 12


@pytest.mark.usefixtures("known_speed")
def test_what_a_run_of_pretraining_leaves_to_plan(pretrained, colour_classes):
    weights = str(pretrained["mae"])
    for settings in ({"method": "linear"}, {"task": "multilabel"}, {"task": "simclr"}):
        with pytest.raises(ConfigError, match="a run of vit pretrain, and images of one class"):
            vit.plan(str(colour_classes), weights=weights, precision="fp32", **settings)
    given = {"time": None, "weights": None, "precision": "fp32", "device": "cpu"}
    _, plan = vit.plan(str(colour_classes), **given)
    assert "time" in plan.settings


def test_class_folders_give_a_knn_accuracy_and_nothing_else(
    config_of, colour_classes, tmp_path, capfd
):
    config = config_of("mae", data=str(colour_classes), epochs=1, batch_size=4)
    done = train(config, tmp_path / "run", report=False)
    assert 0 <= events(done.folder)[0]["val_knn"] <= 1
    largest = events(done.folder)[0]["val_largest"]
    assert largest == 0.5
    assert f"(largest class {largest:.2%})" in capfd.readouterr().err
    assert done.classes == ()


def test_only_images_whose_features_are_compared_are_encoded(config_of, tmp_path, monkeypatch):
    """SimCLR validates two whole views of each."""
    encoded, views, forward = [], [], pretraining.forward
    joint = JointEmbedding.forward

    def counted(run, images):
        encoded.append(len(images))
        return forward(run, images)

    def counted_views(network, images):
        if not network.training and not isinstance(images, torch.Tensor):
            views.append([len(each) for each in images])
        return joint(network, images)

    monkeypatch.setattr(pretraining, "forward", counted)
    monkeypatch.setattr(JointEmbedding, "forward", counted_views)
    monkeypatch.setattr(pretraining, "MOST_FEATURES", 4)
    chosen = len(pretraining.compared(range(11)))
    for method, changes in (("mae", {}), ("simclr", {"local_views": 2})):
        config = config_of(method, epochs=1, warmup_epochs=0.0, **changes)
        folder = train(config, tmp_path / method, report=False).folder
        assert events(folder)[0]["val_images"] == 11
        assert sum(encoded) == chosen
        encoded.clear()
    assert views == [[2 * chosen]]


@pytest.mark.parametrize(
    ("images", "shown"), [(0, 0), (1, 1), (2000, 2000), (2001, 1001), (3999, 2000), (4001, 1334)]
)
def test_at_most_2000_images_are_compared(images, shown):
    assert len(pretraining.compared(range(images))) == shown


def test_predictions_are_refused_and_embeddings_are_written(pretrained, tiny_pretraining_data):
    image = str(tiny_pretraining_data / "00.png")
    with pytest.raises(WeightsError, match=r"--embeddings FILE.*--weights"):
        Predictor(pretrained["mae"], device="cpu", precision="fp32")
    predictor = Predictor(pretrained["mae"], device="cpu", precision="fp32", embeddings=True)
    (found,) = predictor([image])
    assert len(found.embedding) == 16


def test_the_encoder_opens_in_timm(pretrained):
    timm = pytest.importorskip("timm")
    images = torch.randn(2, 3, 16, 16)
    for folder in pretrained.values():
        theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        ours = from_pretrained(folder, notify=None)
        torch.testing.assert_close(theirs(images), ours(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("mae", {"merge_tokens": 2}, "merge_tokens=2: task=mae puts each token back"),
        ("mae", {"pooling": "attention"}, "pooling=attention: task=mae trains no pooling"),
        ("mae", {"position": "relative"}, "position=relative: it needs the whole grid"),
        ("mae", {"patch_size": 16}, "^image_size=16: .* an image is one patch.* use 32 or more"),
        ("mae", {"start_image_size": 4}, "start_image_size=4: with patch_size=4 .* use 8 or more"),
        ("mae", {"stem": "conv", "stem_norm": "batchnorm"}, "statistics .* of single patches"),
        (
            "lejepa",
            {"local_views": 2, "local_crop": (0.3, 0.1)},
            "local_crop=.*first not the larger",
        ),
        ("lejepa", {"local_size": 6}, "local_size=6: must be a multiple of patch_size=4"),
        ("lejepa", {"position": "relative"}, "position=relative: task=lejepa embeds images of two"),
        ("simclr", {"repeats": 2}, "repeats=2: task=simclr would tell copies of an image apart"),
        ("simclr", {"batch_size": 1}, "batch_size=1: task=simclr tells an image from the others"),
        ("dino", {"repeats": 2}, "repeats=2: task=dino would count copies of an image as others"),
        ("dino", {"accumulate": 12}, "batch_size=12 in 12 parts: task=dino lets the images beside"),
        ("simclr", {"accumulate": 12}, "batch_size=12 in 12 parts: task=simclr tells an image"),
    ],
)
def test_networks_that_the_method_cannot_train_are_refused(
    config_of, tmp_path, method, settings, message
):
    with pytest.raises(ConfigError, match=message):
        train(config_of(method, **settings), tmp_path / "run")


SMALL = "--image-size 16 --patch-size 8 --dim 16 --depth 1 --num-heads 2 --batch-size 12"
WORDS = "--epochs 1 --warmup-epochs 0 --device cpu --precision fp32 -j 0"


def test_the_command_writes_a_run_and_continues_only_its_own_method(
    tiny_pretraining_data, tmp_path, capsys
):
    out = tmp_path / "run"
    words = ["pretrain", str(tiny_pretraining_data), "--method", "mae", "--out", str(out)]
    words += [*WORDS.split(), "--model", "vit_tiny_patch16_224", "--pooling", "mean"]
    assert main([*words, *SMALL.split()]) == 0
    assert f"now: vit train DATA --weights {out}" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["vit"]["task"] == "mae"
    assert main(["pretrain", "--resume", "--method", "lejepa", "--out", str(out)]) == 2
    assert "the settings have task=mae" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_chooses_the_network(tiny_pretraining_data, tmp_path, method, capsys):
    words = ["pretrain", str(tiny_pretraining_data), "--method", method]
    assert main([*words, "--out", str(tmp_path / "run"), *WORDS.split()]) == 0
    assert "note: planned" in capsys.readouterr().err
    config = load_run(tmp_path / "run").config
    assert config.final_norm == ("tokens" if method == "mae" else "auto")
    assert config.pooling == "mean"


@pytest.mark.slow
@pytest.mark.usefixtures("known_speed")
def test_a_saved_plan_has_the_momentum_of_the_teacher(tiny_pretraining_data, tmp_path):
    saved = str(tmp_path / "plan.yaml")
    words = [str(tiny_pretraining_data), "--task", "dino", *SMALL.split(), *WORDS.split()[:-2]]
    assert main(["plan", *words, "--save", saved]) == 0
    batch = ["--show-batch", str(tmp_path / "batch.png"), "-j", "0"]
    assert main(["pretrain", "-c", saved, *batch]) == 0


def test_views_are_cut_out_of_one_tensor():
    layout = ViewLayout(side=16, local_side=8, global_views=2, local_views=3)
    assert layout.image_size == (2 * 16 + 2 * 8, 16)
    image = to_rgb_image(np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8), "x")
    config = make_config({"task": "lejepa", "min_crop": 0.3}).augment
    preprocessing = Preprocessing(image_size=(16, 16))
    transform = MultiViewTransform(config, preprocessing, layout, (0.05, 0.3), fast_crop=True)
    torch.manual_seed(0)
    tensor = transform.apply(lambda _size: np.asarray(image))
    assert tensor.shape == (3, *layout.image_size)
    whole, local = layout.split(tensor[None])
    assert (whole.shape, local.shape) == ((2, 3, 16, 16), (3, 3, 8, 8))
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(whole[1], tensor[:, 16:32])
    assert torch.equal(local[2], tensor[:, 40:48, :8])
    assert all(view.any() for view in (*whole, *local))


def test_unlabelled_sources_are_read_as_they_are(tiny_pretraining_data, colour_classes, tmp_path):
    from vit.data.sources.dataset_spec import DatasetSpec
    from vit.data.sources.open_dataset import open_splits

    def opened(data):
        return open_splits(DatasetSpec(str(data), optional_labels=True), val_share=0.25, seed=0)

    plain = opened(tiny_pretraining_data)
    assert (len(plain.train), len(plain.val), plain.classes) == (27, 9, ())
    assert opened(colour_classes).classes == ("blue", "red")
    mixed = tmp_path / "mixed"
    shutil.copytree(colour_classes, mixed)
    shutil.copy(tiny_pretraining_data / "00.png", mixed / "loose.png")
    found = opened(mixed)
    assert (len(found.train) + len(found.val), found.classes) == (17, ())
    listed = tmp_path / "list.csv"
    names = "\n".join(str(path) for path in sorted(tiny_pretraining_data.iterdir()))
    listed.write_text(f"image\n{names}\n")
    found = open_splits(
        DatasetSpec(str(listed), optional_labels=True, allow_outside=True), val_share=0.25, seed=0
    )
    assert (len(found.train), found.classes) == (27, ())


def test_a_collapse_is_named_with_its_epoch_and_a_remedy(config_of):
    healthy = {"epoch": 2, "val_spread": 0.5, "val_centred_rank": 12.0}
    remedies = {"simclr": "--warmup-epochs", "lejepa": "--sigreg-weight", "mae": "--warmup-epochs"}
    remedies["dino"] = "--teacher-temperature"
    for method, flag in remedies.items():
        task, config = get_task(method), config_of(method, dim=64)
        assert task.warning(healthy, config) is None
        for change in ({"val_spread": 0.001}, {"val_centred_rank": 1.2}):
            line = task.warning({**healthy, **change}, config)
            assert "collapsed in epoch 2" in line
            assert "lower --lr" in line
            assert flag in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own", "planted"),
    [
        ("lejepa", {"sigreg_projections": 64}, {"sigreg_weight": 0.0}),
        ("dino", {"prototypes": 256, "ema": 0.95}, {"teacher_temperature": 0.3}),
    ],
)
def test_a_planted_collapse_is_named_in_its_first_epoch_and_healthy_runs_are_not(
    config_of, tmp_path, capsys, method, own, planted
):
    """A learning rate 30 times too large, and nothing against a collapse."""
    changes = {"data": "digits", "dim": 64, "lr": 2e-3, "batch_size": 64, "epochs": 1, **own}
    changes |= {"val_share": 0.2, "warmup_epochs": 0.3, "projector_hidden_dim": 128}
    changes |= {"local_views": 2, "projector_dim": 32}
    for seed in (0, 1):
        train(config_of(method, seed=seed, **changes), tmp_path / f"{seed}", report=False)
    assert "collapsed" not in capsys.readouterr().err
    config = config_of(method, **{**changes, **planted, "lr": 0.06})
    train(config, tmp_path / "planted", report=False)
    assert "the features have collapsed in epoch 1" in capsys.readouterr().err


def test_rankme_and_knn_equal_what_is_written_down():
    torch.manual_seed(0)
    features = torch.randn(30, 5) @ torch.diag(torch.tensor([5.0, 3.0, 1.0, 0.1, 0.0]))
    shares = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = shares / shares.sum() + 1e-7
    assert effective_rank(features) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert effective_rank(torch.eye(7)) == pytest.approx(7, rel=1e-5)
    assert feature_spread(torch.ones(9, 3)) == pytest.approx(0, abs=1e-9)
    assert feature_spread(torch.eye(4)) == pytest.approx(math.sqrt(0.75))
    labels = torch.arange(40) % 2
    apart = torch.randn(40, 8) * 0.1 + labels[:, None] * torch.ones(8) * torch.tensor([1.0, -1] * 4)
    clear = apart + (1 - labels[:, None]) * torch.ones(8)
    assert knn_accuracy(clear, labels) == 1.0
    neighbours = sklearn_neighbours(clear.numpy())
    assert (nearest_images(clear, 3).numpy() == neighbours).all()


def sklearn_neighbours(features):
    """Three nearest others by cosine, by scikit-learn."""
    neighbors = pytest.importorskip("sklearn.neighbors")
    found = neighbors.NearestNeighbors(n_neighbors=4, metric="cosine").fit(features)
    return found.kneighbors(features, return_distance=False)[:, 1:]


def change(folder, source) -> float:
    """The largest one of a weight of the first block."""
    ours, theirs = (load_run(each).model.blocks[0].attn.qkv.weight for each in (folder, source))
    return float((ours - theirs).detach().abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_pretraining_goes_on_from_other_weights(pretrained, config_of, tmp_path, method):
    config = config_of(method, epochs=1, lr=1e-4, weights=str(pretrained[method]))
    assert 0 < change(train(config, tmp_path / "run").folder, pretrained[method]) < 0.01


@pytest.mark.slow
def test_an_encoder_is_converted_and_read_again(pretrained, config_of, tmp_path):
    changes = {"class_token": True, "pooling": "class_token", "epochs": 1}
    whole = train(config_of("mae", **changes), tmp_path / "whole", report=False).folder
    images = torch.randn(2, 3, 16, 16)
    for library, folder in (("timm", pretrained["lejepa"]), ("huggingface", whole)):
        convert(folder, library, tmp_path / library)
        ours, again = (from_pretrained(one, notify=None) for one in (folder, tmp_path / library))
        torch.testing.assert_close(again(images), ours(images), atol=1e-5, rtol=0)
    with pytest.raises(WeightsError, match="transformers cannot express this network"):
        convert(pretrained["mae"], "huggingface", tmp_path / "other")


def test_weights_whose_stem_mae_cannot_train_are_refused_as_such(config_of):
    config = config_of("mae", stem="conv", weights="run")
    with pytest.raises(ConfigError, match=r"^weights=run: its stem .* start without it$"):
        get_task("mae").complete(config)


def test_a_search_needs_classes(capsys):
    assert main(["tune", "digits", "--task", "mae", "--time", "60s"]) == 2
    assert "task=mae: a search compares classifiers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_agree_with_one(config_of, tmp_path, method, processes):
    config = config_of(method, precision="fp64", drop_path=0.0)
    train(config, tmp_path / "one", report=False)
    several = {"log": tmp_path / "log", "processes": processes}
    children.complete(children.train, config, tmp_path / "several", **several)
    one, found = (
        read_tensors(find_checkpoints(tmp_path / name / "checkpoints")[0])[0]
        for name in ("one", "several")
    )
    assert one.keys() == found.keys()
    for name, value in one.items():
        if name.startswith("model/"):
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=name)
