"""Measures a captioner on pictures with captions: what it writes, and how it likes what is true.

    loss           mean cross-entropy of a word of the pictures' first captions
    loss_shuffled  the same captions, each against another picture

A decoder that does not look at the pictures has two losses that are equal. Both, and the scores of
the captions, are those of the validation after a training's epoch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vit.data.captioning.ids import CaptionIds
from vit.data.samples import NO_LABEL, Sample
from vit.data.sources.folders import count
from vit.errors import DataError
from vit.evaluation.captions import caption_scores
from vit.evaluation.metrics import Outcomes, summarise
from vit.generation.likelihood import is_blind
from vit.inference.predictor import Answer, Predictor
from vit.inference.speaking import Speaker
from vit.precision import autocast
from vit.runtime.results import unended_note

EXAMPLES = 5


class Told:
    """What was said of the pictures so far.

    Args:
        speaker: Of the captioner.
        samples: The pictures, each with a caption that the decoder has places for.
        ids: Their captions as tokens.
    """

    def __init__(self, speaker: Speaker, samples: Sequence[Sample], ids: CaptionIds) -> None:
        self.speaker, self.samples, self.ids = speaker, samples, ids
        self.sums = {"loss": 0.0, "loss_shuffled": 0.0}
        self.words = dict.fromkeys(self.sums, 0)
        self.places: list[int] = []
        self.texts: list[str] = []
        self.unended = 0
        self.outcomes: list[Outcomes] = []

    def add(self, answers: Sequence[Answer], first: int) -> None:
        """Count one batch, whose first picture is sample `first`."""
        told = [(first + place, a) for place, a in enumerate(answers) if a.captions]
        memories = [answer.memory for _, answer in told if answer.memory is not None]
        places = [place for place, _ in told]
        away = len(self.samples) // 2  # as in training: each caption against one other picture
        for name, shift in (("loss", 0), ("loss_shuffled", away)):
            chosen = [((place + shift) % len(self.samples), 0) for place in places]
            loss, words = self.speaker.loss(memories, self.ids.padded(chosen))
            self.sums[name] += loss
            self.words[name] += words
        self.places += places
        self.texts += [answer.captions[0].text for _, answer in told]
        self.unended += sum(not answer.captions[0].ended for _, answer in told)
        self._classes([(self.samples[place].label, answer) for place, answer in told])

    def _classes(self, told: Sequence[tuple[int, Answer]]) -> None:
        rows = [
            (label, answer.probabilities)
            for label, answer in told
            if label != NO_LABEL and answer.probabilities is not None
        ]
        if rows:
            labels = torch.tensor([label for label, _ in rows])
            self.outcomes.append(Outcomes.of(torch.stack([row for _, row in rows]), labels))

    def scores(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """All numbers, of at least one picture, and some examples."""
        references = [self.samples[place].captions for place in self.places]
        found: dict[str, Any] = {"count": len(self.texts)}
        if self.outcomes:
            found |= summarise(Outcomes.cat(self.outcomes), classes)
            found["class_loss"] = found.pop("loss")
        found |= {name: total / self.words[name] for name, total in self.sums.items()}
        found |= caption_scores(self.texts, references)
        return {**found, "count": len(self.texts), "examples": self._examples()}

    def _examples(self) -> list[dict[str, str]]:
        """Some pictures from all over the set, with what was said and the first reference."""
        shown = min(EXAMPLES, len(self.texts))
        return [
            {
                "image": self.samples[self.places[number]].path,
                "caption": self.texts[number],
                "reference": self.samples[self.places[number]].captions[0],
            }
            for number in (index * len(self.texts) // shown for index in range(shown))
        ]


@torch.inference_mode()
def measure_captions(
    predictor: Predictor,
    speaker: Speaker,
    samples: Sequence[Sample],
    *,
    say: Callable[[str], object],
    progress: Callable[[int, int], object],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Scores of the readable pictures, empty without any, and {"image", "error"} of the others.

    Args:
        predictor: Of a captioner.
        speaker: Its own.
        samples: Pictures with captions.
        say: Receives what a user should know of the numbers.
        progress: Receives the pictures done, and of how many, after each batch.

    Raises:
        DataError: No caption is short enough for the decoder, or one cannot be tokenised.
    """
    kept, ids = short_enough(speaker, samples, say)
    told = Told(speaker, kept, ids)
    failed: list[dict[str, str]] = []
    done = 0
    for answers in predictor.batches(sample.path for sample in kept):
        with autocast(predictor.precision, predictor.device):
            told.add(answers, done)
        failed += [{"image": a.image, "error": a.error} for a in answers if a.error is not None]
        done += len(answers)
        progress(done, len(kept))
    if not told.texts:
        return {}, failed
    scores = told.scores(predictor.classes)
    for note in notes_on(scores, told.unended):
        say(note)
    return scores, failed


def short_enough(
    speaker: Speaker, samples: Sequence[Sample], say: Callable[[str], object]
) -> tuple[tuple[Sample, ...], CaptionIds]:
    """The samples with a caption that the decoder has places for, and those captions as tokens.

    Raises:
        DataError: There are none, or a caption cannot be tokenised.
    """
    most = speaker.decoder.most_tokens
    ids = CaptionIds([sample.captions for sample in samples], speaker.tokenizer, most)
    kept = tuple(sample for place, sample in enumerate(samples) if ids.count(place))
    if not kept:
        raise DataError(f"no caption has at most {most} tokens, the places of this decoder")
    if ids.too_long:
        said = f"left {count(ids.too_long, 'caption')} of more than {most} tokens out of the loss"
        lost = len(samples) - len(kept)
        say(f"{said}, and {count(lost, 'picture')} with no other" if lost else said)
        ids = CaptionIds([sample.captions for sample in kept], speaker.tokenizer, most)
    return kept, ids


def notes_on(scores: dict[str, Any], unended: int) -> list[str]:
    """What a user should know of the numbers."""
    notes = []
    right, wrong = scores["loss"], scores["loss_shuffled"]
    if scores["count"] > 1 and is_blind(right, wrong):
        notes.append(
            f"warning: the decoder hardly looks at the pictures: its loss is {right:.3f}, and "
            f"{wrong:.3f} with other pictures"
        )
    if unended:
        notes.append(unended_note(unended, scores["count"]))
    return notes
