"""Caption tokenizer on the `tokenizers` library: byte-level BPE, or any tokenizer.json.

Tokenizers trained here normalise text to Unicode NFC with single spaces (of what `str.split` splits
at) and none at the ends. Case is kept. A token never crosses a space, and the names of special
tokens contain one: no text is ever taken for a special token.

Source: Sennrich et al., section 3.2, arXiv:1508.07909, on bytes as in GPT-2.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from vit.errors import ConfigError, DataError, WeightsError
from vit.text import printable

FILE = "tokenizer.json"
MAX_BYTES = 2**27
"""Of a tokenizer.json."""
MAX_VOCAB = 2**21
MAX_CACHED_WORDS = 2**18
"""Words whose tokens are cached: a few dozen MB."""

PAD, BEGIN, END = "<| pad |>", "<| begin |>", "<| end |>"
"""Special tokens; with a space, which no word contains."""
ENDOFTEXT = "<|endoftext|>"
PADS = (PAD, "<pad>", "[PAD]", "<PAD>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
BEGINS = (
    *(BEGIN, "<s>", "[CLS]", "<bos>", "[BOS]", "<BOS>", "<sos>", "[SOS]", "<|begin_of_text|>"),
    *("<|startoftext|>", "<|bos|>", "<start>", "<cls>", ENDOFTEXT),
)
ENDS = (
    *(END, "</s>", "[SEP]", "<eos>", "[EOS]", "<EOS>", "<|end_of_text|>", "<|eos|>", "<end>"),
    *("<sep>", ENDOFTEXT),
)
"""Names of the special tokens in other files; the first that a vocabulary has is used."""

# Scripts without spaces are split as far as characters show words: otherwise each clause of a
# Japanese caption that occurs twice would be one token. Kana in runs: endings, or loan words.
ONE_EACH = r"\p{Han}|(?=\p{L})[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
KANA = r"[\p{Hiragana}ー]+|[\p{Katakana}ー]+"
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
# Marks belong to their letters, or Hindi and vocalised Arabic would be split at each.
LETTERS = rf"(?:(?!{UNSPACED})[\p{{L}}\p{{M}}])+"
GROUPS = rf"{ONE_EACH}|{KANA}|{LETTERS}|\p{{N}}+|[^\s\p{{L}}\p{{M}}\p{{N}}]+"
SPLIT_BYTES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(" ?(?:" + GROUPS + ")"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
# Each word includes the space before it, the first word too: it is the same token everywhere.
NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFC(),
        normalizers.Replace(Regex(r"[\s\x1c-\x1f]+"), " "),  # what str.split splits at
        normalizers.Strip(),
        normalizers.Prepend(" "),
    ]
)
DECODERS = {"ByteLevel": decoders.ByteLevel, "Metaspace": decoders.Metaspace}
"""The inverse of a pre-tokenizer, for files without a decoder."""


class Tokenizer:
    """A tokenizer with tokens for padding, begin and end, which no text contains.

    Padding, truncation, sampling and added begin and end tokens in a file are disabled: `encode`
    returns exactly the tokens of a text, always the same ones. It starts no threads, so loader
    processes may be forked afterwards.

    Attributes:
        end: Id of the token after a caption; equals `begin` only in a vocabulary whose one token
            `<|endoftext|>` is for both.
        size: Rows of an embedding table: the largest id plus one.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        _disable_options(library)
        self.pad = _special_token(library, PADS)
        self.begin = _special_token(library, BEGINS)
        self.end = _special_token(library, ENDS)
        ids = library.get_vocab(with_added_tokens=True).values()
        self.size = max(ids) + 1
        if self.size > MAX_VOCAB:
            raise WeightsError(f"an id of {self.size - 1:,}, and only {len(ids):,} tokens")
        if len(set(ids)) < len(ids):
            raise WeightsError("two tokens with one id")
        self._special = frozenset((self.pad, self.begin, self.end))
        self._encode = self._encode_words if _is_ours(library) else self._encode_text
        self._cache: dict[str, list[int]] = {}

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids of each caption, without begin and end."""
        return [self._encode(caption) for caption in captions]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special and unknown tokens.

        For a tokenizer trained here it is the inverse of `encode` up to normalisation and unknown
        tokens. Others may be less exact: BERT's puts spaces around punctuation.
        """
        kept = [number for number in ids if number not in self._special]
        try:
            return str(self._library.decode(kept, skip_special_tokens=True))
        except BaseException as error:
            raise WeightsError(f"the tokenizer cannot decode: {_reason(error)}") from None

    def count_unknown(self, captions: Iterable[str]) -> int:
        """Number of captions with an unknown token; 0 for BPE on bytes."""
        model = json.loads(self._library.to_str())["model"]
        name, unknown = model.get("unk_token"), model.get("unk_id")
        number = unknown if name is None else self._library.token_to_id(name)
        return sum(number in self.encode([caption])[0] for caption in captions)

    def to_json(self) -> str:
        """The content of a tokenizer.json, as `tokenizers` and `transformers` read it."""
        return str(self._library.to_str())

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The inverse of `to_json`; reads any other tokenizer.json too.

        Padding, begin and end are the first of `PADS`, `BEGINS`, `ENDS` that the vocabulary has;
        without one, ours is added after the last id.
        """
        try:
            return cls(_parse(text))
        except WeightsError as error:
            raise WeightsError(
                f"this is no usable {FILE} ({error}); take the file from its source again"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        # the library's own pickles lose `encode_special_tokens`
        return Tokenizer.from_json, (self.to_json(),)

    def _encode_words(self, caption: str) -> list[int]:
        """Ids word by word, from a cache: ten times as fast."""
        ids: list[int] = []
        for word in caption.split():
            cached = self._cache.get(word)
            if cached is None:
                cached = self._encode_text(word)
                if len(self._cache) < MAX_CACHED_WORDS:
                    self._cache[word] = cached
            ids += cached
        return ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            # One text per call: batches start threads, for which a forked process would wait.
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            reason = _reason(error)
            _check_text(text)
            raise DataError(f"{_quote(text)} cannot be tokenised: {reason}") from None
        if self._special.isdisjoint(ids):
            return ids
        # Vocabularies of whole words or of SentencePiece contain the names of special tokens.
        return [part for number in ids for part in self._spell(number)]

    def _spell(self, number: int) -> list[int]:
        """The ids of a special token's name as text; any other id itself."""
        if number not in self._special:
            return [number]
        name = str(self._library.id_to_token(number))
        parts = name[0], name[1:]
        return [token.id for part in parts for token in self._library.model.tokenize(part)]


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open a tokenizer.json, or a folder with one."""
    file = Path(path)
    try:
        file = file / FILE if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError("no such file")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES:,} bytes")
        return Tokenizer(_parse(file.read_bytes().decode()))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} is no usable {FILE} ({error}); "
            f"give one that save_pretrained() of transformers wrote, or vit train"
        ) from None


def _parse(text: str) -> tokenizers.Tokenizer:
    if len(text) > MAX_BYTES:
        raise WeightsError(f"longer than {MAX_BYTES:,} characters")
    try:
        _check_merges(json.loads(text)["model"])
        library = tokenizers.Tokenizer.from_str(text)
        for ids in ([], list(range(64))):  # some invalid settings raise only when decoding
            library.decode(ids)
    except BaseException as error:
        raise WeightsError(_reason(error)) from None
    return library


def _check_merges(model: dict[str, Any]) -> None:
    """Refuse merges for which tokenizers 0.23 cuts a character in two and ends the process."""
    prefix = str(model.get("continuing_subword_prefix") or "")
    for merge in model.get("merges", ()) if prefix else ():
        second = merge.split(" ", 1)[1] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge with {second!r}, which does not begin with {prefix!r}")


def _reason(error: BaseException) -> str:
    """The library's message: it raises Exception itself, and Rust's panics as a BaseException."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return printable(error)
    raise error


def _disable_options(library: tokenizers.Tokenizer) -> None:
    """Disable padding, truncation and sampling, and add a missing decoder."""
    library.encode_special_tokens = True
    library.no_padding()
    library.no_truncation()
    for name in ("dropout", "alpha", "nbest_size"):  # sampling of BPE and Unigram
        if hasattr(library.model, name):
            setattr(library.model, name, None)
    if library.decoder is None and library.pre_tokenizer is not None:
        state = library.pre_tokenizer.__getstate__().decode()
        fitting = [make() for name, make in DECODERS.items() if f'"type":"{name}"' in state]
        library.decoder = next(iter(fitting), None)


def _special_token(library: tokenizers.Tokenizer, names: Sequence[str]) -> int:
    """Id of the first of `names` in the vocabulary; else the first name is added."""
    if all(library.token_to_id(name) is None for name in names):
        library.add_special_tokens([names[0]])
    ids = (library.token_to_id(name) for name in names)
    return next(number for number in ids if number is not None)


def _is_ours(library: tokenizers.Tokenizer) -> bool:
    """Whether it was trained here, so that the tokens of a word do not depend on its neighbours."""
    pairs = (library.normalizer, NORMALIZER), (library.pre_tokenizer, SPLIT_BYTES)
    if any(own is None or own.__getstate__() != ours.__getstate__() for own, ours in pairs):
        return False
    return all(token.special for token in library.get_added_tokens_decoder().values())


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{_quote(text)} holds half of a surrogate pair, which is no text; correct the caption"
        ) from None


def _quote(text: str) -> str:
    return f"the text '{printable(text[:60])}{'...' * (len(text) > 60)}'"


# --- training ------------------------------------------------------------------------------------


def train_tokenizer(captions: Iterable[str], *, vocab_size: int | None = None) -> Tokenizer:
    """Train BPE on bytes; the tokenizer depends neither on the order of `captions` nor the machine.

    Without `vocab_size`, every word (or number, or run of punctuation) that occurs at least twice
    becomes one token, and none that occurs once: its embedding would be learned from one caption.
    In scripts without spaces a word is what `GROUPS` splits: a Han character, a run of kana. There
    are at most 8,192 tokens for up to eight million words (COCO has six), then as many more as the
    square root of their number grows (Heaps' law), and never more than 32,768.
    """
    texts = list(captions)
    for text in texts:
        _check_text(text)
    words = sum(len(text.split()) for text in texts)
    if not words:
        raise DataError("the captions hold no words: there is nothing to train a tokenizer on")
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, BEGIN, END]
    minimum = len(alphabet) + len(special)
    if vocab_size is not None and vocab_size < minimum:
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for all single bytes and the special tokens; "
            f"give {minimum} or more"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer, library.pre_tokenizer = NORMALIZER, SPLIT_BYTES
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or default_vocab_size(words),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=special,
    )
    with _single_thread():
        library.train_from_iterator(texts, trainer)
        return Tokenizer(library)


def default_vocab_size(words: int) -> int:
    """The vocabulary size for captions of `words` words, by the rule of `train_tokenizer`."""
    return min(2**15, int(2**13 * max(1.0, sqrt(words / 2**23))))


@contextmanager
def _single_thread() -> Iterator[None]:
    """Keep the library from starting threads, for which a forked process would wait forever."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
