"""What the best weights of a captioner say of the validation pictures, for its report."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vit.data.loading import Batch
from vit.data.samples import Sample, Splits
from vit.errors import DataError
from vit.evaluation.caption_findings import Captioned, CaptionOutcomes
from vit.evaluation.caption_report import WordFacts
from vit.evaluation.metrics import Outcomes
from vit.generation.caption import Caption
from vit.generation.likelihood import BLIND, losses_beside
from vit.generation.search import Search
from vit.generation.writing import write
from vit.model.captioner import Captioner
from vit.precision import autocast
from vit.training.captioning import Captioning, words_of
from vit.training.devices import inference_precision
from vit.training.loop import Training
from vit.weights.folder import LoadedRun


@torch.inference_mode()
def measure_captions(
    run: Training,
    loaded: LoadedRun,
    batches: Iterator[tuple[Batch, Tensor]],
    samples: Sequence[Sample],
) -> tuple[CaptionOutcomes, Outcomes | None]:
    """Captions of the best weights, their losses, and answers where there is a head for classes.

    Args:
        run: The finished training.
        loaded: Its best weights, on its device.
        batches: Of `samples`, with their normalised images on the device.
        samples: Those that are measured.

    Raises:
        DataError: Not one picture can be read.
    """
    model, tokenizer, device = loaded.model, loaded.tokenizer, run.accelerator.device
    assert isinstance(model, Captioner)
    assert tokenizer is not None
    precision = inference_precision(run.config.run.precision, device)
    pictures: list[Captioned] = []
    answers: list[Outcomes] = []
    sums = torch.zeros(4, dtype=torch.float64)
    for batch, images in batches:
        assert batch.others is not None
        words, others = words_of(batch, device), batch.others.to(device)
        with autocast(precision, device):
            classes, memory = model.see(images)
            written = write(model.decoder, memory, tokenizer, Search())
            losses = losses_beside(model.decoder, memory, words, others, tokenizer.pad)
        sums += losses.sum(dim=1)
        means = (losses[0] / losses[1]).tolist()
        told = zip(batch.indices.tolist(), written, means, strict=True)
        pictures += [captioned(samples[index], best, loss) for index, (best, *_), loss in told]
        if loaded.classes:
            chances = classes.float().cpu().double().softmax(dim=1)
            answers.append(Outcomes.of(chances, batch.labels))
    if not pictures:
        raise DataError("not one validation picture can be read")
    summed, count, other_summed, other_count = sums.tolist()
    outcomes = CaptionOutcomes(
        pictures=pictures, loss=summed / count, other_loss=other_summed / other_count
    )
    return outcomes, Outcomes.cat(answers) if answers else None


def captioned(sample: Sample, caption: Caption, loss: float) -> Captioned:
    """What the report shows of a picture."""
    return Captioned(
        path=sample.path,
        caption=caption.text,
        score=caption.score,
        ended=caption.ended,
        references=sample.captions,
        loss=loss,
    )


def word_facts(run: Training, splits: Splits) -> WordFacts:
    """What the report tells of the words."""
    task = run.task
    assert isinstance(task, Captioning)
    return WordFacts(
        captions=sum(len(sample.captions) for sample in splits.train),
        mean_tokens=task.mean_tokens,
        val_pictures=len(splits.val),
        least_gap=BLIND,
    )
