"""Cuts captions of any script into the words that BLEU, ROUGE-L and CIDEr count."""

import re
import unicodedata

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
PICTURE = "[et][mvtg]*"
WORD = re.compile(
    "|".join(
        [
            f"rr[mvtg]*|r|{PICTURE}(?:j{PICTURE})*",  # a flag; an emoji, or a symbol
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
