"""State dicts of any writer are read; files that could run code or exhaust memory raise."""

import argparse
import contextlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vit.errors import WeightsError
from vit.weights import state_dict_readers
from vit.weights.safetensors_io import write_tensors
from vit.weights.state_dict_readers import read_npz, read_state

WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3)
STATE = {"head.weight": WEIGHT, "head.bias": torch.tensor([0.5, -0.25])}


def refusal(path: Path, read=read_state) -> str:
    """What is said about `path`, which must be one line that names it."""
    with pytest.raises(WeightsError) as caught:
        read(path)
    line = str(caught.value)
    assert path.name in line
    assert "\n" not in line
    assert "weights_only" not in line
    return line


def same(tensors, wanted=STATE) -> bool:
    return tensors.keys() == wanted.keys() and all(
        torch.equal(tensors[name], wanted[name]) for name in wanted
    )


def save(path: Path, state=STATE, *, kind: str) -> Path:
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def reader(kind: str):
    return read_npz if kind == "npz" else read_state


# ----------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("name", ["model.safetensors", "x.pth", "x.pt", "a.bin", "a.pth.tar", "b"])
def test_the_format_is_detected_by_content(tmp_path, kind, name):
    found = read_state(save(tmp_path / name, kind=kind))
    assert same(found.tensors)
    assert (found.integers, found.notes) == ({}, ())


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_becomes_float32(tmp_path, kind, dtype):
    state = {name: tensor.to(dtype) for name, tensor in STATE.items()}
    found = read_state(save(tmp_path / "w", state, kind=kind))
    assert same(found.tensors)
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_integer_tensors_are_kept_separately(tmp_path, kind):
    whole = {"index": torch.arange(4), "mask": torch.tensor([True, False])}
    found = read_state(save(tmp_path / "w", {**STATE, **whole}, kind=kind))
    assert same(found.tensors)
    assert same(found.integers, whole)
    assert found.integers["index"].dtype == torch.int64


def test_other_entries_are_listed_in_notes(tmp_path):
    torch.save({**STATE, "epoch": 3, "arch": "vit"}, tmp_path / "w.pth")
    found = read_state(tmp_path / "w.pth")
    assert same(found.tensors)
    assert found.notes == ("w.pth: left out what is no tensor: epoch, arch",)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (["model", "state_dict", "state_dict_ema"], "state_dict_ema"),
        (["model", "model_ema"], "model_ema"),
        (["model", "state_dict"], "state_dict"),
        (["module", "model"], "model"),
        (["module", "optimizer"], "module"),
        (["model_state_dict", "optimizer"], "model_state_dict"),
        (["student", "teacher"], "teacher"),
        (["net", "optimizer"], "net"),
        (["target_encoder", "encoder", "predictor"], "encoder"),
        (["backbone"], "backbone"),
    ],
)
def test_checkpoint_keys_have_timms_order(tmp_path, keys, taken):
    states = {key: {"w": torch.full((2,), float(number))} for number, key in enumerate(keys)}
    torch.save({**states, "epoch": 4, "args": argparse.Namespace(lr=0.1)}, tmp_path / "c.pth")
    found = read_state(tmp_path / "c.pth")
    assert same(found.tensors, states[taken])
    assert found.notes[0].startswith(f"c.pth: took {taken}; beside it are ")


@pytest.mark.parametrize("other", [None, "vit_base", {"epoch": 3}])
def test_a_checkpoint_key_without_tensors_is_skipped(tmp_path, other):
    torch.save({"state_dict_ema": other, "model": STATE}, tmp_path / "c.pth")
    (note,) = read_state(tmp_path / "c.pth").notes
    assert note.startswith("c.pth: took model; beside it")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": STATE, "b": STATE, "epoch": 3}, 'torch.save(ckpt["a"], "weights.pth")'),
        ({"a": {"b": STATE}, "epoch": 3}, 'torch.save(ckpt["NAME"], "weights.pth")'),
        ({"a": {"b": STATE}}, ""),
        ({}, ""),
        ([], ""),
        (3, ""),
        ("text", ""),
        (WEIGHT, ""),
        ({3: WEIGHT}, ""),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({**STATE, "odd": torch.ones(2, dtype=torch.complex64)}, "odd"),
        ({**STATE, "odd": torch.ones(2).to(torch.float8_e4m3fn)}, ""),
        ({**STATE, "odd": torch.ones(2, device="meta")}, ""),
        ({**STATE, "odd": torch.eye(2).to_sparse()}, ""),
        ({"w": torch.tensor([1e300], dtype=torch.float64)}, "not finite"),
        ({"w": torch.zeros(1).expand(1 << 40)}, "no honest file"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_saved_object_that_is_no_plain_state_dict_is_refused(tmp_path, kind, content, message):
    assert message in refusal(save(tmp_path / "w.pth", content, kind=kind))


def test_argparse_namespace_is_allowed_only_while_loading(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    torch.save({"state_dict": STATE, "args": argparse.Namespace(lr=0.1)}, tmp_path / "c.pth")
    assert same(read_state(tmp_path / "c.pth").tensors)
    assert set(torch.serialization.get_safe_globals()) == before
    assert argparse.Namespace not in before


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_a_prefix_of_all_names_is_removed(tmp_path, prefix):
    state = {f"{prefix}{name}": tensor for name, tensor in STATE.items()}
    # torchvision's average counts its updates beside the wrapped network
    torch.save({**state, "n_averaged": torch.tensor(7)}, tmp_path / "w.pth")
    found = read_state(tmp_path / "w.pth")
    assert same(found.tensors)
    assert found.integers["n_averaged"] == 7


def test_a_prefix_of_some_names_is_kept(tmp_path):
    state = {"module.a": WEIGHT, "b": WEIGHT}
    torch.save(state, tmp_path / "w.pth")
    assert same(read_state(tmp_path / "w.pth").tensors, state)


def test_our_own_files_are_checked_for_damage(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(path, STATE, {"format": "pt"})
    assert same(read_state(path).tensors)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert "does not match its sha256" in refusal(path)


# ----------------------------------------------------------------------------- several files


@pytest.fixture(params=["safetensors", "zip"])
def sharded(request, tmp_path) -> Path:
    ending = "safetensors" if request.param == "safetensors" else "bin"
    files = {}
    for number, (name, tensor) in enumerate(STATE.items(), start=1):
        files[name] = f"model-0000{number}-of-00002.{ending}"
        save(tmp_path / files[name], {name: tensor}, kind=request.param)
    index = tmp_path / f"model.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": files}))
    return index


def test_shards_are_joined(sharded):
    assert same(read_state(sharded).tensors)


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.parent.glob("*-00002-of-*"))[0]
    gone.unlink()
    with pytest.raises(WeightsError, match=f"{gone.name} is missing"):
        read_state(sharded)


@pytest.mark.parametrize("change", ["more", "less"])
def test_shards_hold_what_the_index_says(sharded, change):
    content = json.loads(sharded.read_text())
    names = content["weight_map"]
    if change == "more":
        names["head.extra"] = names["head.bias"]
    else:
        names["head.other"] = names.pop("head.bias")
    sharded.write_text(json.dumps(content))
    assert "disagree about head." in refusal(sharded)


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/etc/passwd", "a\\b.bin", "", "..", ".hidden", "INDEX", 3, None]
)
def test_shards_lie_beside_the_index(sharded, file):
    name = sharded.name if file == "INDEX" else file
    sharded.write_text(json.dumps({"weight_map": {"head.weight": name}}))
    assert "no file beside it" in refusal(sharded)


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": []}', "{", "{" * 50_000, '{"weight_map": 1}']
)
def test_an_index_is_an_index(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert path.name in refusal(path)


# ----------------------------------------------------------------------------- what could run


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch "{self.path}"',)


def zipped(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def legacy(pickled: bytes) -> bytes:
    parts = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    return b"".join(pickle.dumps(part, 2) for part in parts) + pickled + pickle.dumps([], 2)


WRAPS = {
    "zip": lambda bad: zipped(pickle.dumps(bad, 2)),
    "zip, protocol 4": lambda bad: zipped(pickle.dumps(bad, 4)),
    "legacy": lambda bad: legacy(pickle.dumps(bad, 2)),
    "bare": lambda bad: pickle.dumps(bad, 2),
    "bare, protocol 5": lambda bad: pickle.dumps(bad, 5),
    "text": lambda bad: pickle.dumps(bad, 0),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.npz", "pytorch_model.bin"])
def test_no_code_is_run(tmp_path, monkeypatch, wrap, name):
    canary = tmp_path / "CANARY"
    payload = {"state_dict": STATE, "args": Payload(canary)} if wrap != "text" else Payload(canary)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / name).write_bytes(WRAPS[wrap](payload))
    line = "no .safetensors" if wrap == "text" else "could run code; ask for a .safetensors file"
    assert line in refusal(tmp_path / name)
    assert name in refusal(tmp_path / name, read_npz)
    assert not canary.exists()


def test_the_payload_runs_with_plain_pickle(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "CANARY")))
    assert (tmp_path / "CANARY").exists()


def test_an_object_array_is_not_unpickled(tmp_path):
    canary = tmp_path / "CANARY"
    array = np.array([Payload(canary)], dtype=object)
    np.savez(tmp_path / "w.npz", w=array)
    assert "could run code" in refusal(tmp_path / "w.npz", read_npz)
    np.save(tmp_path / "w.npy", array)
    assert "w.npy" in refusal(tmp_path / "w.npy", read_npz)
    assert "w.npy" in refusal(tmp_path / "w.npy")
    assert not canary.exists()


# ----------------------------------------------------------------------------- what could swell


class Grow:
    """Asks for `size` bytes through a function that torch finds harmless."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self):
        return bytearray, (self.size,)


@pytest.mark.parametrize("wrap", [zipped, legacy])
@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps({"w": Grow(1 << 40)}, 2), "bytearray"),
        (b"\x80\x02" + b"N0" * 1000 + b"}.", "too long"),
        (b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".", "no tensors by name"),
    ],
    ids=["memory", "opcodes", "depth"],
)
def test_pickles_that_would_swell_are_refused(tmp_path, monkeypatch, wrap, pickled, message):
    if message == "too long":
        monkeypatch.setattr(state_dict_readers, "MAX_OPCODES", 1000)
    (tmp_path / "w.pth").write_bytes(wrap(pickled))
    assert message in refusal(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["archive/data/0", "w.npy"])
def test_a_zip_bomb_is_seen_before_it_is_read(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        if name != "w.npy":
            archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr(name, bytes(1 << 26))
    read = read_npz if name == "w.npy" else read_state
    assert "declares 67,108,8" in refusal(tmp_path / "w.pt", read)


def test_an_array_longer_than_its_entry(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}".ljust(117)
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        start = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
        archive.writestr("w.npy", start + header + b"\n" + bytes(16))
    assert "shorter than it says" in refusal(tmp_path / "w.npz", read_npz)


# ----------------------------------------------------------------------------- what is broken


def put_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, end: int, shape=(2, 2), dtype="F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"w": entry(0, 1 << 40)}, 16),
        ({"w": entry(-8, 8)}, 16),
        ({"a": entry(0, 16), "b": entry(0, 16)}, 16),
        ({"a": entry(0, 16), "b": entry(32, 48)}, 48),
        ({"w": entry(0, 16)}, 20),
        ({"w": entry(0, 16)}, 15),
        ({"w": entry(0, 16, (3, 3))}, 16),
        ({"w": entry(0, 16, (1 << 40, 1 << 40))}, 16),
        ({"w": entry(0, 16, dtype="F17")}, 16),
        ({"w": entry(0, 4, dtype="F8_E4M3")}, 4),
        ({"w": entry(0, 32, dtype="C64")}, 32),
        (b"{" * 20_000, 0),
        (b"{}", 0),
        (b"{", 0),
    ],
)
def test_a_damaged_safetensors_header_raises(tmp_path, header, data):
    path = put_safetensors(tmp_path / "w.safetensors", header, bytes(data))
    assert "w.safetensors" in refusal(path)


def test_a_header_beyond_the_end(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + b"{}")
    assert "or is cut" in refusal(tmp_path / "w.safetensors")


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "npz"])
def test_a_cut_file_is_noticed_wherever_it_is_cut(tmp_path, kind):
    whole = save(tmp_path / "whole", kind=kind).read_bytes()
    cut = tmp_path / "cut.bin"
    for length in {*range(0, len(whole), 1 + len(whole) // 60), len(whole) - 1}:
        cut.write_bytes(whole[:length])
        refusal(cut, reader(kind))


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "npz"])
def test_a_changed_byte_gives_weights_or_one_line(tmp_path, kind):
    whole = bytearray(save(tmp_path / "whole", kind=kind).read_bytes())
    random = np.random.default_rng(0)
    said = []
    for place in random.integers(0, len(whole), size=150):
        changed = whole.copy()
        changed[place] ^= 1 << int(random.integers(8))
        (tmp_path / "changed.bin").write_bytes(changed)
        with contextlib.suppress(WeightsError):
            reader(kind)(tmp_path / "changed.bin")
            continue
        said.append(refusal(tmp_path / "changed.bin", reader(kind)))
    assert said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["safetensors", "zip", "npz"])
def test_values_are_finite(tmp_path, kind, value):
    state = {**STATE, "blocks.0.bad": torch.tensor([1.0, value])}
    line = refusal(save(tmp_path / "w", state, kind=kind), reader(kind))
    assert "blocks.0.bad" in line
    assert "not finite" in line


# ----------------------------------------------------------------------------- numpy


def test_arrays_are_read(tmp_path):
    arrays = {
        "head/kernel": np.arange(6, dtype=np.float64).reshape(2, 3),
        "opt/target/cls": np.ones(2, dtype=">f4"),
        "half": np.ones(2, dtype=np.float16),
        "step": np.array(7),
    }
    np.savez(tmp_path / "w.npz", **arrays)
    found = read_npz(tmp_path / "w.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == (np.int64 if name == "step" else np.float32)
    assert "numpy arrays" in refusal(tmp_path / "w.npz")


def test_bfloat16_arrays_of_jax_are_read(tmp_path):
    tensor = torch.tensor([1.0, -2.5, 0.15625])
    halves = tensor.to(torch.bfloat16).view(torch.int16).numpy()
    np.savez(tmp_path / "w.npz", w=halves.view("V2"))
    np.testing.assert_array_equal(read_npz(tmp_path / "w.npz")["w"], tensor.numpy())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(2, dtype=complex), "no weights"),
        (np.array(["a"]), "no weights"),
        (np.array([b"a"]), "no weights"),
        (np.array([1e300]), "not finite"),
    ],
)
def test_arrays_of_something_else(tmp_path, array, message):
    np.savez(tmp_path / "w.npz", w=array)
    assert message in refusal(tmp_path / "w.npz", read_npz)


@pytest.mark.parametrize("name", ["w.pth", "model.safetensors", "w.npz"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x89PNG\r\n\x1a\n" + bytes(20), b"version https://git-lfs.github.com/spec/v1\n"],
)
def test_files_of_other_formats_raise(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert "fetch it again" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cats/1.jpg"], "zip archive"),
        # torchscript, which is not run
        (["m/data.pkl", "m/constants.pkl", "m/version", "m/code/__torch__.py"], "the state_dict"),
    ],
)
def test_another_zip_is_no_weights(tmp_path, names, message):
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"3")
    assert message in refusal(tmp_path / "w.zip")
    refusal(tmp_path / "w.zip", read_npz)


def test_a_path_that_is_no_file(tmp_path):
    assert "no regular file" in refusal(tmp_path)
    assert "is missing" in refusal(tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_state(Path("a\0b"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.pth")  # opening it would wait for ever
        assert "no regular file" in refusal(tmp_path / "pipe.pth")
