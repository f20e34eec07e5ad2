"""`-b auto`: the search for the largest micro-batch, and the dry run of one."""

import contextlib
import gc
import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.training.children import complete
from tests.training.runs import SIZES
from vit.config import ModelConfig, RunConfig
from vit.config.setting_layers import make_config, read_settings, write_settings
from vit.errors import RunError
from vit.model.build import build_classifier
from vit.training import time_budget
from vit.training.activation_checkpointing import recompute_blocks
from vit.training.auto_batch_size import (
    GIB,
    fit_memory,
    micro_batch_sizes,
    note_many_tokens,
    take_steps,
)
from vit.training.distributed.devices import make_accelerator
from vit.training.settings_from_data import prepare_data
from vit.training.trial_training import dry_run, largest_that_fits


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """A search collects garbage after each size that does not fit: not among all modules."""
    gc.collect()
    gc.freeze()


def full() -> torch.OutOfMemoryError:
    """What torch raises, new each time: an exception holds its traceback, and that the memory."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.fixture
def accelerator(tiny_config):
    return make_accelerator(tiny_config().run)


@pytest.mark.parametrize(
    ("share", "pairs", "sizes"),
    [
        (12, False, [12, 6, 4, 3, 2, 1]),
        (12, True, [12, 6, 4, 2]),
        (96, True, [96, 48, 32, 24, 16, 12, 8, 6, 4, 2]),
        (7, False, [7, 1]),
        (7, True, [7]),  # its last image has no partner anyhow
        (1, True, [1]),
    ],
)
def test_micro_batches_split_evenly_and_keep_pairs(share, pairs, sizes):
    assert micro_batch_sizes(share, pairs=pairs) == sizes


@pytest.mark.parametrize(
    ("most", "found"), [(100, 12), (12, 12), (11, 6), (5, 4), (3, 2), (1, None)]
)
def test_the_search_takes_the_largest_that_fits(accelerator, most, found):
    tried: list[int] = []

    def trial(size: int) -> float:
        tried.append(size)
        if size > most:
            raise full()
        return float(size)

    result = largest_that_fits([12, 6, 4, 2], trial, accelerator)
    assert result == (None if found is None else (found, found))
    assert tried == [size for size in [12, 6, 4, 2] if size >= (found or 0)]


def test_an_error_other_than_full_memory_is_raised(accelerator):
    def broken(size: int) -> float:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        largest_that_fits([12, 6], broken, accelerator)


def test_a_dry_run_steps_like_the_run_and_changes_no_state(tiny_config, accelerator):
    config = tiny_config(accumulate=3, num_classes=3)
    seen = {}

    def act(run):
        before = {name: value.clone() for name, value in run.average.state_dict().items()}
        take_steps(run, 4)
        seen["steps"] = {int(moments["step"]) for moments in run.optimizer.state.values()}
        seen["stateful"] = len(run.optimizer.state) == len(list(run.network.parameters()))
        average = run.average.state_dict()
        seen["averaged"] = any(not torch.equal(before[name], average[name]) for name in before)

    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    dry_run(config, accelerator, act)
    assert seen == {"steps": {2}, "stateful": True, "averaged": True}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert accelerator._models == accelerator._optimizers == []


def test_memory_is_free_again_after_a_trial_that_filled_it(tiny_config, accelerator):
    """A traceback holds what a failed trial had built; it must be gone before the next one."""
    alive: list[weakref.ref] = []
    seen: list[bool] = []

    def act(run):
        seen.append(any(network() is not None for network in alive))
        alive.append(weakref.ref(run.network))
        if len(alive) < 3:
            raise full()

    def trial(size: int) -> float:
        dry_run(tiny_config(num_classes=3), accelerator, act)
        return 1.0

    assert largest_that_fits([12, 6, 4], trial, accelerator) == (4, 1.0)
    assert seen == [False, False, False]
    assert alive[-1]() is None


@pytest.mark.parametrize(
    ("size", "patch", "batch", "note"),
    [
        (2048, 16, 4, None),
        (20_000, 16, 4, r"image_size=20000 is 1,562,500 tokens an image: a step of 4 images "),
        (224, 1, 1, r"is 50,176 tokens an image: a step of 1 image takes about .* [GM]iB \("),
    ],
)
def test_sizes_beyond_reason_are_named_with_their_cost(
    tiny_config, accelerator, size, patch, batch, note
):
    config, notes = tiny_config(image_size=size, patch_size=patch, batch_size=batch), []
    note_many_tokens(config, accelerator, notes.append)
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0])


def test_a_cpu_takes_the_whole_batch_with_a_note(tiny_config, accelerator):
    said: list[str] = []
    config = fit_memory(tiny_config(accumulate=None), accelerator, said.append)
    assert config.data.accumulate == 1
    assert len(said) == 1
    assert "device=cpu does not say when its memory is full" in said[0]
    assert fit_memory(tiny_config(accumulate=2), accelerator, said.append).data.accumulate == 2
    assert len(said) == 1


@pytest.fixture
def gpu_for(monkeypatch):
    """Stands for two GPUs of 24 GiB on which so many images fit."""

    def arrange(most: int) -> SimpleNamespace:
        def dry_run(config, accelerator, act, _splits):
            if config.data.batch_size // (2 * config.data.accumulate) > most:
                raise full()

        properties = SimpleNamespace(total_memory=24 * GIB)
        room = contextlib.nullcontext(22 * GIB)
        monkeypatch.setattr("vit.training.auto_batch_size.dry_run", dry_run)
        monkeypatch.setattr("vit.training.auto_batch_size.limit_gpu_memory", lambda _: room)
        monkeypatch.setattr(
            "vit.training.trial_training.max_over_processes", lambda _, number: number
        )
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", id)
        monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda _: 18.3 * GIB)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
        return SimpleNamespace(
            device=torch.device("cuda", 0), num_processes=2, free_memory=lambda: None
        )

    return arrange


@pytest.mark.parametrize(
    ("most", "accumulate", "line"),
    [
        (300, 2, "batch_size=1024 in 2 micro-batches of 256 a device (18.3 of 24.0 GiB)"),
        (512, 1, "batch_size=1024 in 1 micro-batch of 512 a device (18.3 of 24.0 GiB)"),
        (3, 256, "batch_size=1024 in 256 micro-batches of 2 a device (18.3 of 24.0 GiB)"),
    ],
)
def test_a_gpu_takes_the_largest_size_that_fits(tiny_config, gpu_for, most, accumulate, line):
    said: list[str] = []
    config = tiny_config(batch_size=1024, accumulate=None)
    fitted = fit_memory(config, gpu_for(most), said.append)
    assert (fitted.data.batch_size, fitted.data.accumulate) == (1024, accumulate)
    assert said == [f"note: {line}"]


def test_a_network_that_is_too_large_has_a_remedy(tiny_config, gpu_for):
    config = tiny_config(batch_size=16, accumulate=None)
    with pytest.raises(RunError, match=r"not even 2 images of 16 px fit into 22\.0 GiB.*FSDP"):
        fit_memory(config, gpu_for(1), print)
    config = tiny_config(batch_size=16, accumulate=None, mixup=0, cutmix=0)
    with pytest.raises(RunError, match=r"an image of 16 px .* use --checkpoint-activations, a"):
        fit_memory(config, gpu_for(0), print)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_chosen_size_fits_a_real_gpu(tiny_config, compiled):
    torch.cuda.set_device(0)
    # few blocks: each size that is tried is compiled anew
    large = {"image_size": 224, "patch_size": 16, "dim": 192, "depth": 3, "num_heads": 3}
    large |= {"batch_size": 1024, "num_classes": 10, "device": "cuda", "precision": "bf16"}
    config = tiny_config(**large, accumulate=None, compile=compiled)
    accelerator, said = make_accelerator(config.run), []
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
    try:
        fitted = fit_memory(config, accelerator, said.append)
        parts = fitted.data.accumulate
        assert 1 < parts < 512
        assert torch.cuda.memory_reserved() < GIB / 2
        dry_run(fitted, accelerator, lambda run: take_steps(run, 1024 // parts))
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(2 * GIB / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert f"in {parts} micro-batches of {1024 // parts} a device" in said[0]


def agree(settings: Path) -> int:
    """In each of two processes: both find the same size, the same gradients and the same epochs."""
    accelerator = make_accelerator(RunConfig(device="cpu", precision="fp32"))
    rank = accelerator.process_index
    assert accelerator.num_processes == 2

    def trial(size: int) -> float:
        if size > (12, 4)[rank]:
            raise full()
        return float(size * (1 + rank))

    assert largest_that_fits([12, 6, 4, 2], trial, accelerator) == (4, 8.0)

    def gradients(*, recompute: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network = build_classifier(ModelConfig(**SIZES, num_classes=3, dropout=0.2, drop_path=0.3))
        torch.nn.init.normal_(network.head.weight)
        if recompute:
            recompute_blocks(network)
        model = accelerator.prepare(network).train()
        torch.manual_seed(rank)
        images, labels = torch.randn(6, 3, 16, 16), torch.arange(6) % 3
        with accelerator.no_sync(model):
            F.cross_entropy(model(images[:2]), labels[:2]).backward()
        F.cross_entropy(model(images[2:]), labels[2:]).backward()
        return {name: parameter.grad for name, parameter in network.named_parameters()}

    once, twice = gradients(recompute=False), gradients(recompute=True)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    gathered = accelerator.gather(twice["blocks.0.attn.qkv.weight"][None])
    assert torch.equal(gathered[0], gathered[1])

    time_budget.MOST_SECONDS = 0.05
    config = make_config({**read_settings(settings), "time": "1h"})
    config, splits, _ = prepare_data(config, accelerator, print)
    began = time.monotonic() - 600 * rank  # one of them was started later
    fitted, _ = time_budget.fit_time(config, splits, accelerator, lambda _: None, began=began)
    epochs = torch.tensor([fitted.training.epochs])
    assert epochs > 100
    assert len(set(accelerator.gather(epochs).tolist())) == 1
    print("both agree")
    return 0


@pytest.mark.slow
def test_two_processes_choose_the_same_size_and_number_of_epochs(tiny_config, tmp_path):
    write_settings(tmp_path / "settings.yaml", tiny_config(num_classes=3))
    said = complete(agree, tmp_path / "settings.yaml", log=tmp_path / "log", processes=2)
    assert said.count("both agree") == 2
