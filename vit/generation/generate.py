"""From a decoder to sentences: the one entrance to every kind of search."""

from collections.abc import Sequence

import torch

from vit.generation.beam import beam_search
from vit.generation.sampling import Drawn
from vit.generation.search import Continuation, Search, Sentence
from vit.generation.single import Choice, Likeliest, write


@torch.inference_mode()
def generate(
    continuation: Continuation,
    *,
    rows: int,
    begin: int,
    end: int,
    search: Search,
    numbers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> list[list[Sentence]]:
    """Sentences of each of `rows` pictures, up to `search.n_best`, the best first.

    They depend on the picture's own logits alone (and its number, where words are drawn), not on
    the pictures beside it. There are fewer than `n_best` only where the vocabulary has no more.

    Args:
        continuation: The decoder; its first call gets `begin` for each picture.
        rows: Pictures.
        begin: Id that stands before the first word.
        end: Id that follows the last word.
        search: The settings; `max_tokens` is not 0.
        numbers: Number of each picture, which decides what is drawn; its row when left out.
        device: Where the decoder wants its ids and gives its logits.

    Raises:
        WeightsError: A logit is not a number, or no word is possible.
        ValueError: There is not one number a row, or no `max_tokens`.
    """
    if not search.max_tokens:
        raise ValueError("max_tokens=0: say how many words a sentence may have")
    numbers = range(rows) if numbers is None else numbers
    if len(numbers) != rows:
        raise ValueError(f"{len(numbers)} numbers of pictures for {rows} rows")
    if rows == 0:
        return []
    if search.beams > 1:
        return beam_search(
            continuation, rows=rows, begin=begin, end=end, search=search, device=device
        )
    choice: Choice = Drawn(search, numbers, device=device) if search.temperature else Likeliest()
    sentences = write(
        continuation, choice, rows=rows, begin=begin, end=end, search=search, device=device
    )
    return [[one] for one in sentences]
