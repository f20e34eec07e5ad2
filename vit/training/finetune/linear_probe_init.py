"""LP-FT: initialises the head with a linear probe before fine-tuning.

Source: Kumar et al., "Fine-Tuning can Distort Pretrained Features", section 3, arXiv:2202.10054.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset_types import Sample, Splits
from vit.data.random_seed import random_seed
from vit.paths import user_cache
from vit.stop_signals import Interrupted
from vit.text import Notify
from vit.training.distributed.collectives import agreed_signal, on_main
from vit.training.finetune.feature_extraction import (
    FeatureExtractor,
    Features,
    extract,
    weights_digest,
)
from vit.training.finetune.finetuning import merged_state_dict
from vit.training.finetune.linear_probe import Probe, fit_probe, knn_accuracy, probe_summary
from vit.training.logging.training_progress import notifier
from vit.training.training_state import TrainingState

# Enough images for a head that is trained further.
MAX_PROBE_IMAGES = {"train": 20_000, "val": 5_000}
BATCH_SIZES = {"cpu": 16}


@dataclass(frozen=True)
class ProbeFit:
    """Training loss of a linear probe."""

    loss: float
    images: int


def init_head_from_probe(run: TrainingState, splits: Splits) -> ProbeFit:
    """Fit a linear probe to the features of the network, report it, and copy it into the head."""
    config, notify = run.config, notifier(run.accelerator)
    train, val = probe_samples(config, splits, notify)
    features = FeatureExtraction(run, notify)
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

    # on one process, and broadcast: machines may round differently, and all need the same head
    probe, right, knn = on_main(run.accelerator, fit)
    for line in probe_summary(probe, correct=right, total=len(on_val.labels), knn=knn):
        notify(line)
    if config.finetune.method != "probe":
        notify(f"going on from that head with method={config.finetune.method}")
    set_head(run, probe)
    run.failed |= {**on_train.failed, **on_val.failed}
    loss = F.cross_entropy(probe.logits(on_train.values), on_train.labels)
    return ProbeFit(float(loss), len(on_train.labels))


@torch.no_grad()
def set_head(run: TrainingState, probe: Probe) -> None:
    """Copy the probe into the head of the network and of its average."""
    assert isinstance(run.network.head, nn.Linear)
    averages = {} if run.average is None else dict(run.average.state_dict())
    for name, value in (("weight", probe.weight), ("bias", probe.bias)):
        run.network.head.get_parameter(name).copy_(value)
        averages[f"head.{name}"] = value
    if run.average is not None:
        run.average.load_state_dict(averages)


def probe_samples(
    config: Config, splits: Splits, notify: Notify = lambda _: None
) -> tuple[list[Sample], list[Sample]]:
    """Images of the probe: all with method=probe, else at most MAX_PROBE_IMAGES."""
    found = {"train": list(splits.train), "val": list(splits.val)}
    if config.finetune.method != "probe":
        for split, most in MAX_PROBE_IMAGES.items():
            if len(found[split]) > most:
                notify(f"note: the probe sees {most:,} of {len(found[split]):,} {split} images")
                found[split] = stratified_subset(found[split], most, seed=config.training.seed)
    return found["train"], found["val"]


def stratified_subset(samples: Sequence[Sample], most: int, *, seed: int) -> list[Sample]:
    """About `most` of `samples`, in order: the same share of each class, at least one image."""
    generator = torch.Generator().manual_seed(random_seed(seed, "probe", len(samples)))
    labels = torch.tensor([sample.label for sample in samples])
    shuffled = torch.randperm(len(samples), generator=generator)
    places = []
    for label in torch.unique(labels):
        own = shuffled[labels[shuffled] == label]
        places.append(own[: max(1, len(own) * most // len(samples))])
    return [samples[place] for place in torch.cat(places).sort().values.tolist()]


def feature_cache(config: Config) -> Path:
    """Folder of the feature cache."""
    folder = config.finetune.feature_cache
    return user_cache() / "features" if folder is None else Path(folder).expanduser()


class FeatureExtraction:
    """Extracts features of images with the network of a training, through the cache."""

    def __init__(self, run: TrainingState, notify: Notify) -> None:
        self.run, self.notify = run, notify
        state = merged_state_dict(run.network.state_dict(), run.config)
        self.key = weights_digest(state, run.config.model)

    def __call__(self, samples: Sequence[Sample]) -> Features:
        """Features of `samples`."""
        run, config = self.run, self.run.config
        extractor = FeatureExtractor(
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
            extractor,
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
        """The signal that any process has received, or 0."""
        return agreed_signal(self.run.accelerator, self.run.interruption.number)
