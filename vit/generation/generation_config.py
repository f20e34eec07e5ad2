"""Settings of text generation, its decoder interface, and its results; imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from vit.config.config_section import Section
from vit.errors import WeightsError

if TYPE_CHECKING:  # a server of exported files imports no torch
    from torch import Tensor


class IncrementalDecoder(Protocol):
    """Interface of a decoder with its cache, one row for each unfinished sequence."""

    def __call__(self, ids: "Tensor") -> "Tensor":
        """(rows, new tokens) int64 -> logits of the token after the last one, (rows, vocab)"""

    def select_rows(self, rows: "Tensor") -> None:
        """Keep these rows, in this order, (kept,) int64; a row may be repeated or left out."""


@dataclass(frozen=True)
class Hypothesis:
    """One generated sequence.

    Args:
        ids: Token ids, without begin and end.
        score: Sum of the network's log probabilities of the tokens, and of the end token if
            `ended`, before any filter, temperature or penalty.
        ended: Whether it ends with the end token; otherwise it has `max_tokens` tokens.
    """

    ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class Caption:
    """A generated caption.

    Args:
        text: The decoded text.
        score: Sum of the log probabilities of its tokens, the end token included.
        ids: Token ids, without begin and end.
        ended: Whether it ends with the end token, not at the maximum length.
    """

    text: str
    score: float
    ids: tuple[int, ...]
    ended: bool


def make_hypothesis(ids: Sequence[int], score: float, *, ended: bool) -> Hypothesis:
    """A Hypothesis with a finite score."""
    if not math.isfinite(score):
        raise WeightsError(
            f"a sentence has the log probability {score}: the network's logits are not finite; "
            "check its weights, or try precision float32"
        )
    return Hypothesis(tuple(ids), score, ended)


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    """Generation settings; the default is greedy decoding.

    Raises:
        ConfigError: A setting is out of range, or has no effect beside another one.
    """

    beams: int = 1
    """Number of beams; 1 is greedy decoding or sampling."""
    n_best: int = 1
    """Sequences to return for each image, the best first; at most `beams`."""
    length_penalty: float = 1.0
    """Beams are ranked by score / tokens**length_penalty, the end token included; 0 is off."""
    temperature: float = 0.0
    """Sample from softmax(logits / temperature); 0 is greedy decoding."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the fewest tokens with this probability (arXiv:1904.09751)."""
    repetition_penalty: float = 1.0
    """Penalty on tokens already in the sequence; 1 is off (arXiv:1909.05858)."""
    min_tokens: int = 1
    """Minimum number of tokens before the end token."""
    max_tokens: int = 0
    """Maximum number of tokens; 0: as many as the decoder has positions for."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        self.check_at_least(1, "beams", "n_best")
        self.check_at_least(0, "top_k", "min_tokens", "max_tokens", "seed")
        self._check_between("length_penalty", -10, 10)
        self._check_between("repetition_penalty", 1, 100)
        if self.temperature != 0:
            self._check_between("temperature", 0.001, 1000, "0, or ")
        self.check_above(0, "top_p")
        self.check_fraction("top_p", one=True)
        if self.n_best > self.beams:
            self.refuse("n_best", f"is more than beams={self.beams}")
        if self.max_tokens and self.min_tokens > self.max_tokens:
            self.refuse("min_tokens", f"is more than max_tokens={self.max_tokens}")
        if self.beams > 1 and self.temperature:
            self.refuse(
                "beams",
                f"do not sample; set beams=1, or leave out temperature={self.temperature!r}",
            )
        if self.seed and not self.temperature:
            self.refuse("seed", "only sampling uses it; set temperature, such as 1.0")
        if self.beams == 1 and self.length_penalty not in (0, 1):
            self.refuse("length_penalty", "ranks beams; set beams to more than 1")
        for name, off in (("top_k", 0), ("top_p", 1)):
            if getattr(self, name) != off and not self.temperature:
                self.refuse(name, "only sampling uses it; set temperature, such as 1.0")

    def changes(self) -> dict[str, Any]:
        """Settings that differ from their defaults."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }

    def __str__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in self.changes().items()]
        return ", ".join(changed) or "search"

    def _check_between(self, name: str, low: float, high: float, other: str = "") -> None:
        if not low <= getattr(self, name) <= high:
            self.refuse(name, f"must be {other}from {low} to {high}")
