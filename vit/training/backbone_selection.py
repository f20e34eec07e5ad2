"""Chooses among pretrained networks by measuring them: the tournament of `--weights auto`.

    training images, stratified -> features of each network -> cross-validation of a linear head
    -> the better half goes on with twice as many images (successive halving)
    -> the best ones against themselves with shuffled weights, and against patches of the images
    -> paired comparison

Validation and test images are not used. All networks see the same images and folds, so that they
are compared image by image. Training starts from scratch where the features of `PatchFilters`,
which know nothing but these images, are by far the best; and where they are as good as those of
networks that are no better than with the entries of each of their tensors shuffled.

    CACHE/selection-<digest>.json     what is known so far; a second call goes on from there

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", arXiv:1502.07943; Renggli et al., "SHiFT", arXiv:2204.01457 (linear heads as proxies,
with successive halving); Coates and Ng, "The Importance of Encoding Versus Training with Sparse
Coding and Vector Quantization", ICML 2011 (random patches as filters).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from vit.atomic_files import explain_write_errors, write_text
from vit.config import Config
from vit.config.setting_layers import Settings, make_config, with_settings
from vit.data.dataset_types import Sample, Splits
from vit.data.image_archives import split_address
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.errors import BadImage, ConfigError, VitError
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.paired_comparison import UNDECIDED, PairedComparison
from vit.text import ignore, join_names, percent, plural
from vit.training.distributed.collectives import max_over_processes, on_main
from vit.training.finetune.feature_extraction import (
    Extractor,
    batch_size,
    extract,
    feature_folder,
    network_features,
    weights_digest,
)
from vit.training.finetune.finetune_settings import complete_for_weights, merged_state_dict
from vit.training.finetune.linear_probe import held_out_answers
from vit.training.logging.training_progress import notifier
from vit.training.plan_weights import WeightsChoice
from vit.training.setup import make_network
from vit.weights.backbone_list import Backbone, license_name
from vit.weights.load_model import open_pretrained
from vit.weights.safetensors_io import digest

SCRATCH, TOO_SLOW = "from scratch", "too slow for the time"
VERSION = 5
ROUNDS_SHARE, MAX_SHARE = 0.2, 0.25
"""Shares of the time: of the rounds as planned, half of it at most to measure speeds; and of all
with shuffled weights and patches, at most."""
MIN_IMAGES, MAX_IMAGES = 100, 6000
"""Images of the first round, unless there are fewer, and of the last one."""
FINALISTS = 2
"""Networks with which the rounds end."""
TIE = 0.01
"""Difference of accuracy below which two networks tie, unless a paired test shows it."""
SCRATCH_ERRORS = 0.5
"""Training from scratch is chosen where a head on patches makes no more than this share of the
errors of the best network: with a few hundred images, trainings were up to 29 points below patches
(benchmarks/results)."""
TIMED_IMAGES = 4
"""Images that the speed of a network is measured with on a CPU."""
PATCH, FILTERS, PATCHES, FILTERED = 6, 64, 20_000, 64
"""Side of a filter in pixels, number of filters, of patches whose variances are evened out, and of
images that they are taken from."""

Record = dict[str, Any]
"""What is known: `speeds` of the plan, the `entrants`, seconds `spent`, `images` of each round; of
each of the `networks`, by source, seconds of an image, and the answers of each round; the `ranking`
of the last round, the answers of `scratch` to the images of the first round, `chosen`, `tied`."""


def record_file(
    config: Config, splits: Splits, values: Mapping[str, Any], accelerator: Accelerator
) -> Path:
    """The file of what is known about networks for these images and settings."""
    files = sorted({(split_address(sample.path) or (sample.path,))[0] for sample in splits.train})
    labels = [(sample.path, sample.label) for sample in splits.train]
    machine = [accelerator.device.type, accelerator.num_processes, os.cpu_count(), os.getcwd()]
    question = [VERSION, versions(files), labels, len(splits.val), dict(values), machine]
    text = json.dumps(question, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return feature_folder(config) / f"selection-{digest[:32]}.json"


def versions(paths: Iterable[str]) -> list[list[int]]:
    """Size and time of each file or folder that is there."""
    return [[s.st_size, s.st_mtime_ns] for s in map(os.stat, filter(os.path.exists, paths))]


def read_record(path: Path) -> Record | None:
    """The record in a file; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and found.get("version") == VERSION else None
    return None


def stratified_order(samples: Sequence[Sample], *, seed: int) -> list[Sample]:
    """Labelled samples in an order of which each beginning has about the same share of a class."""
    generator = torch.Generator().manual_seed(random_seed(seed, "selection"))
    by_class: dict[int, list[int]] = {}
    for place in torch.randperm(len(samples), generator=generator).tolist():
        if samples[place].label >= 0:
            by_class.setdefault(samples[place].label, []).append(place)
    ranks = {
        place: (rank + 0.5) / len(own)
        for own in by_class.values()
        for rank, place in enumerate(own)
    }
    return [samples[place] for place in sorted(ranks, key=lambda one: (ranks[one], one))]


class PatchFilters(nn.Module):
    """Features of one layer: the positive and the negative part of the answer of each filter, and
    their means over the quarters of an image, of which each also counts mirrored, as in training.

    Args:
        filters: (filters, channels, PATCH, PATCH), as of `patch_filters`.
    """

    THRESHOLD = 0.5
    """What counts of an answer, whose variance is about one, is beyond this."""

    def __init__(self, filters: Tensor) -> None:
        super().__init__()
        self.filters = nn.Parameter(filters)

    def features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, 8 filters)."""
        found = F.conv2d(torch.cat([images, images.flip(3)]), self.filters)
        parts = F.relu(torch.cat([found, -found], 1) - self.THRESHOLD)
        means: Tensor = F.adaptive_avg_pool2d(parts, 2).view(2, len(images), -1).mean(0)
        return means


def patch_filters(images: Tensor, *, seed: int) -> Tensor:
    """Whitened patches of `images`, (n, channels, height, width): (FILTERS, channels, PATCH, PATCH)
    without a mean, whose answers to patches all have about the same variance."""
    generator = torch.Generator().manual_seed(random_seed(seed, "patches"))
    windows = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    image, row, column = (
        torch.randint(windows.shape[axis], (PATCHES,), generator=generator) for axis in (0, 2, 3)
    )
    patches = windows[image, :, row, column].flatten(1)
    patches = patches - patches.mean(1, keepdim=True)
    variances, axes = torch.linalg.eigh(patches.T @ patches / len(patches))
    # noise of small variance is not made as strong as what images have
    variances = variances.clamp_min(0) + 0.1 * variances.mean() + 1e-6
    whiten: Tensor = axes @ variances.rsqrt().diag() @ axes.T
    filters = F.normalize(patches[:FILTERS] @ whiten, dim=1) @ whiten
    return (filters - filters.mean(1, keepdim=True)).view(-1, images.shape[1], PATCH, PATCH)


class Tournament:
    """Rounds of a selection, of which `record` and its file `path` know some; all processes take
    part.

    Args:
        chosen: The settings of the training.
        seconds: Of the training; `MAX_SHARE` of them are used at most.
        scratch: Side of the images that training from scratch would see; None where it is no
            choice.
    """

    def __init__(
        self,
        record: Record,
        path: Path,
        choices: Sequence[WeightsChoice],
        chosen: Settings,
        config: Config,
        splits: Splits,
        accelerator: Accelerator,
        *,
        seconds: float,
        scratch: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.chosen, self.config = path, chosen, config
        self.choices = {choice.weights.source: choice for choice in choices}
        self.scratch = None if scratch is None else max(scratch, PATCH)
        self.record = record
        entrants = on_main(accelerator, lambda: [[s, *versions([s])] for s in sorted(self.choices)])
        if record.get("entrants") != entrants:
            networks: dict[str, Record] = {source: {"right": []} for source in self.choices}
            self.record = {name: record[name] for name in ("version", "speeds")}
            self.record |= {"entrants": entrants, "networks": networks}
        self.networks: dict[str, Record] = self.record["networks"]
        self.classes, self.seconds = len(splits.classes), seconds
        self.samples = stratified_order(splits.train, seed=config.training.seed)[:MAX_IMAGES]
        self.accelerator, self.clock, self.notify = accelerator, clock, notifier(accelerator)
        self.began: float = clock() - self.record.setdefault("spent", 0.0)

    def measured(self, began: float) -> float:
        """Seconds since `began`, the same on all processes."""
        return float(max_over_processes(self.accelerator, self.clock() - began))

    def is_late(self) -> bool:
        """Whether the time is over in this process."""
        return self.clock() - self.began > MAX_SHARE * self.seconds

    def save(self) -> None:
        """Write the record on the main process."""
        self.record["spent"] = self.measured(self.began)
        text = json.dumps(self.record, allow_nan=False)

        def write() -> None:
            with explain_write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, text)

        on_main(self.accelerator, write)

    def run(self) -> WeightsChoice | None:
        """Play the rounds that are left; returns what is chosen, None for training from scratch."""
        record = self.record
        if "chosen" not in record:
            if "images" not in record:
                self.measure_speeds()
                record["images"] = self.round_sizes()
                self.save()
            if "ranking" not in record:
                record["ranking"] = self.play()
            record["chosen"] = self.decide()
            if any(network["right"] for network in self.networks.values()):
                self.save()
        return self.choices.get(record["chosen"])

    def measure_speeds(self) -> None:
        """Measure the seconds of an image with each network, the smallest first, and leave out what
        cannot be read or comes too late."""
        device, processes = self.accelerator.device, self.accelerator.num_processes
        count = TIMED_IMAGES if device.type == "cpu" else batch_size(device)
        for source in sorted(self.networks, key=self.size):
            network = self.networks[source]
            if self.measured(self.began) > ROUNDS_SHARE / 2 * self.seconds:
                network["left_out"] = TOO_SLOW
                continue
            began = self.clock()
            extractor = self.open(source)
            if extractor is None:
                continue
            network["opening"] = self.measured(began)
            for _ in range(2):  # the first time allocates memory, and chooses kernels
                began, images = self.clock(), []
                for sample in self.samples[:count]:
                    with contextlib.suppress(BadImage):  # the rounds meet it
                        images.append(extractor.prepare(sample.path))
                if images:
                    extractor.vectors(images)
            network["seconds"] = self.measured(began) / max(len(images), 1) / processes

    def open(self, source: str, *, shuffled: bool = False) -> Extractor | None:
        """The network as a training would begin with it; None if it cannot be read."""
        named = {"weights": source, "image_size": self.choices[source].image_size}
        layers = {
            origin: {n: v for n, v in layer.items() if n != "time"}  # which no probe reads
            for origin, layer in self.chosen.layers.items()
        }
        try:
            config = make_config(Settings(**{**layers, "plan": named}))
            config = with_settings(config, num_classes=self.classes)
            pretrained = open_pretrained(source)
            config = complete_for_weights(config, pretrained)
            network = make_network(config, pretrained)
        except VitError as error:
            self.networks[source]["left_out"] = str(error)
            self.notify(f"weights=auto: {source} is left out: {error}")
            return None
        if shuffled:
            shuffle_weights(network, seed=config.training.seed)
        network = network.to(self.accelerator.device)
        model = config.model
        images = Preprocessing.from_config(config.data, model.image_size, model.patch_size)
        key = weights_digest(merged_state_dict(network.state_dict(), config), model)
        return network_features(network, images, config, self.accelerator, key)

    def open_filters(self) -> Extractor:
        """What stands for training from scratch; some image can be read."""
        config = self.config
        assert self.scratch is not None
        images = Preprocessing.from_config(config.data, self.scratch, config.model.patch_size)
        images = dataclasses.replace(images, resize="squash", crop_share=1.0, patch_size=None)

        def make() -> Tensor:
            some: list[Tensor] = []
            for sample in self.samples:
                if len(some) < FILTERED:
                    with contextlib.suppress(BadImage):
                        some.append(images(images.read(sample.path)))
            pixels = images.normalise(torch.stack(some), torch.float32)
            return patch_filters(pixels, seed=config.training.seed)

        filters = on_main(self.accelerator, make)
        key = digest({"filters": filters}, {"version": str(VERSION)})
        return network_features(
            PatchFilters(filters).to(self.accelerator.device),  # type: ignore[arg-type]
            *(images, config, self.accelerator, key),
        )

    def round_sizes(self) -> list[int]:
        """Images of each round; the slowest networks are left out where the time is too short."""
        total, room = len(self.samples), ROUNDS_SHARE * self.seconds - self.measured(self.began)
        least = min(MIN_IMAGES, total)
        networks = [one for one in self.networks.values() if "left_out" not in one]
        networks.sort(key=lambda one: -one["seconds"])
        while len(networks) > 1 and room < sum(  # one, perhaps the slowest, also shuffled
            one["opening"] + least * one["seconds"] for one in (networks[0], *networks)
        ):
            networks.pop(0)["left_out"] = TOO_SLOW
        opening, seconds = ([one[name] for one in networks] for name in ("opening", "seconds"))
        halvings = max(math.ceil(math.log2(max(len(networks), 1) / FINALISTS)), 0)
        # each round opens half as many networks as the one before
        room -= 2 * sum(opening) + max(opening, default=0.0)
        each = (1 + halvings / 2) * sum(seconds) + max(seconds, default=0.0)
        first = min(max(int(room / max(each, 1e-9)), least), total)
        return sorted({min(first << number, total) for number in range(halvings + 1)})

    def play(self) -> list[str]:
        """Measure the networks, in each round the better half of those of the one before; returns
        those of the last round that the time was enough for, the best first."""
        sources = [one for one in self.networks if "left_out" not in self.networks[one]]
        images: list[int] = self.record["images"]
        ranking: list[str] = []
        for number, count in enumerate(images):
            for source in sorted(sources, key=self.size):
                network = self.networks[source]
                if len(network["right"]) > number:
                    continue
                right = self.answers(partial(self.open, source), count)
                if right is not None:
                    network["right"].append(right)
                    self.save()
                elif number and "left_out" not in network:
                    self.record["images"] = images[:number]
                    return [one for one in ranking if "left_out" not in self.networks[one]]
                else:
                    network.setdefault("left_out", TOO_SLOW)
            ranking = [one for one in sources if len(self.networks[one]["right"]) > number]
            ranking.sort(key=partial(self.rank, number))
            sources = ranking[: max(math.ceil(len(ranking) / 2), FINALISTS)]
        return ranking

    def rank(self, number: int, source: str) -> tuple[float, float, str]:
        """Sort key: the more accurate network in a round first, of equals the smaller one."""
        return -self.networks[source]["right"][number].count("1"), *self.size(source)

    def size(self, source: str) -> tuple[float, str]:
        """Sort key: the smaller network first."""
        return self.choices[source].weights.megabytes, source

    def answers(self, open_extractor: Callable[[], Extractor | None], count: int) -> str | None:
        """For each held-out image 1 if a linear head is right, else 0; None where the network
        cannot be read, or the time is over."""
        late = self.measured(self.began) > MAX_SHARE * self.seconds
        extractor = None if late else open_extractor()
        if extractor is None:
            return None
        found = extract(
            self.samples[:count], extractor, self.config, self.accelerator, ignore, self.is_late
        )
        if found is None:
            return None
        seed = random_seed(self.config.training.seed, "probe")
        fit = partial(held_out_answers, found.values, found.labels, self.classes, seed=seed)
        right: torch.Tensor = on_main(self.accelerator, fit)
        return "".join(map(str, right.int().tolist()))

    def decide(self) -> str:
        """The source of the chosen network, or SCRATCH."""
        last = len(self.record["images"]) - 1
        ranked: list[str] = self.record["ranking"]
        if not ranked and not self.scratch:
            late = [s for s, one in self.networks.items() if one.get("left_out") == TOO_SLOW]
            if not late:
                raise ConfigError("weights=auto: none of the weights at hand can be read")
            return min(late, key=self.size)
        if self.scratch:
            kept, shown = self.better_than_shuffled(ranked)
            for one in ranked:
                if one not in kept:
                    why = "no better than with shuffled weights"
                    self.networks[one].setdefault("left_out", why)
            ranked = self.record["ranking"] = kept
            if not ranked or self.needs_no_network(ranked[0], shown):
                return SCRATCH
        best = self.networks[ranked[0]]["right"][last]
        tied = [s for s in ranked if is_tie(best, self.networks[s]["right"][last])]
        if self.scratch:
            tied = [s for s in tied if s == ranked[0] or self.knows_images(s)]
        self.record["tied"] = tied if len(tied) > 1 else []
        return min(tied, key=self.size)

    def better_than_shuffled(self, ranked: list[str]) -> tuple[list[str], bool]:
        """The networks from the first one on that is shown to be better than with shuffled weights,
        and true; if none is, those that are more accurate than all with shuffled weights."""
        for number, source in enumerate(ranked):
            if self.knows_images(source):
                return ranked[number:], True
        most = max((right.count("1") for right in self.shuffled()), default=0)
        return [one for one in ranked if self.networks[one]["right"][0].count("1") > most], False

    def knows_images(self, source: str) -> bool:
        """Whether a network is shown to be better than with shuffled weights, its own and those of
        the networks asked before; also where that is not known."""
        network = self.networks[source]
        if "knows" not in network:
            opened = partial(self.open, source, shuffled=True)
            network["shuffled"] = self.answers(opened, self.record["images"][0])
            if network["shuffled"]:
                best = max(self.shuffled(), key=lambda right: right.count("1"))
                network["knows"] = paired(best, network["right"][0]).verdict() == "better"
            else:
                network["knows"] = "left_out" not in network
            self.save()
        known: bool = network["knows"]
        return known

    def shuffled(self) -> list[str]:
        """Answers with shuffled weights."""
        return [one["shuffled"] for one in self.networks.values() if one.get("shuffled")]

    def needs_no_network(self, best: str, shown: bool) -> bool:
        """Whether features that know nothing but these images are by far better than the best
        network, or as good where it is not `shown` to be better than with shuffled weights."""
        if "scratch" not in self.record:
            self.record["scratch"] = self.answers(self.open_filters, self.record["images"][0])
            self.save()
        scratch, right = self.record["scratch"], self.networks[best]["right"][0]
        if not scratch:
            return not shown
        found = paired(right, scratch)
        if not shown:
            return found.difference > -TIE
        few = scratch.count("0") <= SCRATCH_ERRORS * right.count("0")
        return few and found.verdict() == "better"

    def summary(self) -> dict[str, Any]:
        """The content of backbones.json: what was measured, and what was chosen."""
        rows: list[dict[str, Any]] = []
        choices, networks = self.choices, self.networks
        if "scratch" in self.record:
            right, nothing = self.record["scratch"], Backbone(SCRATCH, license="-", megabytes=0.0)
            choice = WeightsChoice(nothing, "patches", self.scratch or 0, 0.0, 0.0, True)
            late = {"right": [], "left_out": TOO_SLOW}
            choices = {**choices, SCRATCH: choice}
            networks = {**networks, SCRATCH: {"right": [right]} if right else late}
        for source, network in networks.items():
            choice = choices[source]
            right = ["", *network["right"][: len(self.record["images"])]][-1]
            hits, count = right.count("1"), len(right)
            rows.append(
                {
                    "source": source,
                    "license": license_name(choice.weights.license),
                    "year": choice.weights.year,
                    "megabytes": round(choice.weights.megabytes, 1),
                    "image_size": choice.image_size,
                    "method": choice.method,
                    "milliseconds": 1e3 * network["seconds"] if "seconds" in network else None,
                    "images": count,
                    "accuracy": hits / count if count else None,
                    "interval": wilson_interval(hits, count) if count else None,
                    "left_out": network.get("left_out"),
                }
            )
        rows.sort(key=lambda row: (-row["images"], -(row["accuracy"] or 0), row["megabytes"]))
        known = {"chosen": self.record["chosen"], "sentence": self.sentence()}
        return {**known, "seconds": self.record["spent"], "networks": rows}

    def sentence(self) -> str:
        """What was chosen, and what the next best would give."""
        chosen, tied = self.record["chosen"], self.record.get("tied")
        ranked, number = self.record["ranking"], len(self.record["images"]) - 1
        if chosen == SCRATCH and not ranked:
            known = any("shuffled" in network for network in self.networks.values())
            why = "no network is better than with shuffled weights"
            return f"training {SCRATCH}: {why if known else 'no network could be measured'}"
        others = [one for one in ranked if one != chosen]
        if chosen == SCRATCH:
            answers = [self.record["scratch"], self.networks[ranked[0]]["right"][0]]
        else:
            compared = [chosen, *others[:1]] if ranked else []
            answers = [self.networks[one]["right"][number] for one in compared]
        if len(answers) < 2 or not all(answers):
            return f"{chosen}, and no other network was measured with as many images"
        found = paired(*answers)
        low, high = (100 * end for end in found.interval)
        tie = f"a tie of {join_names(tied)}, so the smallest network wins: " if tied else ""
        return (
            f"{tie}{chosen}; {others[0]} would give {100 * found.difference:+.1f} points (95 % "
            f"interval {low:+.1f} to {high:+.1f}; a linear head, {plural(found.count, 'image')})"
        )


def shuffle_weights(network: nn.Module, *, seed: int) -> None:
    """Permute the entries of each parameter of `network`."""
    generator = torch.Generator().manual_seed(random_seed(seed, "shuffled"))
    with torch.no_grad():
        for parameter in network.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


def paired(a: str, b: str) -> PairedComparison:
    """B with A, of their answers for the same images."""
    return PairedComparison.of(*(torch.tensor([*map(int, right)]) > 0 for right in (a, b)))


def is_tie(best: str, other: str) -> bool:
    """Whether `other` is not shown to be worse than `best`, and close to it."""
    if not best:  # no class has two images
        return True
    found = paired(best, other)
    return found.verdict() == UNDECIDED and found.difference > -TIE


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """`Tournament.summary` for a terminal."""
    rows = [
        ("network", "accuracy", "95 %", "images", "ms", "MB", "px", "method", "year", "licence")
    ]
    for row in found["networks"]:
        ends = " to ".join(f"{100 * end:.1f}" for end in row["interval"] or ())
        share, ms = percent(row["accuracy"], 1), row["milliseconds"]
        speed = "-" if ms is None else f"{ms:.1f}"
        cells = (ends, row["images"], speed, f"{row['megabytes']:.0f}", row["image_size"])
        about = (row["left_out"] or row["method"], row["year"] or "-", row["license"])
        rows.append((row["source"], share, *map(str, (*cells, *about))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return [*("  ".join(line).rstrip() for line in lines), found["sentence"]]
