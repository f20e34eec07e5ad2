"""Tokenizers against the library itself, transformers, and text of every kind."""

import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from collections import Counter

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vit.data.captions import tokenizer as module
from vit.data.captions.tokenizer import (
    BEGIN,
    END,
    PAD,
    Tokenizer,
    default_vocab_size,
    open_tokenizer,
    train_tokenizer,
)
from vit.errors import ConfigError, DataError, VitError, WeightsError

CAPTIONS = """a dog runs on the grass .
two dogs run on the wet grass
A man's dog (a big one).
a red circle left of a blue square
the blue square is red, the circle is not
một con chó chạy trên cỏ
một con mèo trên cỏ
一只红色的狗
一只黑色的狗
مَرْحَبًا كلب
مَرْحَبًا قطة
नमस्ते दुनिया
नमस्ते कुत्ता
family 👩‍👩‍👧 👩‍👩‍👧
12 dogs, 12 cats""".splitlines()
STRANGE = [
    *("", " ", "\t a\n\nb\x1cc\u3000d ", "e\u0301tude \u0301x", "don't  do\u00a0it"),
    *("\x00\x01\x1b[0m", "👩‍👩‍👧‍👦🏽 🇻🇳", "\ufeffBOM \u200b\u200e", "ﷺ ﬁ ²", "हिन्दी में"),
    *("x" * 300, "\U000e0001\U0010ffff", "##ing ## ### #a", "<| end |>"),
    *("<end> [SEP] </s> <|endoftext|> [UNK] <s>", " ##a", "Ġdog ▁a"),
]
RANGES = [(32, 127), (0, 0x250), (0x300, 0x370), (0x600, 0x700), (0x900, 0x980), (0x1E00, 0x2100)]
RANGES += [(0x4E00, 0x4F00), (0x1F300, 0x1F700), (0, 0xD800), (0xE000, 0x110000)]


def normalised(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


def random_texts(number, seed=0):
    draw = random.Random(seed)

    def word():
        low, high = draw.choice(RANGES)
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6)))

    # Unassigned characters may be assigned in the newer of two versions of Unicode.
    texts = (" ".join(word() for _ in range(draw.randint(0, 5))) for _ in range(number))
    return ["".join(sign for sign in text if unicodedata.category(sign) != "Cn") for text in texts]


TEXTS = [*CAPTIONS, *STRANGE, *random_texts(300)]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(CAPTIONS)


def test_bpe_decodes_any_text_to_its_normalised_form(bpe):
    assert len(TEXTS) > 300
    for text, ids in zip(TEXTS, bpe.encode(TEXTS), strict=True):
        assert (
            bpe.decode(ids) == bpe.decode([bpe.begin, *ids, bpe.end, bpe.pad]) == normalised(text)
        )
        assert {bpe.pad, bpe.begin, bpe.end}.isdisjoint(ids)
        assert all(number < bpe.size for number in ids)
    assert bpe.count_unknown(TEXTS) == 0


def test_tokenizers_and_transformers_read_the_file_and_give_the_same_ids(bpe, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(bpe.to_json(), encoding="utf-8")
    library = tokenizers.Tokenizer.from_file(str(file))
    transformers = PreTrainedTokenizerFast(tokenizer_file=str(file))
    again = [Tokenizer.from_json(bpe.to_json()), open_tokenizer(file), open_tokenizer(tmp_path)]
    texts = [text for text in TEXTS if "<| end |>" not in text]
    for text, ids in zip(texts, bpe.encode(texts), strict=True):
        assert library.encode(text).ids == ids
        assert transformers(text)["input_ids"] == ids
        decoded = transformers.decode(ids, skip_special_tokens=True)
        assert decoded == library.decode(ids) == bpe.decode(ids)
        assert all(other.encode([text])[0] == ids for other in again)
    for other in again:
        special = ["pad", "begin", "end", "size"]
        assert [getattr(other, n) for n in special] == [getattr(bpe, n) for n in special]
        assert other.to_json() == bpe.to_json()


def test_words_are_split_at_the_white_space_of_str_split(bpe):
    library = tokenizers.Tokenizer.from_str(bpe.to_json())
    spaces = [chr(code) for code in range(0x3100) if chr(code).isspace()]
    assert len(spaces) > 20
    for space in spaces:
        text = f"{space}a{space} {space}dog{space}"
        assert library.encode(text).ids == bpe.encode([text])[0] == bpe.encode(["a dog"])[0]


def test_bpe_equals_the_library_s_byte_level_bpe_on_plain_words():
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(60)]
    texts = [" ".join(draw.choices(words, k=9)) + draw.choice([".", " !", ""]) for _ in range(200)]
    theirs = tokenizers.ByteLevelBPETokenizer(add_prefix_space=True)
    theirs.train_from_iterator(
        texts,
        vocab_size=330,
        min_frequency=2,
        show_progress=False,
        special_tokens=[PAD, BEGIN, END],
    )
    ours = train_tokenizer(texts, vocab_size=330)
    assert ours.size == theirs.get_vocab_size() == 330
    assert ours.encode(texts) == [theirs.encode(text).ids for text in texts]


def test_words_that_occur_twice_are_tokens_and_words_that_occur_once_are_not():
    texts = ["zebra apple apple, yellow", "yellow. Kiwi मुझे", "मुझे 42 42"]
    tokenizer = train_tokenizer(texts)
    words = ["apple", "yellow", "मुझे", "42"]
    assert [len(ids) for ids in tokenizer.encode(words)] == [1] * 4
    assert all(len(ids) > 1 for ids in tokenizer.encode(["zebra", "Kiwi"]))
    assert len(tokenizer.encode(["apple,"])[0]) == 2
    assert tokenizer.encode(["Apple"]) != tokenizer.encode(["apple"])


def test_scripts_without_spaces_are_split_inside_clauses():
    clauses = ["左上に大きな赤い丸", "右下に小さな青いボールペン", "แมวสีดำ", "红色的猫"]
    tokenizer = train_tokenizer([*clauses, *clauses])
    pieces = [
        [tokenizer.decode([number]) for number in tokenizer.encode([one])[0]] for one in clauses
    ]
    assert pieces == [
        ["左", "上", "に", "大", "きな", "赤", "い", "丸"],
        ["右", "下", "に", "小", "さな", "青", "い", "ボールペン"],
        ["แ", "ม", "ว", "สี", "ด", "ำ"],
        [*"红色的猫"],
    ]
    swapped = "右下に大きな青い丸"  # a new clause has no more tokens than a known one
    assert len(tokenizer.encode([swapped])[0]) == len(pieces[0])
    assert tokenizer.decode(tokenizer.encode([swapped])[0]) == swapped


def test_the_default_vocabulary_grows_with_the_square_root_of_the_words():
    assert [default_vocab_size(2**power) for power in (1, 20, 23, 25, 27, 40)] == [
        *(8192, 8192, 8192, 16384, 32768, 32768)
    ]


def test_a_chosen_vocabulary_size_is_a_maximum_and_too_small_a_one_is_refused():
    texts = ["".join(random.Random(seed).choices("abcd ", k=60)) for seed in range(100)]
    assert 250 < train_tokenizer(texts, vocab_size=300).size <= 300
    with pytest.raises(ConfigError, match="vocab_size=9 has no room"):
        train_tokenizer(texts, vocab_size=9)


@pytest.mark.parametrize("captions", [[], ["", " \n"]])
def test_captions_without_words_are_refused(captions):
    with pytest.raises(DataError, match="no words"):
        train_tokenizer(captions)


def run(code, **environment):
    inherited = {name: text for name, text in os.environ.items() if "TOKENIZERS" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**inherited, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_training_is_deterministic_in_order_threads_and_hash_seed():
    code = (
        "import hashlib, random;"
        "from vit.data.captions.tokenizer import train_tokenizer as train;"
        "draw = random.Random(0);"
        "words = [''.join(draw.choices('abcdef', k=5)) for _ in range(99)];"
        "texts = [' '.join(draw.choices(words, k=8)) for _ in range(300)];"
        "SHUFFLE; one = train(texts, vocab_size=320);"
        "print(hashlib.sha256(one.to_json().encode()).hexdigest())"
    )
    same, other = code.replace("SHUFFLE", "0"), code.replace("SHUFFLE", "texts.reverse()")
    first = run(same, TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS="4", PYTHONHASHSEED="1")
    second = run(other, TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", PYTHONHASHSEED="2")
    assert first == second


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("switch", [{}, {"TOKENIZERS_PARALLELISM": "true"}])
def test_processes_can_be_forked_after_training_a_tokenizer(switch):
    code = (
        "import os; from vit.data.captions.tokenizer import train_tokenizer as train, Tokenizer\n"
        "count = lambda: len(os.listdir('/proc/self/task')) if os.path.exists('/proc') else 1\n"
        "before, texts = count(), ['a dog runs', 'two cats'] * 300\n"
        "ours = [train(texts)]\n"
        "ours += [Tokenizer.from_json(one.to_json()) for one in ours]\n"
        "decoded = lambda: [(one.encode(texts), one.decode([1, 9, 40])) for one in ours]\n"
        "ids = decoded()\n"
        "assert count() == before, 'threads'\n"
        "child = os.fork()\n"
        "if not child: os._exit(ids != decoded())\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    assert run(code, RAYON_NUM_THREADS="4", **switch) == ""


@pytest.mark.parametrize("value", [None, "true"])
def test_training_restores_the_environment(monkeypatch, value):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if value:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    train_tokenizer(["a dog"])
    assert os.environ.get("TOKENIZERS_PARALLELISM") == value


def test_the_command_line_imports_no_tokenizers_library():
    code = "from vit.commands.main import main; import sys; main(['--help'])"
    assert "train" in run(f"{code}; assert 'tokenizers' not in sys.modules")


def gpt2_like():
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(
        CAPTIONS, vocab_size=400, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    return library._tokenizer


def bert_like():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({sign for text in CAPTIONS for sign in text.lower() if sign != " "})
    tokens = [*special, *letters, *(f"##{sign}" for sign in letters), "dog", "circle", "red"]
    vocab = {token: number for number, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.add_special_tokens(special)
    library.enable_truncation(3)
    library.enable_padding(length=40)
    return library


def unigram_like():
    """As T5's: no begin; its names are pieces of the vocabulary."""
    signs = Counter(sign for text in [*CAPTIONS, "</s><pad>"] for sign in text if sign != " ")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁dog", -3.0)]
    pieces += [(sign, -4.0 - number / 100) for number, sign in enumerate(sorted(signs))]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return library


LIKE = {"gpt2": gpt2_like, "bert": bert_like, "unigram": unigram_like}
NAMES = {
    "gpt2": (PAD, "<|endoftext|>", "<|endoftext|>"),
    "bert": ("[PAD]", "[CLS]", "[SEP]"),
    "unigram": ("<pad>", BEGIN, "</s>"),
}


@pytest.fixture(params=LIKE)
def foreign(request, tmp_path):
    """(name, opened by us, opened by transformers): a folder as transformers writes it."""
    PreTrainedTokenizerFast(tokenizer_object=LIKE[request.param]()).save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    return request.param, open_tokenizer(tmp_path), theirs


def test_special_tokens_of_other_files_are_found_by_name_or_added(foreign, tmp_path):
    name, ours, theirs = foreign
    again = Tokenizer.from_json(ours.to_json())
    for tokenizer in (ours, again, pickle.loads(pickle.dumps(ours))):
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        ids = tokenizer.pad, tokenizer.begin, tokenizer.end
        assert tuple(map(library.id_to_token, ids)) == NAMES[name]
        assert tokenizer.pad not in ids[1:]
        assert tokenizer.size == library.get_vocab_size() == max(library.get_vocab().values()) + 1
    assert ours.size == len(theirs) + {"gpt2": 1, "bert": 0, "unigram": 1}[name]


def test_files_of_transformers_give_its_ids_and_text(foreign, tmp_path):
    name, ours, theirs = foreign
    texts = [text for text in TEXTS if "<" not in text and "[" not in text]
    assert len(texts) > 200
    if name == "bert":  # what the file asks for, and what must not act
        assert len(theirs.backend_tokenizer.encode("a red dog a red dog").ids) == 40
    expected = [
        theirs(text, add_special_tokens=False, truncation=False)["input_ids"] for text in texts
    ]
    assert ours.encode(texts) == expected
    (tmp_path / "ours.json").write_text(ours.to_json(), encoding="utf-8")
    reopened = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "ours.json"))
    for text, ids in zip(texts, expected, strict=True):
        assert reopened(text, add_special_tokens=False)["input_ids"] == ids
        decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode([ours.begin, *ids, ours.end, ours.pad]) == decoded


def test_files_of_transformers_decode_what_they_encode_and_count_the_rest(foreign):
    name, ours, _ = foreign
    if name == "gpt2":
        assert [ours.decode(ids) for ids in ours.encode(TEXTS)] == TEXTS
    assert ours.decode(ours.encode(["a red dog"])[0]) == "a red dog"
    unknown = {"gpt2": 0, "bert": 1, "unigram": 1}[name]
    assert ours.count_unknown(["a dog", "a ☃ dog", "red"]) == unknown


def test_text_never_becomes_a_special_token(bpe, foreign):
    names = [PAD, BEGIN, END, "<end>", "[SEP]", "[CLS]", "[PAD]", "</s>", "<pad>", "<|endoftext|>"]
    texts = [text for name in names for text in (name, f"a {name} dog", f"x{name}{name}y")]
    for tokenizer in (bpe, pickle.loads(pickle.dumps(bpe)), foreign[1]):
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            assert ids
            assert {tokenizer.pad, tokenizer.begin, tokenizer.end}.isdisjoint(ids), text
    if foreign[0] == "bert":  # nor any other special token
        assert foreign[2].mask_token_id is None
        mask = foreign[2].convert_tokens_to_ids("[MASK]")
        assert mask not in foreign[1].encode(["a [MASK]"])[0]
    if foreign[0] == "unigram":
        assert foreign[1].decode(foreign[1].encode(["a </s>"])[0]) == "a </s>"


def test_sampling_in_a_file_is_disabled():
    library = tokenizers.Tokenizer.from_str(train_tokenizer(CAPTIONS * 2).to_json())
    library.model.dropout = 0.9
    ours = Tokenizer.from_json(library.to_str())
    text = [" ".join(CAPTIONS)]
    assert all(ours.encode(text) == ours.encode(text) for _ in range(5))
    assert ours.encode(text)[0] == train_tokenizer(CAPTIONS * 2).encode(text)[0]


def test_a_missing_decoder_is_derived_from_the_pre_tokenizer():
    for make in (gpt2_like, unigram_like):
        state = json.loads(make().to_str())
        state["decoder"] = None
        ours = Tokenizer.from_json(json.dumps(state))
        assert ours.decode(ours.encode(["a red dog"])[0]) == "a red dog"


def test_added_tokens_with_spaces_are_encoded_as_one_token():
    library = tokenizers.Tokenizer.from_str(train_tokenizer(CAPTIONS).to_json())
    library.add_tokens(["red circle"])
    ours, text = Tokenizer.from_json(library.to_str()), "a red circle left"
    assert ours.encode([text])[0] == library.encode(text).ids
    assert library.token_to_id("red circle") in ours.encode([text])[0]


GAP = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "a"}
TWICE = {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}
CRASH = {"type": "BPE", "vocab": {"a": 0, "à": 1, "aà": 2}, "merges": [["a", "à"]]}
CRASH["continuing_subword_prefix"] = "b"
STRIP = {"type": "Strip", "content": " ", "start": 0, "stop": 2**64 - 1}
JOINED = {"type": "Sequence", "decoders": [{"type": "Fuse"}, STRIP]}
PANIC = {"version": "1.0", "model": {**GAP, "vocab": {"a": 0}}, "decoder": JOINED}
BAD = {
    "crash": json.dumps({"version": "1.0", "model": CRASH}).encode(),
    "panic": json.dumps(PANIC).encode(),
    "cut": gpt2_like().to_str()[:3000].encode(),
    "empty": b"",
    "list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "other": b'{"model_type": "vit"}',
    "bytes": bytes(range(128, 256)),
    "gap": json.dumps({"version": "1.0", "model": GAP}).encode(),
    "twice": json.dumps({"version": "1.0", "model": TWICE}).encode(),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_refused_in_one_line(name, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(BAD[name])
    with pytest.raises(DataError, match=r"tokenizer\.json is no usable") as caught:
        open_tokenizer(file)
    with pytest.raises(WeightsError, match="no usable") as refused:
        Tokenizer.from_json(BAD[name].decode("latin-1"))
    assert [len(str(one.value).splitlines()) for one in (caught, refused)] == [1, 1]
    assert str(file) in str(caught.value)


def test_missing_and_oversized_files_are_refused(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "none.json", str(tmp_path / "a\0b"), "/dev/null"):
        with pytest.raises(DataError, match=r"is no usable tokenizer\.json .*; give one"):
            open_tokenizer(path)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    (tmp_path / "tokenizer.json").write_text(" " * 101)
    with pytest.raises(DataError, match="larger than 100 bytes"):
        open_tokenizer(tmp_path)
    with pytest.raises(WeightsError, match="longer than 100"):
        Tokenizer.from_json(" " * 101)


def test_texts_that_cannot_be_tokenised_are_refused_by_name(bpe):
    with pytest.raises(DataError, match=r"the text '\\ud83d' holds half"):
        bpe.encode(["a dog", "a \ud83d dog"])
    with pytest.raises(DataError, match="holds half"):
        train_tokenizer(["a \ud83d dog"])
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    with pytest.raises(VitError, match=r"^.*the text 'dog' cannot be tokenised.*$"):
        Tokenizer.from_json(library.to_str()).encode(["dog"])


def test_training_again_with_the_size_it_chose_gives_the_same_tokenizer():
    draw = random.Random(0)
    made = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 9))) for _ in range(600)]
    captions = [" ".join(draw.choices(made, k=8)) for _ in range(300)]
    found = train_tokenizer(captions)
    again = train_tokenizer(captions, vocab_size=found.size)
    assert again.to_json() == found.to_json()
