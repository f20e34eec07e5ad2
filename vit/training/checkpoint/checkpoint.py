"""Checkpoints: everything that resuming a run needs, in one safetensors file without pickles.

    checkpoints/step-00001234.safetensors
        model/<name>, ema/<name>, optimizer/<name>/<moment>      tensors
        state                                                    JSON in the metadata

`CheckpointState` lists what the JSON holds. Loading takes the newest intact file and reports
damaged ones; old files are deleted only after a newer one is on the disk.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vit.atomic_files import explain_write_errors
from vit.errors import DataError, RunError, WeightsError
from vit.model.build import check_fit
from vit.text import Notify
from vit.training.distributed.fsdp import full_copies, reshard, shard_like
from vit.training.finetune.lora import HEAD
from vit.training.training_context import TrainingContext
from vit.weights.safetensors_io import read_tensors, write_tensors

CHECKPOINTS = "checkpoints"
KEEP = 2
VERSION = 1
FILE = re.compile(r"step-(\d+)\.safetensors")
# Settings of an optimiser that follow from the device: a run may be resumed on another one.
OF_DEVICE = ("foreach", "fused")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """State of a run beside its tensors; the fields are the keys of the JSON in the file."""

    step: int
    epoch: int
    """Epochs recorded in metrics.jsonl."""
    part: dict[str, Any]
    """`images` and `loss_sum` of the steps since the last recorded epoch."""
    failed: dict[str, str]
    """Images that were left out, with the reason."""
    data: dict[str, Any]
    scaler: dict[str, Any] | None
    """State of the fp16 loss scaler."""
    metrics_bytes: int
    best: list[dict[str, Any]]
    """Events of the best epochs, the best one first."""
    damaged: list[Path] = field(default_factory=list)
    """Newer checkpoints that could not be read; not stored."""

    @classmethod
    def capture(
        cls,
        run: TrainingContext,
        *,
        epoch: int,
        part: Mapping[str, Any],
        data: dict[str, Any],
        metrics_bytes: int,
        best: Sequence[dict[str, Any]],
    ) -> "CheckpointState":
        """Copy the state of `run`; later steps do not change the copy."""
        scaler = run.accelerator.scaler
        return cls(
            step=run.step,
            epoch=epoch,
            part=dict(part),
            failed=dict(run.failed),
            data=data,
            scaler=None if scaler is None else scaler.state_dict(),
            metrics_bytes=metrics_bytes,
            best=list(best),
        )

    def to_json(self) -> dict[str, Any]:
        names = (each.name for each in dataclasses.fields(self) if each.name != "damaged")
        return {name: getattr(self, name) for name in names}

    def restore(self, run: TrainingContext) -> None:
        """Set the step, the unreadable images and the loss scale of `run`."""
        run.step = self.step
        run.failed |= self.failed
        if (scaler := run.accelerator.scaler) is not None:
            scaler.load_state_dict(self.scaler)

    def require_same_data(self, now: Mapping[str, Any], *, remedy: str) -> None:
        """Refuse a dataset whose fingerprint `now` differs from the stored one."""
        then = self.data
        if then != now:
            raise DataError(
                f"the data set changed since this run began ({then['train']} training and "
                f"{then['val']} validation images then, {now['train']} and {now['val']} now; "
                f"some added, removed, renamed or relabelled): restore it to resume, or {remedy}"
            )


@dataclass(frozen=True)
class Snapshot:
    """An immutable copy of the tensors of network, average and optimiser."""

    tensors: dict[str, Tensor]
    """By part and name, as in the file; not sharded, on the CPU."""
    optimizer: dict[str, Any]
    """Numbers in the optimiser's state that are not tensors, by parameter and name."""
    groups: list[dict[str, Any]]
    """Settings of the optimiser's parameter groups."""

    def weights(self) -> dict[str, Tensor]:
        """The weights that are evaluated: averaged where an average exists."""
        parts = split_parts(self.tensors)
        return {**parts["model"], **parts["ema"]}


def take_snapshot(run: TrainingContext, *, keep: bool = True) -> Snapshot:
    """Copy the tensors of a checkpoint, so that training continues while they are written.

    If the network is sharded, every process must make this call; without `keep`, it only
    contributes its shards.
    """
    reshard(run.network)
    average = {} if run.average is None else run.average.state_dict()
    tensors = {f"model/{name}": value for name, value in run.network.state_dict().items()}
    tensors |= {f"ema/{name}": value for name, value in average.items()}
    moments, numbers = _optimizer_state(run.optimizer)
    tensors |= {f"optimizer/{name}": value for name, value in moments.items()}
    return Snapshot(full_copies(tensors, keep=keep), numbers, _group_settings(run.optimizer))


def write_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    state: CheckpointState,
    damaged: Collection[Path] = (),
) -> Path:
    """Write a checkpoint of step `state.step`, then delete all but the newest two."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {
            **state.to_json(),
            "version": VERSION,
            "optimizer": snapshot.optimizer,
            "groups": snapshot.groups,
        },
        sort_keys=True,
    )
    path = folder / f"step-{state.step:08d}.safetensors"
    write_tensors(path, snapshot.tensors, {"state": text})
    found = find_checkpoints(folder)
    kept = [each for each in found if each <= path and (each == path or each not in damaged)][:KEEP]
    with explain_write_errors(folder):
        for old in found:
            if old not in kept:
                old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, run: TrainingContext, notify: Notify) -> CheckpointState | None:
    """Load the newest intact checkpoint of `folder` into network, optimiser and average; returns
    the other state for the caller to restore, None without a checkpoint."""
    paths, damaged = find_checkpoints(folder), list[Path]()
    for path in paths:
        try:
            tensors, metadata = read_tensors(path)
        except WeightsError as error:
            notify(f"{error}; going on from the checkpoint before it")
            damaged.append(path)
            continue
        state: dict[str, Any] = json.loads(metadata["state"])
        if state.pop("version", None) != VERSION:
            raise WeightsError(
                f"{path} was written by another version of vit: finish its run with "
                "that, or start again with --overwrite"
            )
        snapshot = Snapshot(tensors, state.pop("optimizer"), state.pop("groups"))
        _restore(path, snapshot, run)
        return CheckpointState(**state, damaged=damaged)
    if paths:
        raise RunError(f"{folder}: every checkpoint is damaged; start with --overwrite")
    return None


def find_checkpoints(folder: Path) -> list[Path]:
    """Paths of the checkpoints in `folder`, the newest first."""
    found = [path for path in folder.glob("step-*.safetensors") if FILE.fullmatch(path.name)]
    return sorted(found, reverse=True)


def split_parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group the tensors of a checkpoint by part: model, ema or optimizer."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, rest = name.split("/", 1)
        parts[part][rest] = tensor
    return parts


def _restore(path: Path, snapshot: Snapshot, run: TrainingContext) -> None:
    parts, present = split_parts(snapshot.tensors), run.network.state_dict()
    try:
        check_fit(parts["model"], run.network)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    run.network.load_state_dict({n: shard_like(t, present[n]) for n, t in parts["model"].items()})
    if run.average is not None:
        run.average.load_state_dict({n: shard_like(t, present[n]) for n, t in parts["ema"].items()})
    _restore_optimizer(path, snapshot, parts["optimizer"], run.optimizer)


def _parameter_names(optimizer: Optimizer) -> list[str]:
    """Names of the parameters in the order in which a state dict numbers them."""
    return [name for group in optimizer.param_groups for name in group["names"]]


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of `optimizer` by parameter name: its tensors, and its plain numbers."""
    names = _parameter_names(optimizer)
    tensors, numbers = {}, {}
    for index, moments in optimizer.state_dict()["state"].items():
        for key, value in moments.items():
            name = f"{names[index]}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                numbers[name] = value
    return tensors, numbers


def _group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of each group besides its parameters; some optimisers count steps in them."""
    left_out = ("params", "names", "lr", *OF_DEVICE)
    return [
        {key: _to_plain(value) for key, value in group.items() if key not in left_out}
        for group in optimizer.param_groups
    ]


def _to_plain(value: Any) -> Any:
    """`value` for JSON."""
    if not isinstance(value, Tensor):
        return value
    return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}


def _from_plain(value: Any, present: Any) -> Any:
    """The inverse of `_to_plain`; JSON has no tuples, so those of `present` are restored."""
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tuple(value) if isinstance(present, tuple) else value


def _restore_optimizer(
    path: Path, snapshot: Snapshot, tensors: dict[str, Tensor], optimizer: Optimizer
) -> None:
    names, groups = _parameter_names(optimizer), optimizer.param_groups
    parameters = [each for group in groups for each in group["params"]]
    state: dict[str, dict[str, Any]] = {}
    for name, value in {**tensors, **snapshot.optimizer}.items():
        parameter, key = name.rsplit("/", 1)
        state.setdefault(parameter, {})[key] = value
    mine = _group_settings(optimizer)
    head = {name for name in names if name.startswith(HEAD)}  # in `freeze_epochs`
    fits = state.keys() in ({*names}, head, set()) and len(snapshot.groups) == len(mine)
    for theirs, ours in zip(snapshot.groups, mine, strict=False):
        # either may have more settings: versions of torch differ in them
        fits = fits and (
            theirs.keys() - {*OF_DEVICE} <= ours.keys() or ours.keys() <= theirs.keys()
        )
    if not fits:
        raise WeightsError(
            f"{path} is of another optimiser: resume with the settings and the version "
            "of vit that it was written with, or start again with --overwrite"
        )
    sharded = {
        index: {
            key: shard_like(value, parameters[index]) if isinstance(value, Tensor) else value
            for key, value in state[name].items()
        }
        for index, name in enumerate(names)
        if name in state
    }
    present = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": sharded, "param_groups": present})
    for group, saved in zip(optimizer.param_groups, snapshot.groups, strict=True):
        kept = {key: value for key, value in saved.items() if key not in OF_DEVICE}
        group.update({key: _from_plain(value, group.get(key)) for key, value in kept.items()})
