"""Settings of text generation, its decoder interface, and its results; imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from vit.config.settings import ON, Section, setting
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
    """A generated caption; all but its text is that of a `Hypothesis`."""

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


SAMPLES = ({"temperature": ON},)


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    """Generation settings; the default is greedy decoding.

    Raises:
        ConfigError: A setting is out of range, or has no effect beside another one.
    """

    beams: int = setting(1, least=1)
    """Number of beams; 1 is greedy decoding or sampling."""
    n_best: int = setting(1, least=1)
    """Sequences to return for each image, the best first; at most `beams`."""
    length_penalty: float = setting(1.0, least=-10, most=10)
    """Beams are ranked by score / tokens**length_penalty, the end token included; 0 is off."""
    temperature: float = setting(0.0, least=0, most=1000)
    """Sample from softmax(logits / temperature); 0 is greedy decoding."""
    top_k: int = setting(0, least=0, read_by=SAMPLES)
    """Sample from the k most likely tokens; 0 is all."""
    top_p: float = setting(1.0, above=0, most=1, read_by=SAMPLES)
    """Nucleus sampling: sample from the fewest tokens with this probability (arXiv:1904.09751)."""
    repetition_penalty: float = setting(1.0, least=1, most=100)
    """Penalty on tokens already in the sequence; 1 is off (arXiv:1909.05858)."""
    min_tokens: int = setting(1, least=0)
    """Minimum number of tokens before the end token."""
    max_tokens: int = setting(0, least=0)
    """Maximum number of tokens; 0: as many as the decoder has positions for."""
    seed: int = setting(0, least=0, read_by=SAMPLES)
    """Seed of sampling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temperature < 0.001:
            self.refuse("temperature", "must be 0, or from 0.001 to 1000")
        if self.n_best > self.beams:
            self.refuse("n_best", f"is more than beams={self.beams}")
        if self.max_tokens and self.min_tokens > self.max_tokens:
            self.refuse("min_tokens", f"is more than max_tokens={self.max_tokens}")
        if self.beams > 1 and self.temperature:
            self.refuse(
                "beams",
                f"do not sample; set beams=1, or leave out temperature={self.temperature!r}",
            )
        if self.beams == 1 and self.length_penalty not in (0, 1):
            self.refuse("length_penalty", "ranks beams; set beams to more than 1")

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
