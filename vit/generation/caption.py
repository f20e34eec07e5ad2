"""Caption: a generated sequence as text. Imports no torch, for exported networks."""

from dataclasses import dataclass


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
