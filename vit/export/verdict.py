"""What came of comparing an exported file with its run: numbers, limits, and words for people."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from vit.errors import printable

HAND, PREDICTOR = "by hand", "predictor"


class Limits(NamedTuple):
    """What two ways may differ by."""

    agreement: float
    """Share of the pictures that must have the same answer."""
    difference: float
    """Largest difference of two probabilities."""


LIMITS = {
    "fp32": Limits(0.995, 0.02),
    "fp16": Limits(0.98, 0.05),
    "int8": Limits(0.9, 0.5),
}
"""By the arithmetic of the file; of fp16 and int8 the agreement decides, the other is a fuse."""


@dataclass(frozen=True)
class Compared:
    """How far one way is from that by hand.

    Args:
        name: Of the way.
        images: Pictures that both have answered.
        top1_agreement: Share of them with the same first class, and the same caption. Where a
            picture may have several classes, the mean share that both name of those that one does.
        max_probability_difference: The largest difference of two probabilities.
        worst: The picture of that difference, or None where there is none.
        limits: What is allowed.
    """

    name: str
    images: int
    top1_agreement: float
    max_probability_difference: float
    worst: str | None
    limits: Limits

    @property
    def agrees(self) -> bool:
        """Whether it is within its limits."""
        return (
            self.top1_agreement >= self.limits.agreement
            and self.max_probability_difference <= self.limits.difference
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "images": self.images,
            "top1_agreement": self.top1_agreement,
            "max_probability_difference": self.max_probability_difference,
            "worst": self.worst,
            "least_agreement": self.limits.agreement,
            "most_difference": self.limits.difference,
            "agrees": self.agrees,
        }

    def line(self) -> str:
        """How far it is from that by hand, and how far it may be."""
        least, most = self.limits
        return (
            f"same answer {self.top1_agreement:.2%} (at least {least:.1%}), largest difference "
            f"{self.max_probability_difference:.2g} (at most {most:g})"
        )

    def complaint(self) -> str:
        """By how much it differs, and on which picture most."""
        wrong = round((1 - self.top1_agreement) * self.images)
        return (
            f"{printable(self.name)} is not the network of the run: another answer for {wrong} of "
            f"{self.images} pictures, probabilities differ by up to "
            f"{self.max_probability_difference:.3f}, most on {printable(self.worst)}"
        )


@dataclass(frozen=True)
class Verification:
    """What came of a comparison.

    Args:
        images: Pictures that every way has answered.
        paths: The ways; the first is what the others are compared with.
        failures: Pictures that a way did not answer, each {"image", "path", "error"}.
        causes: What is not as it must be, one sentence each.
        precision: What the file says that it computes in, which sets its limits; None without one.
    """

    images: int
    paths: tuple[Compared, ...]
    failures: tuple[dict[str, str], ...] = ()
    causes: tuple[str, ...] = ()
    precision: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the answers are the same, and the file says of itself what the run says."""
        return all(path.agrees for path in self.paths) and not self.causes

    @property
    def top1_agreement(self) -> float:
        """The least of all ways."""
        return min(path.top1_agreement for path in self.paths)

    @property
    def max_probability_difference(self) -> float:
        """The largest of all ways."""
        return max(path.max_probability_difference for path in self.paths)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "images": self.images,
            "top1_agreement": self.top1_agreement,
            "max_probability_difference": self.max_probability_difference,
            "agrees": self.agrees,
            "precision": self.precision,
            "paths": [path.to_dict() for path in self.paths],
            "causes": list(self.causes),
            "failed": list(self.failures),
        }

    def lines(self) -> list[str]:
        """The numbers for reading."""
        first, *others = self.paths
        width = max(len(printable(path.name)) for path in self.paths)
        lines = [f"{'images':<{width}}  {self.images}"]
        lines.append(f"{first.name:<{width}}  the saved preprocessing and the network, in float32")
        lines += [f"{printable(path.name):<{width}}  {path.line()}" for path in others]
        if self.precision is not None:
            lines.append(f"{'':<{width}}  its limits are those of {self.precision}, as it says")
        return [*lines, self.conclusion]

    @property
    def conclusion(self) -> str:
        """The last line: what somebody reads who reads one."""
        if not self.agrees:
            return "they do not agree"
        left_out = len({failure["image"] for failure in self.failures})
        if left_out:
            return f"{self.images} agree, and {left_out} could not be compared"
        return "all agree"

    def complaints(self) -> list[str]:
        """What is wrong, a line each: which way, by how much, where; then likely causes."""
        lines = [path.complaint() for path in self.paths if not path.agrees]
        return lines + [f"likely cause: {cause}" for cause in self.causes]
