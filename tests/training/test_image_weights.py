"""A column of a list with the weight of each image in the loss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import vit
from tests.slow_cases import mostly_slow
from tests.training.runs import ON_CPU, SIZES, assert_equal_runs, events
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits
from vit.errors import ConfigError, DataError, VitError
from vit.training.distributed.devices import make_accelerator
from vit.training.setup import make_training
from vit.training.training_loaders import training_loader
from vit.training.training_loop import forward_losses

SETTINGS = {**SIZES, **ON_CPU, "epochs": 1, "warmup_epochs": 0, "lr": 3e-3, "smoothing": 0.1}


@pytest.fixture
def listed(colour_data, tmp_path):
    """Writes a list of the colours with a weight of each image; answers with its settings."""

    def write(weight=lambda _, number: 1 + number) -> dict[str, object]:
        rows = ["image,label,split,weight"]
        for split, count in (("train", 12), ("val", 7)):
            for colour in ("blue", "green", "red"):
                rows += [
                    f"{split}/{colour}/{n}.png,{colour},{split},{weight(colour, n)}"
                    for n in range(count)
                ]
        (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
        return {
            "data": str(tmp_path / "list.csv"),
            "images": str(colour_data),
            "group": None,
            **SETTINGS,
        }

    return write


def first_batch(settings):
    """The training, its first batch, which is all of the images, and its data."""
    config = make_config({**settings, "batch_size": 36, "num_classes": 3})
    splits = open_splits(DatasetSpec.from_config(config.data), val_share=0.2, seed=0)
    run = make_training(config, make_accelerator(config.run), 10, splits=splits)
    loader = training_loader(run, splits.train)
    batch = next(loader.epoch(0))
    loader.close()
    run.network.eval()
    torch.nn.init.normal_(run.network.head.weight, generator=torch.Generator().manual_seed(0))
    return run, batch, splits


def test_the_loss_is_that_of_a_list_with_each_image_as_often_as_it_weighs(listed):
    run, batch, splits = first_batch({**listed(), "weight_column": "weight"})
    loss = forward_losses(run, batch, 0, micro_batch=0)
    with torch.no_grad():
        logits = run.network(run.normalise(batch.images))
    each = F.cross_entropy(logits, batch.labels, label_smoothing=0.1, reduction="none")
    often = torch.tensor([1 + int(Path(splits.train[n].path).stem) for n in batch.indices])
    copies = each.repeat_interleave(often)
    assert len(copies) == 36 * 6.5
    torch.testing.assert_close(loss.squeeze() / 36, copies.mean())  # of a step of all images


def test_weights_of_one_change_nothing(listed, tmp_path):
    settings = {"mixup": 0.2, "cutmix": 1.0, "ema": 0.9}
    plain = make_config({**listed(lambda *_: 1), **settings})
    weighed = make_config({**listed(lambda *_: 1.0), **settings, "weight_column": "weight"})
    vit.train(plain, tmp_path / "plain", report=False)
    vit.train(weighed, tmp_path / "weighed", report=False)
    assert_equal_runs(tmp_path / "plain", tmp_path / "weighed")


@pytest.mark.parametrize(
    "settings",
    mostly_slow(
        [
            {},
            {"balance": "loss"},
            {"own": True},
            {"balance": "logit-adjust"},
            {"task": "multilabel"},
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("mixed", [{}, {"mixup": 1.0}])
def test_equal_weights_are_those_of_no_column_and_an_image_of_weight_0_is_not_learned(
    listed, settings, mixed
):
    own = settings == {"own": True}
    settings = {**listed(lambda *_: 5), **mixed, **({} if own else settings)}

    def loss_of(labels=None, weights=None):
        run, batch, _ = first_batch(settings)
        if own:
            code = vit.config.UserCode(loss=lambda x, y: F.cross_entropy(x, y, reduction="none"))
            run.config = replace(run.config, training=replace(run.config.training, smoothing=0.0))
            run.config = run.config.with_user_code(code)
        batch = batch._replace(weights=weights)
        batch = batch if labels is None else batch._replace(labels=labels(batch.labels.clone()))
        return forward_losses(run, batch, 0, micro_batch=0).item()

    def other_label_of_the_first(labels):
        labels[0] = labels[0].roll(1) if labels.ndim == 2 else (labels[0] + 1) % 3
        return labels

    assert loss_of(weights=torch.ones(36)) == pytest.approx(loss_of(), rel=1e-5)
    if settings.get("balance") == "loss":
        return  # the classes have other frequencies
    weights = torch.ones(36)
    weights[0] = 0
    one, other = (loss_of(labels, weights) for labels in (None, other_label_of_the_first))
    assert one == pytest.approx(other, rel=1e-6)
    assert loss_of() != pytest.approx(loss_of(other_label_of_the_first), rel=1e-4)


def test_numbers_are_weighed_too(listed, colour_data, tmp_path):
    rows = [f"train/red/{n}.png,{n},{n % 3}" for n in range(12)]
    (tmp_path / "numbers.csv").write_text("\n".join(["image,area,w", *rows]))
    data = {"data": str(tmp_path / "numbers.csv"), "images": str(colour_data), "group": None}
    settings = {**SETTINGS, **data, "task": "regression", "target": "area", "weight_column": "w"}
    settings |= {"batch_size": 8, "smoothing": 0.0, "epochs": 1}
    vit.train(make_config(settings), tmp_path / "run", report=False)
    assert events(tmp_path / "run", "step")[0]["loss"] > 0


@pytest.mark.parametrize(
    ("cell", "said"),
    [("", "no weight"), ("-1", "weight is '-1'"), ("heavy", "'heavy'"), ("inf", "'inf'")],
)
def test_a_cell_that_is_no_weight_is_refused_with_its_line(listed, tmp_path, cell, said):
    settings = listed(lambda colour, n: cell if (colour, n) == ("blue", 2) else 1)
    with pytest.raises(DataError, match=r"list\.csv, line 4: .*; expected a number of 0") as raised:
        vit.train(make_config({**settings, "weight_column": "weight"}), tmp_path / "run")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_column": "wieght"}, "weight_column=wieght: no such column among"),
        ({"task": "caption"}, "weight_column='weight': task=caption does not read it"),
        ({"weights": "x", "probe_first": True}, "probe_first=true does not read it"),
        ({"teacher": "x"}, "does not read it; teacher=none does"),
    ],
)
def test_what_knows_no_weights_is_refused(listed, tmp_path, settings, said):
    with pytest.raises(VitError, match=said):
        vit.train(
            make_config({**listed(), "weight_column": "weight", **settings}), tmp_path / "run"
        )


def test_a_folder_has_no_weights_and_all_of_them_may_not_be_0(listed, colour_data, tmp_path, capfd):
    words = ["train", str(colour_data), "--weight-column", "w", "--out", str(tmp_path / "run")]
    assert main([*words, "--precision", "fp32"]) == 2
    assert "weight_column='w': " in capfd.readouterr().err
    settings = {**listed(lambda *_: 0), "weight_column": "weight"}
    with pytest.raises(DataError, match="weight_column=weight: all training images weigh 0"):
        vit.train(make_config(settings), tmp_path / "run")


def test_a_run_is_not_resumed_with_other_weights(listed, tmp_path):
    settings = {**listed(), "weight_column": "weight"}
    folder: Path = vit.train(make_config(settings), tmp_path / "run", report=False).folder
    listed(lambda *_: 3)
    with pytest.raises(DataError, match="the data set changed since this run began"):
        vit.train(out=folder, resume=True)
    listed()
    vit.train(out=folder, resume=True)


def test_unread_weights_are_named_as_before(listed, tmp_path, capfd):
    vit.train(make_config({**listed(), "epochs": 1}), tmp_path / "run", report=False)
    assert "not used: weight" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="weight_column"):
        make_config({"data": "x", "weight_column": "w", "task": "simclr"})
