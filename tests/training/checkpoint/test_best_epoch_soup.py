"""The best epochs, their weights and their average (model soup), and early stopping."""

import itertools
import weakref

import pytest
import torch

from tests.training.runs import assert_equal_runs, events, read_events, read_report
from vit.errors import WeightsError
from vit.stop_signals import Interrupted
from vit.tasks.captioning import Captioning
from vit.tasks.classification import Classification
from vit.training.checkpoint.best_epoch_soup import BestEpochs, average_best_epochs
from vit.training.train import train
from vit.training.validation import Validation
from vit.weights.model_soup import average_weights
from vit.weights.safetensors_io import read_tensors
from vit.weights.saved_model import load_run

RANK = Classification().rank


def measured(top1):
    return Validation(21, {"val_loss": 1.0, "val_top1": top1}, 0)


def event(epoch: int, top1: float, loss: float = 1.0) -> dict:
    return {"event": "epoch", "epoch": epoch, "val_top1": top1, "val_loss": loss}


def test_the_best_epochs_are_kept_in_order(tmp_path):
    best = BestEpochs(tmp_path, 2, RANK)
    taken = [best.add(e) for e in (event(1, 0.5), event(2, 0.4), event(3, 0.4), event(4, 0.6))]
    assert taken == [True, True, False, True]  # of equal ones the earlier
    assert [e["epoch"] for e in best.events] == [4, 1]
    assert best.add(event(5, 0.6, loss=0.5))
    assert [e["epoch"] for e in best.events] == [5, 4]


def test_pruning_keeps_epochs_that_a_checkpoint_refers_to(tmp_path):
    best = BestEpochs(tmp_path, 2, RANK)
    for epoch in (1, 2, 3):
        best.save(epoch, {"a": torch.zeros(1)})
    best.prune([event(3, 0.1)], [event(1, 0.1)])
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == [
        "epoch-0001.safetensors",
        "epoch-0003.safetensors",
    ]
    with pytest.raises(WeightsError, match=r"epoch-0002\.safetensors is missing"):
        best.load(2)


def greedy(points: list[torch.Tensor], score) -> list[int]:
    """The recipe, written again without files or tensors by name."""
    order = sorted(range(len(points)), key=lambda i: (-score(points[i]), i))
    soup = [order[0]]
    for index in order[1:]:
        tried = torch.stack([points[i] for i in [*soup, index]]).mean(dim=0)
        if score(tried) >= score(torch.stack([points[i] for i in soup]).mean(dim=0)):
            soup.append(index)
    return sorted(soup)


@pytest.mark.parametrize("seed", range(20))
def test_the_soup_equals_the_greedy_recipe(tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)
    points = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(5)]

    def score(point: torch.Tensor) -> float:
        return 1 / (1 + float(point.square().sum()))

    best = BestEpochs(tmp_path, 5, RANK)
    for index, point in enumerate(points):
        best.save(index + 1, {"w": point})
        best.add(event(index + 1, score(point)))
    made = average_best_epochs(best, lambda weights: measured(score(weights["w"])))
    found, weights = made
    members = greedy(points, score)
    assert found["epochs"] == [index + 1 for index in members]
    if found["better"]:
        together = torch.stack([points[i] for i in members]).mean(dim=0)
        torch.testing.assert_close(weights["w"], together)
        assert found["val_top1"] > best.first["val_top1"]
    else:
        assert torch.equal(weights["w"], points[best.first["epoch"] - 1])


def made_of(tmp_path, scores: list[float], soups: dict[float, float]) -> tuple[dict, float]:
    """The soup of epochs whose one weight is their number; `soups` gives accuracy by weight."""
    best = BestEpochs(tmp_path, len(scores), RANK)
    for epoch, top1 in enumerate(scores, 1):
        best.save(epoch, {"w": torch.tensor([float(epoch)])})
        best.add(event(epoch, top1))
    found, weights = average_best_epochs(best, lambda w: measured(soups[float(w["w"])]))
    return found, float(weights["w"])


@pytest.mark.parametrize(
    ("scores", "soups", "epochs", "better", "weight"),
    [
        ([0.9, 0.8, 0.7], {1.5: 0.89, 2.0: 0.95}, [1, 3], True, 2.0),  # one lowers the score
        ([0.9, 0.8], {1.5: 0.9}, [1, 2], False, 1.0),  # no better than the best epoch
        ([0.8, 0.8, 0.8], {1.5: 0.9, 2.0: 0.9}, [1, 2, 3], True, 2.0),  # in their order
    ],
)
def test_members_of_a_soup(tmp_path, scores, soups, epochs, better, weight):
    found, made = made_of(tmp_path, scores, soups)
    assert (found["epochs"], found["better"], made) == (epochs, better, weight)


def test_a_soup_of_captions_of_few_images_is_ranked_by_loss_as_the_epochs_are(tmp_path):
    best = BestEpochs(tmp_path, 2, Captioning().rank)
    for epoch in (1, 2):
        best.save(epoch, {"w": torch.tensor([float(epoch)])})
        best.add({"epoch": epoch, "val_images": 21, "val_cider": 0.1, "val_loss": float(epoch)})
    worse = Validation(21, {"val_cider": 0.9, "val_loss": 1.5}, 0)
    found, weights = average_best_epochs(best, lambda _: worse)
    assert (found["epochs"], found["better"], float(weights["w"])) == ([1], False, 1.0)


def test_a_soup_holds_few_networks_at_a_time(tmp_path, monkeypatch):
    load, loaded, most = BestEpochs.load, weakref.WeakSet(), []

    def counted(self, epoch):
        most.append(len(loaded))  # the soup so far, and the one that was added before
        tensors = load(self, epoch)
        loaded.update(tensors.values())
        return tensors

    monkeypatch.setattr(BestEpochs, "load", counted)
    soups = {1.5: 0.9, 2.0: 0.91, 2.5: 0.92, 3.0: 0.93}
    found, weight = made_of(tmp_path, [0.8] * 5, soups)
    assert (found["epochs"], weight) == ([1, 2, 3, 4, 5], 3.0)
    assert max(most) <= 2


@pytest.mark.slow
def test_a_resumed_run_keeps_epochs_that_its_checkpoint_refers_to(tiny_config, tmp_path):
    """The first checkpoint after a resume may turn out damaged; then that one is used again."""
    config = tiny_config(epochs=6, keep_best=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit.training.trainer.validate", lambda run, *_: measured(run.step / 1000))
        patch.setattr("vit.training.trainer.Trainer.stopped_early", lambda s: s.epoch == 3)
        train(config, tmp_path / "run")
        patch.setattr("vit.training.trainer.Trainer.stopped_early", lambda s: s.epoch == 4)
        train(config, tmp_path / "run", resume=True)
    assert {path.name for path in (tmp_path / "run/best").iterdir()} == {
        f"epoch-{epoch:04d}.safetensors" for epoch in (2, 3, 4)
    }


def test_an_average_keeps_the_dtype_and_sums_in_float64():
    parts = [{"w": torch.full((2,), value, dtype=torch.bfloat16)} for value in (1.0, 256.0, 1.0)]
    mean = average_weights(parts)["w"]
    assert mean.dtype == torch.bfloat16
    assert torch.equal(mean, torch.full((2,), 86.0, dtype=torch.bfloat16))
    with pytest.raises(WeightsError, match="networks with other parameters have no mean"):
        average_weights([*parts, {"w": torch.zeros(3)}])


def test_a_run_keeps_its_best_epochs_and_averages_them(tiny_config, tmp_path, capsys):
    run = tmp_path / "run"
    result = train(tiny_config(epochs=6, keep_best=3, soup=True), run)
    last = read_events(run)[-1]
    assert last["event"] == "soup"
    assert "soup of epochs" in capsys.readouterr().err
    assert ("a soup, the average of epochs" in read_report(run)) is last["better"]
    expected = sorted(events(run), key=lambda e: (-e["val_top1"], e["val_loss"]))[:3]
    kept = {path.stem: path for path in (run / "best").iterdir()}
    assert {f"epoch-{event['epoch']:04d}" for event in expected} <= kept.keys()
    chosen = last["epochs"] if last["better"] else [expected[0]["epoch"]]
    members = [read_tensors(kept[f"epoch-{epoch:04d}"])[0] for epoch in chosen]
    answers = load_run(run).model.state_dict()
    for name, value in average_weights(members).items():
        assert torch.equal(answers[name], value)
    assert result.val_top1 == (last if last["better"] else expected[0])["val_top1"]


@pytest.mark.slow
def test_a_soup_after_an_interruption_is_the_same(tiny_config, tmp_path):
    config = tiny_config(epochs=5, keep_best=3, soup=True, patience=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole)

    def stop(self, event):
        raise Interrupted("now", 15)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("vit.training.logging.metrics_logger.MetricsLogger.soup", stop)
        train(config, parts)
    for _ in range(2):  # a finished run resumes to the same, too
        train(config, parts, resume=True)
        assert_equal_runs(parts, whole)


def test_a_run_stops_early_without_improvement(tiny_config, tmp_path, monkeypatch, capsys):
    scores, run = itertools.chain([0.5, 0.7], itertools.repeat(0.6)), tmp_path / "run"
    monkeypatch.setattr("vit.training.trainer.validate", lambda *_: measured(next(scores)))
    config = tiny_config(epochs=20, patience=3)
    assert train(config, run).epoch == 2
    assert len(events(run)) == 5
    assert "no better epoch in 3: stopping early" in capsys.readouterr().err
    train(config, run, resume=True)
    assert len(events(run)) == 5
