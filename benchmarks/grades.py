"""Are grades learned better with their order than as classes without one?

    python benchmarks/grades.py PHOTOS --images 250 --steps 400 --noise 0.03
    python benchmarks/grades.py PHOTOS --images 250 --steps 200 --rust

The grade of a photograph of 48 pixels is the Gaussian that it was blurred with, 0, 0.5, 1, 1.5 or 2
pixels, or the share of it that is covered with rust, 3 to 17 %; noise is on top. A small network of
convolutions makes the same steps from the same seed with each loss:

flat        cross-entropy
smooth      the same with label smoothing of 0.1
corn        CORN, arXiv:2111.08851, section 3: a logit for P(grade > k | grade >= k)
ordinal     soft labels of vit/tasks/ordinal.py

and answers with the most probable grade, the median or the rounded mean of the distribution. Of 800
other photographs: kappa, its differences to flat by seed, accuracy, and the log loss at the best
temperature of the other half of the images.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.nn import functional as F

from vit.evaluation.classification_metrics import grade_moments, quadratic_weighted_kappa
from vit.tasks.ordinal import Ordinal

SIGMAS, TEST, SIDE, BATCH = (0.0, 0.5, 1.0, 1.5, 2.0), 800, 48, 32
GRADES = len(SIGMAS)
RUST = np.array([0.55, 0.27, 0.1])


def draw(photo: Path, grade: int, noise: float, rust: bool, source: np.random.Generator) -> Tensor:
    """A photograph with its grade drawn into it, (3, SIDE, SIDE)."""
    image = Image.open(photo).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if not rust and SIGMAS[grade]:
        image = image.filter(ImageFilter.GaussianBlur(SIGMAS[grade]))
    pixels = np.asarray(image, np.float64) / 255
    if rust:
        specks = Image.fromarray(source.integers(0, 256, (SIDE, SIDE), np.uint8))
        field = np.asarray(specks.filter(ImageFilter.GaussianBlur(1.5)), np.float64)
        share = np.clip(0.03 + 0.035 * grade + source.normal(0, 0.012), 0, 1)
        covered = field >= np.quantile(field, 1 - share)
        pixels = np.where(covered[..., None], 0.35 * pixels + 0.65 * RUST, pixels)
    pixels = pixels + source.normal(0, noise, pixels.shape)
    return torch.tensor((pixels - 0.5) / 0.25, dtype=torch.float32).permute(2, 0, 1)


def corn_loss(logits: Tensor, grades: Tensor) -> Tensor:
    """Mean of -log P(grade), (batch, GRADES - 1)."""
    beyond = grades.unsqueeze(1) - torch.arange(GRADES - 1)
    wanted, weights = (beyond > 0).to(logits), (beyond >= 0).to(logits)
    terms = F.binary_cross_entropy_with_logits(logits, wanted, weights, reduction="sum")
    return terms / len(grades)


def corn_probabilities(logits: Tensor) -> Tensor:
    """(batch, GRADES - 1) -> (batch, GRADES)."""
    reached = F.pad(F.logsigmoid(logits).cumsum(dim=1), (1, 0))
    return (reached + F.pad(F.logsigmoid(-logits), (0, 1))).exp()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": F.cross_entropy,
    "smooth": lambda logits, grades: F.cross_entropy(logits, grades, label_smoothing=0.1),
    "corn": corn_loss,
    "ordinal": lambda logits, grades: F.cross_entropy(logits, Ordinal().targets(grades, GRADES)),
}


def network(outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 24), (24, 48), (48, 64)):
        conv = nn.Conv2d(inside, outside, 3, padding=1, stride=2)
        layers += [conv, nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs))


def train(loss: str, images: Tensor, grades: Tensor, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = network(GRADES - (loss == "corn"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        places = torch.randint(len(images), (BATCH,), generator=source)
        flip = torch.rand(BATCH, 1, 1, 1, generator=source) < 0.5
        batch = torch.where(flip, images[places].flip(3), images[places])
        optimiser.zero_grad()
        LOSSES[loss](model(batch), grades[places]).backward()
        optimiser.step()
        rate.step()
    return model.eval()


def decisions(probabilities: Tensor) -> dict[str, Tensor]:
    mean = (probabilities * torch.arange(GRADES)).sum(dim=1)
    median = (probabilities.cumsum(dim=1) < 0.5).sum(dim=1).clamp(max=GRADES - 1)
    most = probabilities.argmax(dim=1)
    return {"most probable": most, "median": median, "mean": mean.round().long()}


def scaled_log_loss(probabilities: Tensor, grades: Tensor) -> float:
    """Of each half of the images at the best temperature of the other."""
    logs, half = probabilities.clamp_min(1e-8).log(), torch.arange(len(grades)) % 2 == 0

    def log_loss(some: Tensor, temperature: float) -> float:
        return float(F.cross_entropy(logs[some] / temperature, grades[some]))

    temperatures = [10 ** (step / 20 - 1) for step in range(41)]
    losses = [
        log_loss(~some, min(temperatures, key=lambda one, some=some: log_loss(some, one)))  # type: ignore[misc]
        for some in (half, ~half)
    ]
    return sum(losses) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rust", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    photos = sorted(path for path in args.photos.rglob("*") if path.suffix in (".jpg", ".png"))
    random.Random(0).shuffle(photos)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for seed in range(args.seeds):
        source = np.random.default_rng(seed)
        drawn = []
        for photo in photos[: TEST + args.images]:
            grade = int(source.integers(GRADES))
            drawn.append((draw(photo, grade, args.noise, args.rust, source), grade))
        images = torch.stack([image for image, _ in drawn])
        grades = torch.tensor([grade for _, grade in drawn])
        for loss in LOSSES:
            model = train(loss, images[TEST:], grades[TEST:], args.steps, seed)
            with torch.inference_mode():
                logits = torch.cat([model(part) for part in images[:TEST].split(256)])
            found = corn_probabilities(logits) if loss == "corn" else logits.softmax(dim=1)
            log_loss = scaled_log_loss(found, grades[:TEST])
            for name, answers in decisions(found).items():
                moments = grade_moments(grades[:TEST], answers).mean(dim=0)
                right = float((answers == grades[:TEST]).float().mean())
                scores = [float(quadratic_weighted_kappa(moments)), right, log_loss]
                rows.setdefault((loss, name), []).append(scores)
    flat = np.array(rows["flat", "most probable"])
    print("| loss | answer | kappa | less flat, by seed | right | log loss |")
    print("|---|---|---|---|---|---|")
    for (loss, name), values in rows.items():
        kappa, right, log_loss = np.mean(values, axis=0)
        apart = " ".join(f"{one:+.3f}" for one in np.array(values)[:, 0] - flat[:, 0])
        print(f"| {loss} | {name} | {kappa:.3f} | {apart} | {right:.1%} | {log_loss:.3f} |")


if __name__ == "__main__":
    main()
