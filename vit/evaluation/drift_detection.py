"""Are later images different from those of a reference, looked at as often as one likes?

Lines of images are counted: answers by class, scores and distances below and above quantiles of the
reference. Each count is tested in windows of 1, 2, 4 ... lines,

    p    = P(X >= c)    X: hits among w of n + w images, of which a + c are hits     (Fisher)
           at most P(X = c) / (1 - P(X = c + 1) / P(X = c))
    p_t  = p tests / weight,   weight = 1 / (j + 1)(j + 2) i (i + 1)   of the i-th of 2^j lines

with c hits among the w images of a window and a among the n of the reference, and the same of fewer
hits. The weights of all windows have the sum 1, so that if images are drawn as those of the
reference, any p_t <= ALPHA has a probability of at most ALPHA, however long the stream: the test is
exact, and knows that the reference is a sample. An end of a bin is a value of the reference, of
which a are larger: the probability that c of w are larger too is the same.

The first line of another distribution is the maximum likelihood estimate,

    max over s of  L(reference + lines before s) + L(lines from s on),  L(c) = sum c log(c / sum c)

Source: Fisher, "The Logic of Inductive Inference", Journal of the Royal Statistical Society 98,
1935; the bound: Feller, "An Introduction to Probability Theory", volume 1, section VI.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.evaluation.exact_tests import holm
from vit.text import join_names, percent, plural, quoted

ALPHA = 0.01
"""Probability of a false alarm in a stream of any length."""
CHUNK = 2 * 10**6
"""Counts that are tested at a time."""
DIRECTIONS = {
    "distances": ("farther from the training images", "nearer to the training images"),
    "scores": ("higher scores", "lower scores"),
}
NAMED = 3
"""Classes that are named, more frequent ones and less frequent ones."""


class Windows(NamedTuple):
    """Parts of a stream that are tested."""

    first: Tensor
    end: Tensor
    """The line after the last one."""
    weight: Tensor
    """Logarithm of the share of ALPHA."""

    @staticmethod
    def of(lines: int) -> "Windows":
        parts = []
        for j in range(lines.bit_length()):
            length, step = 2**j, max(2 ** (j - 1), 1)
            first = torch.arange(0, lines - length + 1, step)
            i = torch.arange(1, len(first) + 1, dtype=torch.float64)
            weight = -(i * (i + 1)).log() - math.log((j + 1) * (j + 2))
            parts.append((first, first + length, weight))
        return Windows(*(torch.cat(part) for part in zip(*parts, strict=True)))


def log_tail(hits: Tensor, images: Tensor, before: Tensor, reference: int) -> Tensor:
    """Logarithm of p of as many `hits` among `images`, or more than expected, or fewer; at most 0.

    Args:
        hits, images: Of windows, any shapes that go together.
        before: Hits among the `reference` images.
    """
    fewer = hits * reference < before * images
    c = torch.where(fewer, images - hits, hits)
    a = torch.where(fewer, reference - before, before)
    whole = torch.as_tensor(float(reference), dtype=torch.float64)
    point = _log_choose(images, c) + _log_choose(whole, a) - _log_choose(whole + images, a + c)
    ratio = (images - c) * a / ((c + 1) * (whole - a + 1))
    return (point - torch.log1p(-ratio.clamp(max=1))).clamp(max=0)


def _log_choose(total: Tensor, chosen: Tensor) -> Tensor:
    return (total + 1).lgamma() - (chosen + 1).lgamma() - (total - chosen + 1).lgamma()


def window_tests(reference: Tensor, lines: Tensor, windows: Windows, *, ordered: bool) -> Tensor:
    """Logarithm of p_t of each window, of each bin or, if they are ordered, of those after each.

    Args:
        reference: Images of the reference in each bin, (bins,) float64.
        lines: Images of each line, (lines, bins).
    """
    hits, before = (_above(one) if ordered else one for one in (lines, reference))
    sums = torch.cat([hits.new_zeros(1, hits.shape[1]), hits.cumsum(0)])
    sizes = torch.cat([lines.new_zeros(1), lines.sum(1).cumsum(0)])
    found = []
    parts = (torch.split(part, CHUNK // len(before) + 1) for part in windows[:2])
    for first, end in zip(*parts, strict=True):
        images = (sizes[end] - sizes[first])[:, None]
        tails = log_tail(sums[end] - sums[first], images, before, int(reference.sum()))
        found.append(tails.amin(1))
    return torch.cat(found) + math.log(2 * len(before)) - windows.weight


def _above(counts: Tensor) -> Tensor:
    """Images in the bins after each, (..., bins) -> (..., bins - 1)."""
    return counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]


def change_point(reference: Tensor, lines: Tensor) -> int:
    """The line from which on counts fit another distribution best; as for `window_tests`."""
    before = reference + torch.cat([lines.new_zeros(1, lines.shape[1]), lines.cumsum(0)[:-1]])
    after = reference + lines.sum(0) - before
    likelihood = [
        torch.xlogy(one, one / one.sum(1, keepdim=True)).sum(1) for one in (before, after)
    ]
    return int((likelihood[0] + likelihood[1]).argmax())


@dataclass(frozen=True)
class ChangedClass:
    """Share of the answers, in the reference and since the change."""

    label: str
    reference: float
    now: float
    p_value: float


@dataclass(frozen=True)
class Drift:
    """What a comparison with the reference found.

    Args:
        images, reference: Number of images of the stream, and of the reference.
        p_values: Of each test, for the whole stream; below ALPHA where it is different.
        since: Number of the first different image, from 1; None if there is no difference.
        noticed: Number of images after which the difference was certain.
        changed: Words for what is different of distances and scores.
        classes: Classes that became more or less frequent.
    """

    run: str
    images: int
    reference: int
    p_values: Mapping[str, float]
    since: int | None = None
    since_time: str | None = None
    noticed: int | None = None
    changed: Sequence[str] = ()
    classes: Sequence[ChangedClass] = ()
    failed: Sequence[Mapping[str, str]] = ()

    @property
    def different(self) -> bool:
        """Whether the images are different from those of the calibration."""
        return self.since is not None

    def sentence(self) -> str:
        """The result, and what to do next."""
        of = f"{plural(self.images, 'image')}, {self.reference:,} of the calibration"
        if self.since is None:
            return f"as before: no difference from the images of the calibration is certain ({of})"
        time = "" if self.since_time is None else f", {self.since_time}"
        parts = [*self.changed]
        for word, more in (("more", True), ("less", False)):
            names = [
                f"{one.label} ({percent(one.now, 0)}, was {percent(one.reference, 0)})"
                for one in self.classes
                if (one.now > one.reference) == more
            ]
            if names:
                parts.append(f"{word} often {join_names(names, NAMED)}")
        run = quoted(self.run)
        return (
            f"different since image {self.since:,}{time} ({of}): {'; '.join(parts) or 'answers'}; "
            f"next, label some of the new images (vit suggest IMAGES --weights {run}), calibrate "
            f"on them (vit calibrate {run} DATA), and if too few are right, train on them (vit "
            f"train DATA --weights {run})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verdict": "different" if self.different else "as before",
            "images": self.images,
            "reference_images": self.reference,
            "p_value": min(min(self.p_values.values()), 1.0),
            "p_values": dict(self.p_values),
            "since": self.since,
            "since_time": self.since_time,
            "noticed": self.noticed,
            "changed": list(self.changed),
            "classes": [vars(one) for one in self.classes],
            "failed": [dict(one) for one in self.failed],
        }


def stream_tests(
    reference: Mapping[str, Tensor], lines: Mapping[str, Tensor]
) -> tuple[Windows, dict[str, Tensor]]:
    """`window_tests` of `answers`, `scores` and, if known, `distances`, which share ALPHA."""
    windows = Windows.of(len(lines["answers"]))
    return windows, {
        name: window_tests(one, lines[name], windows, ordered=name != "answers")
        + math.log(len(reference))
        for name, one in reference.items()
    }


def find_drift(
    reference: Mapping[str, Tensor],
    lines: Mapping[str, Tensor],
    classes: Sequence[str],
    times: Sequence[str | None],
    **about: Any,
) -> Drift:
    """The result of `stream_tests`; `times` are those of the lines, `about` other fields of it."""
    windows, tests = stream_tests(reference, lines)
    lowest = {name: float(one.min()) for name, one in tests.items()}
    sizes = lines["answers"].sum(1).long()
    found = Drift(
        images=int(sizes.sum()),
        reference=int(reference["answers"].sum()),
        p_values={name: min(math.exp(value), 1.0) for name, value in lowest.items()},
        **about,
    )
    strongest = min(lowest, key=lowest.__getitem__)
    if lowest[strongest] > math.log(ALPHA):
        return found
    alarms = torch.stack([*tests.values()]).amin(0) <= math.log(ALPHA)
    end = int(windows.end[tests[strongest].argmin()])
    start = change_point(reference[strongest], lines[strongest][:end])
    changed = []
    for name, (more, fewer) in DIRECTIONS.items():
        if name in tests and lowest[name] <= math.log(ALPHA):
            places = torch.arange(len(reference[name]), dtype=torch.float64)
            now, before = lines[name][start:end].sum(0), reference[name]
            rise = now @ places / now.sum() > before @ places / before.sum()
            changed.append(more if rise else fewer)
    now, before = lines["answers"][start:end].sum(0), reference["answers"]
    tails = log_tail(now, now.sum(), before, found.reference).exp()
    p_values = holm((2 * tails).clamp(max=1).tolist())
    shares = [(one / one.sum()).tolist() for one in (before, now)]
    rows = zip(classes, *shares, p_values, strict=True)
    named = [ChangedClass(*row) for row in rows if row[3] <= ALPHA]
    named.sort(key=lambda one: -abs(one.now - one.reference))
    return replace(
        found,
        since=int(sizes[:start].sum()) + 1,
        since_time=times[start],
        noticed=int(sizes[: int(windows.end[alarms].min())].sum()),
        changed=changed,
        classes=named,
    )
