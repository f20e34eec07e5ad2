"""Scores of captions against pycocoevalcap and sacrebleu, and against examples by hand."""

import json
import math
import os
import random
import subprocess
import sys
import unicodedata
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

import pytest
from sacrebleu.metrics import CHRF

from vit.evaluation.caption_metrics import caption_scores, lcs_length, normalize, rouge_l, words

FOLDER = Path(__file__).parent
ROWS = json.loads((FOLDER / "captions_100.json").read_text(encoding="utf-8"))
COCO = json.loads((FOLDER / "pycocoevalcap_scores.json").read_text(encoding="utf-8"))
"""What pycocoevalcap 1.2 says of the same words, joined by spaces."""
HYPOTHESES = [row["hypothesis"] for row in ROWS]
REFERENCES = [row["references"] for row in ROWS]
LN2 = math.log(2)


def test_bleu_equals_pycocoevalcap():
    scores = caption_scores(HYPOTHESES, REFERENCES)
    ours = [scores[f"bleu{order}"] for order in range(1, 5)]
    assert ours == pytest.approx(COCO["bleu"], abs=1e-10)  # theirs adds 1e-9 to every count
    assert 0.1 < ours[3] < ours[0] < 0.9
    assert {type(value) for value in scores.values()} == {float}


def test_bleu_is_0_where_pycocoevalcap_has_its_tiny_constant():
    told, true = ["a red dog runs home"], [["a red dog sat home", "a dog"]]
    expected = COCO["bleu_of_one"]
    scores = caption_scores(told, true)
    right = Fraction(4, 5) * Fraction(2, 4) * Fraction(1, 3)  # and 0 of 2 runs of four words
    assert scores["bleu3"] == pytest.approx(expected[2], abs=1e-8)
    assert scores["bleu3"] == pytest.approx(float(right) ** (1 / 3), abs=1e-12)
    assert scores["bleu4"] == 0.0
    assert expected[3] == pytest.approx(float(right * Fraction(1e-15) / 2) ** (1 / 4), rel=1e-8)


def test_rouge_l_equals_pycocoevalcap():
    scores = caption_scores(HYPOTHESES, REFERENCES)
    assert scores["rouge_l"] == pytest.approx(COCO["rouge_l"], abs=1e-12)
    for told, true, expected in zip(HYPOTHESES, REFERENCES, COCO["rouge_l_each"], strict=True):
        score = rouge_l(words(told), [words(text) for text in true])
        assert score == pytest.approx(expected, abs=1e-12)


def test_cider_equals_pycocoevalcap():
    scores = caption_scores(HYPOTHESES, REFERENCES)
    assert scores["cider"] == pytest.approx(COCO["cider"], abs=1e-10)
    assert 0.5 < COCO["cider"] < 5


def test_chrf_equals_sacrebleu():
    told = [normalize(text) for text in HYPOTHESES]
    # the first reference of every image, the second, ...; None where there is none
    true = [*zip_longest(*([normalize(text) for text in row] for row in REFERENCES))]
    expected = CHRF().corpus_score(told, true)
    score = caption_scores(HYPOTHESES, REFERENCES)["chrf"]
    assert score == pytest.approx(expected.score / 100, abs=1e-12)
    assert 0.3 < score < 0.9


def test_cider_is_0_where_no_word_tells_images_apart():
    text = "a man rides a brown horse"
    assert caption_scores([text], [[text]])["cider"] == 0.0
    assert caption_scores([text] * 3, [[text]] * 3)["cider"] == 0.0


def test_exact_and_distinct_by_hand():
    told = ["A dog.", "a dog.", " A \n dog. ", "cafe\u0301", ""]
    true = [["A cat.", "A dog."], ["A dog."], ["A dog."], ["caf\u00e9"], ["A dog"]]
    scores = caption_scores(told, true)
    assert scores["exact"] == 3 / 5
    assert scores["distinct"] == 4 / 5
    assert caption_scores([""], [["", "a"]])["exact"] == 1.0


def test_perfect_captions():
    told = ["a man rides a horse", "two birds sit on wires", "the red bus stops here now"]
    scores = caption_scores(told, [[text, text] for text in told])
    assert scores.pop("cider") == pytest.approx(10)
    assert scores == pytest.approx(dict.fromkeys(scores, 1.0))
    assert max(scores.values()) == 1.0
    assert len(scores) == 8


def test_the_order_of_images_changes_nothing():
    order = random.Random(0).sample(range(100), 100)
    mixed = caption_scores([HYPOTHESES[i] for i in order], [REFERENCES[i] for i in order])
    assert order != sorted(order)
    assert mixed == caption_scores(HYPOTHESES, REFERENCES)


def test_seeds_of_hashes_change_nothing():
    code = (
        "import json, sys; from vit.evaluation.caption_metrics import caption_scores;"
        "rows = json.load(open(sys.argv[1], encoding='utf-8'));"
        "told, true = zip(*((row['hypothesis'], row['references']) for row in rows));"
        "print(json.dumps(caption_scores(told, true)))"
    )
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # than that of this process
    run = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / "captions_100.json")],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(run.stdout) == caption_scores(HYPOTHESES, REFERENCES)


def test_empty_captions_score_0():
    scores = caption_scores(["", "", "?!"], [["a dog"], ["a cat", "cats"], ["a bird"]])
    assert scores.pop("distinct") == 2 / 3
    assert scores == dict.fromkeys(scores, 0.0)


def test_common_words_equal_the_table_of_pycocoevalcap():
    draw = random.Random(0)
    assert len(COCO["common_words"]) == 300
    for expected in COCO["common_words"]:
        first, second = (draw.choices("abcd", k=draw.randint(0, 12)) for _ in range(2))
        assert lcs_length(first, second) == expected, (first, second)


def test_a_caption_of_ten_thousand_words():
    text = [f"w{number}" for number in range(10_000)]
    assert lcs_length(text, text[10:] + text[:10]) == 9_990
    assert lcs_length(["a"] * 10_000, ["a"] * 9_000) == 9_000
    scores = caption_scores([" ".join(text), "a b"], [[" ".join(text[::-1])], ["b"]])
    assert scores["rouge_l"] == pytest.approx((1e-4 + 2.44 * 0.5 / (1 + 1.44 * 0.5)) / 2)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A dog, \"running\" (fast)... at 'home'!", "a dog running fast at home"),
        (
            "The man's dogs' T-shirt isn\u2019t O\u2011shaped",
            "the man 's dogs t-shirt is n't o-shaped",
        ),
        ("a man 's hat did n't fit -- well -", "a man 's hat did n't fit well"),
        ("3.5 m at 10:30, 1,000 times. 7", "3.5 m at 10:30 1,000 times 7"),
        ("snake_case a/b", "snake case a b"),
        ("Une ÉGLISE d'été", "une église d'été"),
        ("ΣΊΣΥΦΟΣ и ЁЖ", "σίσυφος и ёж"),
        ("一只狗在T恤上。", "一 只 狗 在 t 恤 上"),
        ("テレビを見る々", "テ レ ビ を 見 る 々"),
        ("개 두 마리", "개 두 마리"),
        ("ตัวที่ ๑๒", "ตั ว ที่ ๑๒"),
        ("ລາວ ខ្មែរ မြန်မာ", "ລ າ ວ ខ្ មែ រ မြ န် မာ"),
        ("क्षत्रिय می‌خواهم", "क्षत्रिय می‌خواهم"),
        ("cake🎂🎂 10°C $5", "cake 🎂 🎂 10 ° c $ 5"),
        ("👨‍👩‍👧❤️ 1️⃣ 👍🏽🇩🇪", "👨‍👩‍👧 ❤️ 1️⃣ 👍 🇩 🇪"),
        ("\u0301 \ud800 \x00", ""),
    ],
)
def test_words(caption, expected):
    assert words(caption) == expected.split()


@pytest.mark.slow
def test_words_of_every_character():
    """None has white space, which the libraries would cut at; and NFC or NFD is the same."""
    found = 0
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in ("Co", "Cn", "Cs"):
            continue
        parts = words(f"a {character} b")
        assert len(" ".join(parts).split()) == len(parts), hex(number)
        assert parts == words(unicodedata.normalize("NFD", f"a {character} b")), hex(number)
        found += len(parts) > 2
    assert found > 100_000


def test_words_of_words_are_the_same():
    texts = [*HYPOTHESES, *(text for row in REFERENCES for text in row)]
    assert all(words(" ".join(words(text))) == words(text) for text in texts)
    assert max(len(words(text)) for text in texts) > 30
