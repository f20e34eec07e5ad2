"""CIDEr-D: how much a caption says what people say of this picture and of few others.

Source: Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation",
section 4 and the appendix on CIDEr-D, arXiv:1411.5726.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ORDERS = 4
SIGMA = 6.0  # words; how far the lengths may be apart
SCALE = 10.0

Words = Sequence[str]
Gram = tuple[str, ...]


@dataclass(frozen=True)
class Weighed:
    """One caption as weights of its n-grams.

    Args:
        length: Words.
        weights: Of each n-gram how often it occurs times its rarity; one table an order n.
        norms: Euclidean length of each table.
    """

    length: int
    weights: tuple[dict[Gram, float], ...]
    norms: tuple[float, ...]


def cider(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> float:
    """Mean CIDEr-D over the pictures, in [0, 10]; captions are given as words.

    CIDEr-D(c, S) = 10/4 Σₙ 1/|S| Σₛ exp(-(l(c) - l(s))²/2·6²) min(gc, gs)·gs / |gc||gs|

    where l is the length in words, and gc, gs hold the counts of the n-grams of c and of s times
    log(pictures / pictures whose references have the n-gram). An n-gram that all pictures share
    weighs nothing: the score of one picture alone is 0, and so is that of pictures whose
    references are the same.
    """
    counted = [[grams(reference) for reference in row] for row in references]
    frequency = Counter(gram for row in counted for gram in set().union(*row))
    rarity = {gram: math.log(len(counted) / pictures) for gram, pictures in frequency.items()}
    unseen = math.log(len(counted))
    scores = []
    for hypothesis, captions, row in zip(hypotheses, references, counted, strict=True):
        ours = weigh(hypothesis, grams(hypothesis), rarity, unseen)
        parts = [
            likeness(ours, weigh(caption, counts, rarity, unseen))
            for caption, counts in zip(captions, row, strict=True)
        ]
        scores.append(SCALE * math.fsum(parts) / len(parts))
    return math.fsum(scores) / len(scores)


def grams(caption: Words) -> Counter[Gram]:
    """How often each run of 1 to 4 words occurs."""
    found: Counter[Gram] = Counter()
    for order in range(1, ORDERS + 1):
        found.update(zip(*(caption[start:] for start in range(order)), strict=False))
    return found


def weigh(
    caption: Words, counts: Counter[Gram], rarity: dict[Gram, float], unseen: float
) -> Weighed:
    """`caption` with n-grams `counts`; one that no reference has is as rare as `unseen`."""
    weights: tuple[dict[Gram, float], ...] = tuple({} for _ in range(ORDERS))
    for gram, count in counts.items():
        weights[len(gram) - 1][gram] = count * rarity.get(gram, unseen)
    norms = tuple(math.sqrt(math.fsum(w * w for w in table.values())) for table in weights)
    return Weighed(len(caption), weights, norms)


def likeness(ours: Weighed, theirs: Weighed) -> float:
    """Clipped cosine, mean over the orders, times the penalty of the lengths; in [0, 1].

    An order whose n-grams weigh nothing, or that has none, counts as 0.
    """
    cosines = [
        math.fsum(min(w, there[gram]) * there[gram] for gram, w in here.items() if gram in there)
        / (here_norm * there_norm)
        for here, there, here_norm, there_norm in zip(
            ours.weights, theirs.weights, ours.norms, theirs.norms, strict=True
        )
        if here_norm and there_norm
    ]
    penalty = math.exp(-((ours.length - theirs.length) ** 2) / (2 * SIGMA**2))
    return penalty * math.fsum(cosines) / ORDERS
