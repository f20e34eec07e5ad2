"""A sentence in words; without torch, for those who run exported networks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caption:
    """A sentence in words.

    Args:
        text: For people.
        score: Sum of the log probabilities of its tokens, the end included.
        ids: Its tokens, without begin and end.
        ended: Whether it came to its end by itself.
    """

    text: str
    score: float
    ids: tuple[int, ...]
    ended: bool
