"""Learns the tokens of captions: byte-level BPE and WordPiece.

Sennrich et al. (1508.07909, section 3.2), on bytes as in GPT-2; Schuster and Nakajima, "Japanese
and Korean voice search" (2012), read longest piece first as in BERT. The same captions give the
same tokens, in any order and on any machine.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from vit.errors import ConfigError

PAD, BEGIN, END, UNKNOWN = "<| pad |>", "<| begin |>", "<| end |>", "<| unknown |>"
"""Special tokens; with a space, which no word has."""
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
"""Names of the three tokens a captioner needs, ours first; the first that a file has counts."""

CONTINUES = " ##"  # before pieces inside a word; without the space, a word could begin with it
LONGEST_WORD = 1000  # characters; the time WordPiece takes grows with their cube
SWITCH = "TOKENIZERS_PARALLELISM"

# Marks belong to their letters, or Hindi and vocalised Arabic would fall into pieces at each.
GROUPS = r"[\p{L}\p{M}]+|\p{N}+|[^\s\p{L}\p{M}\p{N}]+"
SPACES = pre_tokenizers.WhitespaceSplit()
IN_GROUPS = pre_tokenizers.Sequence([SPACES, pre_tokenizers.Split(Regex(GROUPS), "isolated")])
IN_BYTES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(" ?(?:" + GROUPS + ")"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
_CLEAN = [
    normalizers.NFC(),
    normalizers.Replace(Regex(r"[\s\x1c-\x1f]+"), " "),  # what str.split splits at
    normalizers.Strip(),
]
CLEAN = normalizers.Sequence(_CLEAN)
# A word begins with its space, the first one too, to be the same token everywhere.
CLEAN_AFTER_SPACE = normalizers.Sequence([*_CLEAN, normalizers.Prepend(" ")])


def learn_bpe(texts: Sequence[str], size: int | None, most: int) -> tokenizers.Tokenizer:
    """Tokens made of bytes; `size` at most, or `most` where it is None."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer, library.pre_tokenizer = CLEAN_AFTER_SPACE, IN_BYTES
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    letters, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, BEGIN, END]
    _check_room(size, len(letters) + len(special), "bytes")
    _train(library, texts, size or most, initial_alphabet=letters, special_tokens=special)
    return library


def learn_wordpiece(texts: Sequence[str], size: int | None, most: int) -> tokenizers.Tokenizer:
    """Tokens made of characters; `size` at most, or `most` besides the characters."""
    words = Counter(word for text in texts for word in CLEAN.normalize_str(text).split())
    characters = sorted(set().union(*words))
    first = [PAD, BEGIN, END, UNKNOWN, *characters, *(CONTINUES + sign for sign in characters)]
    _check_room(size, len(first), "characters")
    room = most if size is None else size - len(first)
    # of all pieces the most frequent, so that a run's own size gives its tokenizer again
    often = _pieces(texts, words, len(characters) + most)
    found = sorted(often.keys() - set(first), key=lambda piece: (-often[piece], piece))
    vocab = {token: number for number, token in enumerate([*first, *found[:room]])}
    model = models.WordPiece(
        vocab,
        unk_token=UNKNOWN,
        max_input_chars_per_word=LONGEST_WORD,
        continuing_subword_prefix=CONTINUES,
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer, library.pre_tokenizer = CLEAN, SPACES
    library.decoder = decoders.WordPiece(prefix=CONTINUES, cleanup=False)
    library.add_special_tokens([PAD, BEGIN, END, UNKNOWN])
    return library


LEARNERS = {"bpe": learn_bpe, "wordpiece": learn_wordpiece}


def most_tokens(words: int) -> int:
    """The size of a vocabulary that was not given, by the words there are to learn it from."""
    return min(2**15, int(2**13 * max(1.0, sqrt(words / 2**23))))


def is_ours(library: tokenizers.Tokenizer) -> bool:
    """Whether it was made here, so that the tokens of a word do not depend on its neighbours."""
    parts = library.normalizer, library.pre_tokenizer
    if None in parts:
        return False
    made = (CLEAN_AFTER_SPACE, IN_BYTES), (CLEAN, SPACES)
    added = library.get_added_tokens_decoder().values()
    return _states(parts) in map(_states, made) and all(token.special for token in added)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the library from starting threads: a process forked from them may wait for ever."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "false"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def _states(parts: Sequence[Any]) -> list[bytes]:
    return [part.__getstate__() for part in parts]


def _pieces(texts: Sequence[str], words: Counter[str], size: int) -> dict[str, int]:
    """Pieces of words that BPE on characters finds, as often as they occur, twice at least.

    The library's own trainer of WordPiece gives another vocabulary each time.
    """
    rough = tokenizers.Tokenizer(models.BPE())
    rough.normalizer, rough.pre_tokenizer = CLEAN, IN_GROUPS
    _train(rough, texts, size)
    pieces: Counter[str] = Counter()
    for word, number in words.items():
        head, *rest = rough.encode(word).tokens
        for piece in (head, *(CONTINUES + part for part in rest)):
            pieces[piece] += number
    return {piece: number for piece, number in pieces.items() if number > 1}


def _train(library: tokenizers.Tokenizer, texts: Sequence[str], size: int, **options: Any) -> None:
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, **options)
    library.train_from_iterator(texts, trainer)


def _check_room(size: int | None, least: int, what: str) -> None:
    if size is not None and size < least:
        raise ConfigError(
            f"vocab_size={size} has no room for all single {what} and the special tokens; "
            f"give {least} or more"
        )
