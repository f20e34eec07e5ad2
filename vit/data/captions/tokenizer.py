"""Words to numbers and back, on the library `tokenizers`; a file of it is a plain tokenizer.json.

In tokenizers trained here, text is in Unicode's NFC, with one space where there was white space
(what `str.split` splits at) and none at the ends. Case is kept. A token never reaches over a space,
and the names of special tokens hold one: no text is ever taken for a special token.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders

from vit.data.captions.tokenizer_training import (
    BEGIN,
    BEGINS,
    END,
    ENDS,
    LEARNERS,
    PAD,
    PADS,
    is_ours,
    most_tokens,
    one_thread,
)
from vit.errors import DataError, WeightsError, printable

Kind = Literal["bpe", "wordpiece"]

FILE = "tokenizer.json"
MOST_BYTES = 2**27
MOST_IDS = 2**21
DECODED = 64  # ids, to try a decoder
DECODERS = {"ByteLevel": decoders.ByteLevel, "Metaspace": decoders.Metaspace}
"""What undoes a pre-tokenizer, for files without a decoder."""
MOST_WORDS = 2**18  # remembered with their tokens: a few dozen MB


class Tokenizer:
    """A tokenizer with tokens for padding, begin and end, which text can never become.

    Padding, truncation, sampling and added begin and end tokens that a file asks for do not act:
    `encode` gives all tokens of a text, the same each time, and nothing else. All work happens in
    the calling thread, so loader processes may be forked afterwards.

    Args:
        library: The tokenizer to wrap; it is changed.

    Attributes:
        pad: Id of padding; never that of another of the three.
        begin: Id of what stands before a caption.
        end: Id of what stands after a caption; the same as `begin` only where a file has the one
            token `<|endoftext|>` for both.
        size: Rows of an embedding table: the largest id and one.

    Raises:
        WeightsError: Its ids are not those of a usable vocabulary.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        _switch_off(library)
        self.pad = _find(library, PADS, PAD)
        self.begin = _find(library, BEGINS, BEGIN)
        self.end = _find(library, ENDS, END)
        ids = library.get_vocab(with_added_tokens=True).values()
        self.size = max(ids) + 1
        if self.size > MOST_IDS:
            raise WeightsError(f"an id of {self.size - 1:,}, and only {len(ids):,} tokens")
        if len(set(ids)) < len(ids):
            raise WeightsError("two tokens with one id")
        self._special = frozenset((self.pad, self.begin, self.end))
        self._by_word = is_ours(library)
        self._words: dict[str, list[int]] = {}

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids of each caption, without begin and end.

        Raises:
            DataError: A caption is no text (half of a surrogate pair), or holds what the tokenizer
                has no token for, not even an unknown one.
        """
        encode = self._encode_words if self._by_word else self._encode_text
        return [encode(caption) for caption in captions]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens, that for the unknown too, are left out.

        Of a tokenizer trained here it is the inverse of `encode`, up to the normalisation that this
        file's docstring tells and unknown tokens. Of another one it is as near as its file says:
        BERT's puts spaces around punctuation.

        Raises:
            WeightsError: The file it came from asks for the impossible.
        """
        kept = [number for number in ids if number not in self._special]
        try:
            return str(self._library.decode(kept, skip_special_tokens=True))
        except BaseException as error:
            raise WeightsError(f"the tokenizer cannot decode: {_reason(error)}") from None

    def count_unknown(self, captions: Iterable[str]) -> int:
        """How many captions hold something that becomes the unknown token; none in BPE on bytes."""
        model = json.loads(self._library.to_str())["model"]
        name, unknown = model.get("unk_token"), model.get("unk_id")
        number = unknown if name is None else self._library.token_to_id(name)
        return sum(number in self.encode([caption])[0] for caption in captions)

    def to_json(self) -> str:
        """The text of a tokenizer.json, which `tokenizers` and `transformers` open too."""
        return str(self._library.to_str())

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The inverse of `to_json`, and a reader of any other tokenizer.json.

        Padding, begin and end are found by name: ours, else the first of the usual ones that the
        file has (`PADS`, `BEGINS`, `ENDS`); where there is none, ours is added after the last id.

        Raises:
            WeightsError: It is damaged.
        """
        try:
            return cls(_parsed(text))
        except WeightsError as error:
            raise WeightsError(
                f"this is no usable {FILE} ({error}); take the file from its source again"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as JSON: the library's own pickles forget that text is never special."""
        return Tokenizer.from_json, (self.to_json(),)

    def _encode_words(self, caption: str) -> list[int]:
        """Ids word by word: each is looked at once, which is ten times as fast."""
        ids: list[int] = []
        for word in caption.split():
            known = self._words.get(word)
            if known is None:
                known = self._encode_text(word)
                if len(self._words) < MOST_WORDS:
                    self._words[word] = known
            ids += known
        return ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            # One text a call: batches start threads, which a forked process would wait for.
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            reason = _reason(error)
            raise DataError(f"{_short(_checked(text))} cannot be tokenised: {reason}") from None
        if self._special.isdisjoint(ids):
            return ids
        # A vocabulary of whole words, or of SentencePiece, has the name as if it were a word.
        return [part for number in ids for part in self._spelled(number)]

    def _spelled(self, number: int) -> list[int]:
        """The ids of a special token's name as text, any other id as it is."""
        if number not in self._special:
            return [number]
        name = str(self._library.id_to_token(number))
        parts = name[0], name[1:]
        return [token.id for part in parts for token in self._library.model.tokenize(part)]


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in a folder with one.

    Raises:
        DataError: There is none, or it cannot be used.
    """
    file = Path(path)
    try:
        file = file / FILE if file.is_dir() else file
        if not file.is_file():
            raise DataError(f"{printable(file)}: no such file; give a {FILE}, or a folder with one")
        if file.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{printable(file)} is larger than {MOST_BYTES:,} bytes; "
                f"give a {FILE}, or a folder with one"
            )
        return Tokenizer(_parsed(file.read_bytes().decode()))
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"{printable(file)} is no usable {FILE} ({printable(error)}); "
            f"give one that save_pretrained() of transformers wrote, or vit train"
        ) from None


def train_tokenizer(
    captions: Iterable[str], *, kind: Kind = "bpe", vocab_size: int | None = None
) -> Tokenizer:
    """A tokenizer that knows the words of `captions`; their order does not matter.

    Without `vocab_size`, every word (or number, or run of signs) that occurs at least twice becomes
    one token, and nothing that occurs once does: its row would be learned from one caption. There
    are at most 8,192 tokens for up to eight million words (COCO has six), then as many more as
    the square root of their number grows, which is how fast new words come (Heaps' law), and 32,768
    at the very most.

    BPE falls back on bytes and carries any text. WordPiece knows the characters of `captions` (they
    come on top of the 8,192): a word with another one, or longer than 1,000 characters, becomes
    the unknown token, which `decode` leaves out. `Tokenizer.count_unknown` says where.

    Args:
        captions: Of the training images only.
        kind: `bpe` or `wordpiece`.
        vocab_size: Tokens at most, with special ones; None to choose by the rule above.

    Raises:
        ConfigError: `vocab_size` has no room for the single bytes or characters.
        DataError: There are no words, or a caption is no text.
    """
    texts = list(captions)
    words = sum(len(_checked(text).split()) for text in texts)
    if not words:
        raise DataError("the captions hold no words: there is nothing to train a tokenizer on")
    with one_thread():
        return Tokenizer(LEARNERS[kind](texts, vocab_size, most_tokens(words)))


def _parsed(text: str) -> tokenizers.Tokenizer:
    if len(text) > MOST_BYTES:
        raise WeightsError(f"longer than {MOST_BYTES:,} characters")
    try:
        _check_prefix(json.loads(text)["model"])
        library = tokenizers.Tokenizer.from_str(text)
        for ids in ([], list(range(DECODED))):  # some settings show only here that they are wrong
            library.decode(ids)
    except BaseException as error:
        raise WeightsError(_reason(error)) from None
    return library


def _check_prefix(model: dict[str, Any]) -> None:
    """Refuse what makes tokenizers 0.23 cut a token in mid-character, and end the process."""
    prefix = str(model.get("continuing_subword_prefix") or "")
    for merge in model.get("merges", ()) if prefix else ():
        second = merge.split(" ", 1)[1] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge with {second!r}, which does not begin with {prefix!r}")


def _reason(error: BaseException) -> str:
    """What the library says; it raises plain Exceptions, and Rust's panics as something else.

    Raises:
        BaseException: It is not the library's.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return printable(error)
    raise error


def _switch_off(library: tokenizers.Tokenizer) -> None:
    """What a file may ask for and a caption must not suffer; and the decoder it may have left out.

    Sampled tokens (BPE dropout, Unigram sampling) would differ from call to call.
    """
    library.encode_special_tokens = True
    library.no_padding()
    library.no_truncation()
    for name in ("dropout", "alpha", "nbest_size"):
        if hasattr(library.model, name):
            setattr(library.model, name, None)
    if library.decoder is None and library.pre_tokenizer is not None:
        split = library.pre_tokenizer.__getstate__().decode()
        fitting = [make() for name, make in DECODERS.items() if f'"type":"{name}"' in split]
        library.decoder = next(iter(fitting), None)


def _find(library: tokenizers.Tokenizer, names: Sequence[str], ours: str) -> int:
    """Id of the first of `names` that the vocabulary has; `ours` is added where it has none."""
    if all(library.token_to_id(name) is None for name in names):
        library.add_special_tokens([ours])
    ids = (library.token_to_id(name) for name in names)
    return next(number for number in ids if number is not None)


def _checked(text: str) -> str:
    """`text`, unless it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{_short(text)} holds half of a surrogate pair, which is no text; mend the caption"
        ) from None
    return text


def _short(text: str) -> str:
    shown = printable(text[:60])
    return f"the text '{shown}{'...' * (len(text) > 60)}'"
