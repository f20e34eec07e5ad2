"""Scores of captions against what people wrote of the same pictures.

METEOR and SPICE are left out: they need Java and word lists of English.
"""

import math
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

from vit.evaluation.cider import cider
from vit.evaluation.words import words

BETA = 1.2  # of ROUGE-L: how much more recall weighs than precision


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Every score of the captions `hypotheses`; one and at least one reference a picture.

    `bleu1` to `bleu4`, `rouge_l` and `cider` compare words (`vit.evaluation.words`); `chrf`,
    `distinct` and `exact` the text as it is, in NFC, where white space of any kind and length is
    one space. The order of the pictures is of no account. All are shares in [0, 1] but `cider`,
    in [0, 10]:

    - bleu1 ... bleu4: of the whole set, not smoothed: 0 where no hypothesis has an n-gram right.
    - rouge_l: mean over the pictures.
    - cider: CIDEr-D with document frequencies of these references. An n-gram that every picture
      has weighs nothing: the score of a single picture is 0, whatever its caption says.
    - chrf: chrF2 of the whole set; of each picture against the reference that fits best, of equal
      ones the first.
    - distinct: different hypotheses, over all.
    - exact: hypotheses that equal one of their references, over all.

    Raises:
        ValueError: There is no picture, one has no reference, or the lengths differ.
    """
    _check(hypotheses, references)
    texts = [plain(text) for text in hypotheses]
    true_texts = [[plain(text) for text in row] for row in references]
    told = [words(text) for text in texts]
    true = [[words(text) for text in row] for row in true_texts]
    rouges = [rouge_l(ours, row) for ours, row in zip(told, true, strict=True)]
    hits = sum(text in row for text, row in zip(texts, true_texts, strict=True))
    return {
        **bleu(told, true),
        "rouge_l": math.fsum(rouges) / len(rouges),
        "cider": cider(told, true),
        "chrf": chrf(texts, true_texts),
        "distinct": len(set(texts)) / len(texts),
        "exact": hits / len(texts),
    }


def _check(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses)} hypotheses and references of {len(references)} pictures: "
            "need one hypothesis a picture"
        )
    if not hypotheses:
        raise ValueError("no caption to score")
    for number, row in enumerate(references):
        if isinstance(row, str):
            raise ValueError(f"the references of picture {number} are one string; need a list")
        if not row:
            raise ValueError(f"picture {number} has no reference")


def plain(text: str) -> str:
    """`text` in NFC, with one space for any run of white space and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def bleu(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> dict[str, float]:
    """bleu1 to bleu4 of the whole set; of captions given as words.

    The length of a picture's reference is the one nearest to the hypothesis, of two the shorter.

    Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation",
    ACL 2002; computed by sacrebleu.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="none", force=True)  # of the whole, only the counts are used
    joined = [[" ".join(reference) for reference in row] for row in references]
    whole = metric.corpus_score([" ".join(told) for told in hypotheses], list(zip_longest(*joined)))
    scores = {}
    for order in range(1, 5):
        part = BLEU.compute_bleu(
            whole.counts[:order],
            whole.totals[:order],
            whole.sys_len,
            whole.ref_len,
            smooth_method="none",
            max_ngram_order=order,
        )
        scores[f"bleu{order}"] = min(part.score / 100, 1.0)  # exp(log(100)) is above 100
    return scores


def chrf(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """chrF2 of the whole set: runs of 1 to 6 characters, white space aside, case kept.

    Source: Popović, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015;
    computed by sacrebleu.
    """
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(hypotheses, list(zip_longest(*references))).score) / 100


def rouge_l(hypothesis: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """ROUGE-L of one picture, as COCO has it: captions are given as words.

    F = (1 + β²) P R / (R + β² P), where P and R are the greatest precision and the greatest recall
    over the references, perhaps of two of them. An empty caption is one empty word.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", section 3, 2004.
    """
    told = hypothesis or [""]
    captions = [reference or [""] for reference in references]
    common = [longest_common(told, caption) for caption in captions]
    precision = max(common) / len(told)
    recall = max(length / len(caption) for length, caption in zip(common, captions, strict=True))
    if precision == 0:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence; a row of the table is the bits of one integer.

    Source: Hyyrö, "Bit-Parallel LCS-length Computation Revisited", section 3, AWOCA 2004.
    """
    places: dict[str, int] = {}
    for index, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << index
    row = full = (1 << len(first)) - 1
    for word in second:
        met = row & places.get(word, 0)
        row = (row + met) | (row - met)
    return len(first) - (row & full).bit_count()
