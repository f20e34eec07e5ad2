"""Caption metrics: BLEU, ROUGE-L, chrF, CIDEr-D, and the shares of distinct and exact captions.

Captions of any script are cut into words for BLEU, ROUGE-L and CIDEr. METEOR and SPICE are left
out: they need Java and English word lists.

Source: CIDEr-D: Vedantam, Zitnick and Parikh, section 4 and appendix, arXiv:1411.5726.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Letters of scripts that put no spaces between words, by how Unicode names them
UNSPACED = (
    "CJK ", "IDEOGRAPHIC ", "VERTICAL IDEOGRAPHIC ", "HIRAGANA ", "HENTAIGANA ", "KATAKANA",
    "HALFWIDTH KATAKANA", "VERTICAL KANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ",
)  # fmt: skip
SAME = str.maketrans({"\u2019": "'", "\uff07": "'", "\u2010": "-", "\u2011": "-"})
"""Typographic apostrophes and hyphens, as a keyboard writes them."""

# The kinds of characters, one letter each; a pattern runs over kinds, never over characters.
KINDS = {
    "'": "q", "-": "h", ".": "s", ",": "s", ":": "s", "/": "s",
    "\u200c": "j",  # joins or parts letters of one word in Persian and in India
    "\u200d": "j",  # and glues emoji to one
    "\U000e007f": "g",  # ends the letters of a region's flag
    "\ufe0f": "v",  # makes an emoji of the character before
}  # fmt: skip
LETTER = "[ad][mvj]*"
IMAGE = "[et][mvtg]*"
WORD = re.compile(
    "|".join(
        [
            f"rr[mvtg]*|r|{IMAGE}(?:j{IMAGE})*",  # a flag; an emoji, or a symbol
            "[qhsp]v[mv]*",  # an emoji made of punctuation
            "c[mvj]*",
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
    with its skin tone, the emoji joined to it, and both halves of a flag.

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
    """Kind of every character by its number; found when it is first met."""

    def __missing__(self, number: int) -> str:
        self[number] = _kind(chr(number))
        return self[number]


def _kind(character: str) -> str:
    """One letter; a space for what parts words and is never in one."""
    name, category = unicodedata.name(character, ""), unicodedata.category(character)
    if character in KINDS:
        return KINDS[character]
    if name.startswith("REGIONAL INDICATOR"):
        return "r"
    if name.startswith("EMOJI MODIFIER"):
        return "t"
    if name.startswith("TAG "):
        return "g"
    if name.startswith(UNSPACED) and category[0] in "LN" and category != "Nd":
        return "c"
    if category == "Sk":
        return "p"
    return {"L": "a", "N": "d", "M": "m", "S": "e", "P": "p"}.get(category[0], " ")


_kinds = _Kinds()


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
    """Mean CIDEr-D over the images, in [0, 10]; captions are given as words.

    CIDEr-D(c, S) = 10/4 Σₙ 1/|S| Σₛ exp(-(l(c) - l(s))²/2·6²) min(gc, gs)·gs / |gc||gs|

    where l is the length in words, and gc, gs hold the counts of the n-grams of c and of s times
    log(images / images whose references have the n-gram). An n-gram that all images share
    weighs nothing: the score of one image alone is 0, and so is that of images whose
    references are the same.
    """
    counted = [[grams(reference) for reference in row] for row in references]
    frequency = Counter(gram for row in counted for gram in set().union(*row))
    rarity = {gram: math.log(len(counted) / images) for gram, images in frequency.items()}
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


BETA = 1.2  # of ROUGE-L: how much more recall weighs than precision


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Every score of the captions `hypotheses`; one and at least one reference an image.

    `bleu1` to `bleu4`, `rouge_l` and `cider` compare words (`words`); `chrf`,
    `distinct` and `exact` the text as it is, in NFC, where white space of any kind and length is
    one space. The order of the images is of no account. All are shares in [0, 1] but `cider`,
    in [0, 10]:

    - bleu1 ... bleu4: of the whole set, not smoothed: 0 where no hypothesis has an n-gram right.
    - rouge_l: mean over the images.
    - cider: CIDEr-D with document frequencies of these references. An n-gram that every image
      has weighs nothing: the score of a single image is 0, whatever its caption says.
    - chrf: chrF2 of the whole set; of each image against the reference that fits best, of equal
      ones the first.
    - distinct: different hypotheses, over all.
    - exact: hypotheses that equal one of their references, over all.

    Raises:
        ValueError: There is no image, one has no reference, or the lengths differ.
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
            f"{len(hypotheses)} hypotheses and references of {len(references)} images: "
            "need one hypothesis an image"
        )
    if not hypotheses:
        raise ValueError("no caption to score")
    for number, row in enumerate(references):
        if isinstance(row, str):
            raise ValueError(f"the references of image {number} are one string; need a list")
        if not row:
            raise ValueError(f"image {number} has no reference")


def plain(text: str) -> str:
    """`text` in NFC, with one space for any run of white space and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def bleu(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> dict[str, float]:
    """bleu1 to bleu4 of the whole set; of captions given as words.

    The length of an image's reference is the one nearest to the hypothesis, of two the shorter.

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
    """ROUGE-L of one image, as COCO has it: captions are given as words.

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
