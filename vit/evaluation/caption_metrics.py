"""Caption metrics: BLEU, ROUGE-L, chrF, CIDEr-D, and the shares of distinct and exact captions.

BLEU, ROUGE-L and CIDEr compare words, which are found in text of any script. METEOR and SPICE are
left out: they need Java and English word lists.

Source: CIDEr-D: Vedantam, Zitnick and Parikh, section 4 and appendix, arXiv:1411.5726.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

MIN_SHUFFLED_GAP = 0.01
"""Smallest increase of the loss with other images, relative, of a decoder that uses the image."""
# Letters of scripts that put no spaces between words, by how Unicode names them
UNSPACED = (
    "CJK ", "IDEOGRAPHIC ", "VERTICAL IDEOGRAPHIC ", "HIRAGANA ", "HENTAIGANA ", "KATAKANA",
    "HALFWIDTH KATAKANA", "VERTICAL KANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ",
)  # fmt: skip
SAME = str.maketrans({"\u2019": "'", "\uff07": "'", "\u2010": "-", "\u2011": "-"})
"""Typographic apostrophes and hyphens, as a keyboard writes them."""

# The kind of a character, one letter each; WORD is a pattern over kinds, never over characters.
KINDS = {
    "'": "q", "-": "h", ".": "s", ",": "s", ":": "s", "/": "s",
    "\u200c": "j",  # joins or separates letters of one word in Persian and in India
    "\u200d": "j",  # and joins emoji
}  # fmt: skip
LETTER = "[ad][mj]*"
WORD = re.compile(
    "|".join(
        [
            "em*(?:jem*)*",
            "c[mj]*",
            f"q?(?:{LETTER})+(?:(?:[qh]|(?<=d)s(?=d))(?:{LETTER})+)*",
        ]
    )
)
CLITIC = re.compile("(?:n't|'(?:s|m|d|re|ve|ll))$")


def words(caption: str) -> list[str]:
    """The words of `caption`, in lower case, in NFC and without punctuation.

    A word is a run of letters and digits; combining marks stay with the letter before them. A
    hyphen or an apostrophe between letters and `.,:/` between digits are part of the word.
    English endings are words of their own, as in the Penn Treebank and so in COCO's scores:
    "isn't" gives "is", "n't"; "man's" gives "man", "'s". Scripts without spaces (Han, kana,
    Thai, Lao, Khmer, Myanmar) give one word a character. A symbol is a word, and so is an emoji
    with those joined to it.

    COCO's tokeniser also cuts a few words without a mark ("cannot", "gonna") and keeps `&`, `%`,
    `#`, `@`, `/` and `*`, which are punctuation here.
    """
    text = unicodedata.normalize("NFC", caption.lower()).translate(SAME)
    kinds = text.translate(_kinds)
    found: list[str] = []
    for match in WORD.finditer(kinds):
        word = text[match.start() : match.end()]
        if CLITIC.fullmatch(word) is None:
            word = word.removeprefix("'")  # a quotation mark
        ending = CLITIC.search(word)
        cut = ending.start() if ending else 0
        found += [part for part in (word[:cut], word[cut:]) if part]
    return found


class _Kinds(dict[int, str]):
    """The kind of every character by its number, filled on demand; a space separates words."""

    def __missing__(self, number: int) -> str:
        character = chr(number)
        name, category = unicodedata.name(character, ""), unicodedata.category(character)
        kind = {"L": "a", "N": "d", "M": "m", "S": "e"}.get(category[0], " ")
        if category == "Sk":  # accents that stand alone
            kind = " "
        if name.startswith(UNSPACED) and category[0] in "LN" and category != "Nd":
            kind = "c"
        self[number] = KINDS.get(character, kind)
        return self[number]


_kinds = _Kinds()


ORDERS = 4
"""The longest n-grams of CIDEr, in words."""
SIGMA = 6.0
"""Width, in words, of CIDEr's penalty of different lengths."""

Ngram = tuple[str, ...]


def cider(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> float:
    """Mean CIDEr-D over the images, in [0, 10]; captions are given as words.

    CIDEr-D(c, S) = 10/4 Σₙ 1/|S| Σₛ exp(-(l(c) - l(s))²/2·6²) min(gc, gs)·gs / |gc||gs|

    where l is the length in words, and gc, gs hold the counts of the n-grams of c and of s times
    log(images / images whose references have the n-gram). An n-gram that all images share
    weighs nothing: the score of one image alone is 0, and so is that of images whose
    references are the same.
    """
    counts = [[count_ngrams(reference) for reference in row] for row in references]
    frequency = Counter(ngram for row in counts for ngram in set().union(*row))
    rarity = {ngram: math.log(len(counts) / images) for ngram, images in frequency.items()}
    unseen = math.log(len(counts))

    def weigh(ngrams: Counter[Ngram]) -> list[dict[Ngram, float]]:
        """The weight of each n-gram, one table an order."""
        tables: list[dict[Ngram, float]] = [{} for _ in range(ORDERS)]
        for ngram, count in ngrams.items():
            tables[len(ngram) - 1][ngram] = count * rarity.get(ngram, unseen)
        return tables

    scores = []
    for hypothesis, captions, row in zip(hypotheses, references, counts, strict=True):
        ours = weigh(count_ngrams(hypothesis))
        parts = [
            math.exp(-((len(hypothesis) - len(caption)) ** 2) / (2 * SIGMA**2))
            * clipped_cosine(ours, weigh(ngrams))
            for caption, ngrams in zip(captions, row, strict=True)
        ]
        scores.append(10 * math.fsum(parts) / len(parts))
    return math.fsum(scores) / len(scores)


def count_ngrams(caption: Sequence[str]) -> Counter[Ngram]:
    """How often each run of 1 to 4 words occurs."""
    found: Counter[Ngram] = Counter()
    for order in range(1, ORDERS + 1):
        found.update(zip(*(caption[start:] for start in range(order)), strict=False))
    return found


def clipped_cosine(
    ours: Sequence[dict[Ngram, float]], theirs: Sequence[dict[Ngram, float]]
) -> float:
    """min(gc, gs)·gs / |gc||gs|, mean over the orders; one without weights counts as 0."""
    cosines = []
    for here, there in zip(ours, theirs, strict=True):
        norms = [math.sqrt(math.fsum(w * w for w in table.values())) for table in (here, there)]
        if all(norms):
            shared = here.keys() & there.keys()
            dot = math.fsum(min(here[ngram], there[ngram]) * there[ngram] for ngram in shared)
            cosines.append(dot / (norms[0] * norms[1]))
    return math.fsum(cosines) / ORDERS


BETA = 1.2
"""How much more recall weighs than precision in ROUGE-L."""


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """All scores of `hypotheses`, one an image, against at least one reference an image.

    `bleu1` to `bleu4`, `rouge_l` and `cider` compare words (`words`); `chrf`, `distinct` and
    `exact` the text in NFC with single spaces. All are shares in [0, 1] but `cider`, in [0, 10],
    and do not depend on the order of the images:

    - bleu1 ... bleu4: of the whole set, not smoothed: 0 where no hypothesis has an n-gram right.
    - rouge_l: mean over the images.
    - cider: CIDEr-D with document frequencies of these references.
    - chrf: chrF2 of the whole set; of each image against the reference that fits best, of equal
      ones the first.
    - distinct: different hypotheses, over all.
    - exact: hypotheses that equal one of their references, over all.
    """
    texts = [normalize(text) for text in hypotheses]
    true_texts = [[normalize(text) for text in row] for row in references]
    found = [words(text) for text in texts]
    true = [[words(text) for text in row] for row in true_texts]
    rouges = [rouge_l(caption, row) for caption, row in zip(found, true, strict=True)]
    hits = sum(text in row for text, row in zip(texts, true_texts, strict=True))
    return {
        **bleu(found, true),
        "rouge_l": math.fsum(rouges) / len(rouges),
        "cider": cider(found, true),
        "chrf": chrf(texts, true_texts),
        "distinct": len(set(texts)) / len(texts),
        "exact": hits / len(texts),
    }


def normalize(text: str) -> str:
    """`text` in NFC, with one space for any run of white space and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def bleu(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> dict[str, float]:
    """bleu1 to bleu4 of the whole set; captions are given as words.

    The length of an image's reference is the one nearest to the hypothesis, of two the shorter.

    Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation",
    ACL 2002; computed by sacrebleu.
    """
    from sacrebleu.metrics.bleu import BLEU

    joined = [[" ".join(reference) for reference in row] for row in references]
    counts = BLEU(tokenize="none", force=True).corpus_score(
        [" ".join(caption) for caption in hypotheses], list(zip_longest(*joined))
    )
    scores = {}
    for order in range(1, 5):
        part = BLEU.compute_bleu(
            counts.counts[:order],
            counts.totals[:order],
            counts.sys_len,
            counts.ref_len,
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
    """ROUGE-L of one image as COCO computes it; captions are given as words.

    F = (1 + β²) P R / (R + β² P), where P and R are the greatest precision and the greatest recall
    over the references, perhaps of two of them. An empty caption is one empty word.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", section 3, 2004.
    """
    caption, true = hypothesis or [""], [reference or [""] for reference in references]
    common = [lcs_length(caption, reference) for reference in true]
    precision = max(common) / len(caption)
    recall = max(length / len(reference) for length, reference in zip(common, true, strict=True))
    if precision == 0:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def ignores_image(loss: float, shuffled_loss: float, exact: float) -> bool:
    """Whether a decoder does: its loss is hardly lower than that with other images, and not all of
    its captions (a share of `exact`) are right, since those of other images are then the same."""
    return shuffled_loss - loss <= MIN_SHUFFLED_GAP * loss and exact < 1


def lcs_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence; a row of the table is the bits of one integer.

    Source: Hyyrö, "Bit-Parallel LCS-length Computation Revisited", section 3, AWOCA 2004.
    """
    positions: dict[str, int] = {}
    for index, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << index
    row = full = (1 << len(first)) - 1
    for word in second:
        matches = row & positions.get(word, 0)
        row = (row + matches) | (row - matches)
    return len(first) - (row & full).bit_count()
