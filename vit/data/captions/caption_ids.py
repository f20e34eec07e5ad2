"""Captions as numbers: tokenised once, before training, and padded to a batch."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer

MOST_TOKENS = 128
"""Of a caption, with begin and end, that a decoder writes unless told otherwise."""
LEAST_TOKENS = 2
"""Of a caption: begin and end."""


class CaptionIds:
    """The captions of all samples as ids, in flat arrays that forked processes share.

    Captions that are too long are left out, never cut: a cut one would teach to stop anywhere.

    Args:
        captions: Of each sample, any number.
        tokenizer: Gives their ids.
        most: Longest caption to keep, in tokens with begin and end.

    Attributes:
        too_long: Number of captions that were left out.
        longest_kept: Tokens of the longest caption that was kept, likewise; 0 without any.
        longest: Tokens of the longest caption with begin and end, before any was left out; 0
            without captions.
        mean_tokens: Mean number of tokens to predict (the end is one) of the captions kept; 0
            where none is.

    Raises:
        DataError: A caption cannot be tokenised.
    """

    def __init__(self, captions: Sequence[Sequence[str]], tokenizer: Tokenizer, most: int) -> None:
        self._begin, self._end, self._pad = tokenizer.begin, tokenizer.end, tokenizer.pad
        self.too_long, self.longest, self.longest_kept = 0, 0, 0
        # Grown in place: lists of numbers would take ten times the memory on the way.
        ids, stops, kept = array("i"), array("q", [0]), array("q", [0])
        for texts in captions:
            for row in tokenizer.encode(texts):
                length = len(row) + LEAST_TOKENS
                self.longest = max(self.longest, length)
                if length > most:
                    self.too_long += 1
                    continue
                self.longest_kept = max(self.longest_kept, length)
                ids.extend(row)
                stops.append(len(ids))
            kept.append(len(stops) - 1)
        self._ids = np.array(ids, dtype=np.int32)
        self._stops, self._kept = np.array(stops), np.array(kept)
        self.mean_tokens = len(ids) / (len(stops) - 1) + 1 if len(stops) > 1 else 0.0

    def count(self, sample: int) -> int:
        """How many captions of `sample` there are to learn from."""
        return int(self._kept[sample + 1] - self._kept[sample])

    def ids(self, sample: int, which: int) -> np.ndarray:
        """Caption `which` of those that `count` counts: [begin, ..., end], (tokens,) int64.

        Raises:
            IndexError: The sample has fewer.
        """
        if not 0 <= which < self.count(sample):
            raise IndexError(f"sample {sample} has {self.count(sample)} captions, no {which}")
        caption = self._kept[sample] + which
        words = self._ids[self._stops[caption] : self._stops[caption + 1]]
        return np.concatenate([[self._begin], words, [self._end]]).astype(np.int64)

    def padded(self, chosen: Sequence[tuple[int, int]]) -> Tensor:
        """`ids` of each (sample, which), (chosen, longest) int64, filled up behind the end."""
        return pad_ids([self.ids(sample, which) for sample, which in chosen], self._pad)


def pad_ids(rows: Sequence[np.ndarray], pad: int) -> Tensor:
    """Rows of ids of any length -> (batch, longest) int64, with `pad` behind the shorter ones."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), pad, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
