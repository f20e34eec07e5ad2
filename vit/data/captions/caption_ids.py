"""Tokenised captions of a dataset, in flat arrays, padded to batches."""

from array import array
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vit.data.captions.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
"""Default maximum length of a caption, in tokens with begin and end."""


class CaptionIds:
    """Ids of the captions of all samples, in flat arrays that forked processes share.

    Captions that are too long are omitted, not truncated: a truncated one would teach the network
    to stop anywhere. Lengths are in tokens with begin and end; `mean_tokens` counts no begin.
    """

    def __init__(
        self, captions: Sequence[Sequence[str]], tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        self._begin, self._end, self._pad = tokenizer.begin, tokenizer.end, tokenizer.pad
        self.too_long, self.longest, self.longest_kept = 0, 0, 0
        # arrays grow in place: lists of numbers would take ten times the memory
        ids, ends, counts = array("i"), array("q", [0]), array("q", [0])
        for texts in captions:
            for row in tokenizer.encode(texts):
                length = len(row) + 2  # begin and end
                self.longest = max(self.longest, length)
                if length > max_tokens:
                    self.too_long += 1
                    continue
                self.longest_kept = max(self.longest_kept, length)
                ids.extend(row)
                ends.append(len(ids))
            counts.append(len(ends) - 1)
        self._ids = np.array(ids, dtype=np.int32)
        self._ends, self._counts = np.array(ends), np.array(counts)
        self.mean_tokens = len(ids) / (len(ends) - 1) + 1 if len(ends) > 1 else 0.0

    def count(self, sample: int) -> int:
        return int(self._counts[sample + 1] - self._counts[sample])

    def ids(self, sample: int, which: int) -> np.ndarray:
        """Caption `which` of a sample: [begin, ..., end], (tokens,) int64."""
        caption = self._counts[sample] + which
        words = self._ids[self._ends[caption] : self._ends[caption + 1]]
        return np.concatenate([[self._begin], words, [self._end]]).astype(np.int64)

    @cached_property
    def mismatch_shift(self) -> int:
        """Distance between an image and the other one whose first caption it is compared with:
        half of the images, or a little more where that gives fewer of them their own words."""
        starts = self._counts[:-1][np.diff(self._counts) > 0]
        first = [hash(self._ids[slice(*self._ends[at : at + 2])].tobytes()) for at in starts]
        tried = range(len(first) // 2, len(first) // 2 + 8)  # captions may recur every few images
        return min(tried, key=lambda by: np.equal(first, np.roll(first, by)).sum())

    def padded(self, chosen: Sequence[tuple[int, int]]) -> Tensor:
        """`ids` of each (sample, which), (chosen, longest) int64, padded at the end."""
        return pad_ids([self.ids(sample, which) for sample, which in chosen], self._pad)


def pad_ids(rows: Sequence[np.ndarray], pad: int) -> Tensor:
    """Rows of ids of any length -> (batch, longest) int64, padded with `pad` at the end."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), pad, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
