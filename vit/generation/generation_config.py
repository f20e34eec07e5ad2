"""What is asked of a search for sentences, what it asks of a decoder, and what it gives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vit.config.config_section import Section
from vit.errors import WeightsError


class Continuation(Protocol):
    """A decoder with its caches, of the rows that are still being written."""

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, new tokens) int64 -> logits of what follows the last of them, (rows, vocab)"""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order, (kept,) int64; one may come twice, or not at all."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of one image.

    Args:
        ids: Its words, without begin and end.
        score: Sum of the log probabilities that the network gives to its words, and to the end
            where it has ended; no filter, temperature or penalty touches it.
        ended: Whether the network ended it; otherwise it has `max_tokens` words.
    """

    ids: tuple[int, ...]
    score: float
    ended: bool


def sentence(ids: Sequence[int], score: float, *, ended: bool) -> Sentence:
    """A Sentence whose score is a number.

    Raises:
        WeightsError: It is not, as where the logits are nan, or allow no word at all.
    """
    if not math.isfinite(score):
        raise WeightsError(
            f"a sentence has the log probability {score}: the network's logits are not numbers; "
            "check its weights, or try precision float32"
        )
    return Sentence(tuple(ids), score, ended)


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    """How sentences are looked for; as it stands, every word is the likeliest one.

    Raises:
        ConfigError: A setting is out of range, or has no effect beside another one.
    """

    beams: int = 1
    """Sentences of an image that are written side by side; 1 takes the likeliest word."""
    n_best: int = 1
    """Sentences that an image gets, the best first; at most `beams`."""
    length_penalty: float = 1.0
    """Beams are compared by score / tokens**length_penalty, the end being a token; 0 is off."""
    temperature: float = 0.0
    """Words are drawn from softmax(logits / temperature); 0 takes the likeliest."""
    top_k: int = 0
    """Draw among this many of the likeliest words; 0 is all."""
    top_p: float = 1.0
    """Draw among the fewest words that have this share of the probability (arXiv:1904.09751)."""
    repetition_penalty: float = 1.0
    """Makes words that a sentence has already less likely; 1 is off (arXiv:1909.05858)."""
    min_tokens: int = 1
    """Words before a sentence may end."""
    max_tokens: int = 0
    """Words after which a sentence stops, unended; 0: as many as the decoder has places for."""
    seed: int = 0
    """Decides what is drawn."""

    def __post_init__(self) -> None:
        self.check_least(1, "beams", "n_best")
        self.check_least(0, "top_k", "min_tokens", "max_tokens", "seed")
        self._check_between("length_penalty", -10, 10)
        self._check_between("repetition_penalty", 1, 100)
        if self.temperature != 0:
            self._check_between("temperature", 0.001, 1000, "0, or ")
        self.check_above(0, "top_p")
        self.check_share("top_p", one=True)
        if self.n_best > self.beams:
            self.refuse("n_best", f"is more than beams={self.beams}")
        if self.max_tokens and self.min_tokens > self.max_tokens:
            self.refuse("min_tokens", f"is more than max_tokens={self.max_tokens}")
        if self.beams > 1 and self.temperature:
            self.refuse("beams", f"draws no words; set beams=1, or not {self._said('temperature')}")
        if self.seed and not self.temperature:
            self.refuse("seed", "draws nothing; set temperature, such as 1.0")
        if self.beams == 1 and self.length_penalty not in (0, 1):
            self.refuse("length_penalty", "compares beams; set beams to more than 1")
        for name, off in (("top_k", 0), ("top_p", 1)):
            if getattr(self, name) != off and not self.temperature:
                self.refuse(name, "needs words that are drawn; set temperature, such as 1.0")

    def _said(self, name: str) -> str:
        return f"{name}={getattr(self, name)!r}"

    def _check_between(self, name: str, least: float, most: float, other: str = "") -> None:
        if not least <= getattr(self, name) <= most:
            self.refuse(name, f"must be {other}from {least} to {most}")
