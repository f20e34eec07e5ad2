"""A head to start from: the best linear one on the features of the pretrained network.

Source: Kumar et al., "Fine-Tuning can Distort Pretrained Features", section 3, arXiv:2202.10054.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset_types import Sample, Splits
from vit.data.random_seed import random_seed
from vit.paths import user_cache
from vit.training.collectives import agreed_signal, on_main
from vit.training.feature_extraction import FeatureMaker, Features, extract, weights_digest
from vit.training.finetuning import as_saved
from vit.training.linear_probe import Probe, fit_probe, knn_accuracy, probe_summary
from vit.training.stop_signals import Interrupted
from vit.training.training_loop import TrainingState
from vit.training.training_progress import teller

# Images that are enough to choose a head from which everything is trained further.
ENOUGH = {"train": 20_000, "val": 5_000}
BATCH_SIZES = {"cpu": 16}

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Probed:
    """What the fit of a head to the training images came to.

    Args:
        loss: Mean cross-entropy on them, not smoothed.
        images: How many they are.
    """

    loss: float
    images: int


def start_from_probe(run: TrainingState, splits: Splits) -> Probed:
    """Fit a linear head to the features of a network, say how good it is, and make it the head.

    Args:
        run: What is trained, before its first step; its head is replaced, and that of its average.
        splits: The data.

    Raises:
        Interrupted: A signal came; the features made so far are kept.
    """
    config, notify = run.config, teller(run.accelerator)
    train, val = chosen(config, splits, notify)
    features = Extraction(run, notify)
    on_train, on_val = features(train), features(val)

    def fit() -> tuple[Probe, int, float]:
        seed = random_seed(config.training.seed, "probe")
        probe = fit_probe(on_train.values, on_train.labels, len(splits.classes), seed=seed)
        right = probe.correct(on_val.values, on_val.labels)
        return (
            probe,
            right,
            knn_accuracy(on_train.values, on_train.labels, on_val.values, on_val.labels),
        )

    # on one, and sent: other machines could round otherwise, and every process needs one head
    probe, right, knn = on_main(run.accelerator, fit)
    for line in probe_summary(probe, correct=right, total=len(on_val.labels), knn=knn):
        notify(line)
    if config.finetune.method != "probe":
        notify(f"going on from that head with method={config.finetune.method}")
    put_head(run, probe)
    run.failed |= {**on_train.failed, **on_val.failed}
    loss = F.cross_entropy(probe.logits(on_train.values), on_train.labels)
    return Probed(float(loss), len(on_train.labels))


@torch.no_grad()
def put_head(run: TrainingState, probe: Probe) -> None:
    """Give the network, and its average, the head that a probe found."""
    assert isinstance(run.network.head, nn.Linear)
    averages = {} if run.average is None else dict(run.average.state_dict())
    for name, value in (("weight", probe.weight), ("bias", probe.bias)):
        run.network.head.get_parameter(name).copy_(value)
        averages[f"head.{name}"] = value
    if run.average is not None:
        run.average.load_state_dict(averages)


def chosen(
    config: Config, splits: Splits, notify: Notify = lambda _: None
) -> tuple[list[Sample], list[Sample]]:
    """The images that a probe sees: all of them where it is all that is done."""
    found = {"train": list(splits.train), "val": list(splits.val)}
    if config.finetune.method != "probe":
        for split, most in ENOUGH.items():
            if len(found[split]) > most:
                notify(f"note: the probe sees {most:,} of {len(found[split]):,} {split} images")
                found[split] = some_of(found[split], most, seed=config.training.seed)
    return found["train"], found["val"]


def some_of(samples: Sequence[Sample], most: int, *, seed: int) -> list[Sample]:
    """About `most` of `samples`, in their order: the same share of each class, and at least one."""
    generator = torch.Generator().manual_seed(random_seed(seed, "probe", len(samples)))
    labels = torch.tensor([sample.label for sample in samples])
    shuffled = torch.randperm(len(samples), generator=generator)
    places = []
    for label in torch.unique(labels):
        own = shuffled[labels[shuffled] == label]
        places.append(own[: max(1, len(own) * most // len(samples))])
    return [samples[place] for place in torch.cat(places).sort().values.tolist()]


def feature_cache(config: Config) -> Path:
    """The folder in which features are kept."""
    chosen = config.finetune.feature_cache
    return user_cache() / "features" if chosen is None else Path(chosen).expanduser()


class Extraction:
    """Makes features of images, or takes them from the cache.

    Args:
        run: Whose network is asked.
        say: Told, by the main process.
    """

    def __init__(self, run: TrainingState, notify: Notify) -> None:
        self.run, self.notify = run, notify
        self.key = weights_digest(as_saved(run.network.state_dict(), run.config), run.config.model)

    def __call__(self, samples: Sequence[Sample]) -> Features:
        """Features of `samples`.

        Raises:
            Interrupted: A signal came.
        """
        run, config = self.run, self.run.config
        maker = FeatureMaker(
            network=run.network,
            preprocessing=run.preprocessing,
            accelerator=run.accelerator,
            precision=config.run.precision,
            batch_size=BATCH_SIZES.get(run.accelerator.device.type, 64),
            workers=config.data.workers,
            interrupted=lambda: self.signal() != 0,
        )
        found = extract(
            samples,
            maker,
            weights_key=self.key,
            notify=self.notify,
            on_bad_image=config.data.on_bad_image,
            cache=feature_cache(config),
        )
        if found is None:
            raise Interrupted(
                "interrupted while features were made; they are kept: start again in the same way",
                self.signal(),
            )
        return found

    def signal(self) -> int:
        """The signal that a process had, or 0; the same on all of them."""
        return int(agreed_signal(self.run.accelerator, self.run.interruption.number))
