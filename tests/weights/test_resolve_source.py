"""Sources are resolved to files; errors list the searched locations and the remedy."""

import importlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save, save_file

from vit.errors import WeightsError
from vit.weights import hub
from vit.weights.formats import timm_network
from vit.weights.resolve_source import (
    PREFERRED_FILES,
    TRAINING_STATE_FILES,
    card_license,
    choose_weights_file,
    locate_weights,
    required_files,
)
from vit.weights.state_dict_readers import read_npz, read_state

STATE = {"head.weight": torch.ones(2, 3)}
SAVED = save(STATE)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "pretrained_cfg": {"tag": "mine", "license": "apache-2.0"},
}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
SMALL = "vit_small_patch16_224.augreg_in21k_ft_in1k"


def make(folder: Path, config: object = None, *, names=("model.safetensors",)) -> Path:
    """A folder with weights of every name in `names`, and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        save_file(STATE, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(source, **options) -> str:
    with pytest.raises(WeightsError) as caught:
        locate_weights(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------- on this disk


def test_a_run_folder(tiny_run):
    found = locate_weights(tiny_run)
    assert (found.kind, found.name) == ("run", "tiny")
    assert found.weights == tiny_run / "model.safetensors"
    assert found.config == tiny_run / "config.json"
    assert found.license is None  # ours does not say whose images they were
    assert locate_weights(tiny_run / "model.safetensors").kind == "run"


@pytest.mark.parametrize(
    ("config", "kind", "name", "terms"),
    [
        (TIMM, "timm", "vit_tiny_patch16_224.mine", "apache-2.0"),
        ({**TIMM, "model_type": "timm_wrapper"}, "timm", "vit_tiny_patch16_224.mine", "apache-2.0"),
        # as older files of timm are
        (
            {"architecture": "vit_tiny_patch16_224", "license": "mit", "num_classes": 3},
            "timm",
            "vit_tiny_patch16_224",
            "mit",
        ),
        (VIT, "huggingface", "pets", None),
        (None, "file", "model", None),
    ],
    ids=["timm", "wrapper", "flat", "transformers", "bare"],
)
@pytest.mark.parametrize("inside", ["", "model.safetensors"])
def test_weights_are_known_by_the_config_beside_them(tmp_path, inside, config, kind, name, terms):
    folder = make(tmp_path / "pets", config)
    found = locate_weights(str(folder / inside))
    assert (found.kind, found.name, found.license) == (kind, name, terms)
    assert (found.folder, found.weights) == (folder, folder / "model.safetensors")
    assert (found.config, found.processor) == (folder / "config.json" if config else None, None)


@pytest.mark.parametrize("processor", ["preprocessor_config.json", "processor_config.json"])
def test_a_folder_of_huggingface_has_a_processor_and_a_card(tmp_path, processor):
    folder = make(tmp_path / "pets", VIT)
    (folder / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# Pets\n")
    (folder / processor).write_text("{}")
    found = locate_weights(folder)
    assert (found.license, found.processor) == ("cc-by-nc-4.0", folder / processor)


def test_numpy_weights_are_known_by_their_content(tmp_path):
    with (tmp_path / "S_16.pth").open("wb") as file:
        np.savez(file, cls=np.ones(2))
    found = locate_weights(tmp_path / "S_16.pth")
    assert (found.kind, found.name) == ("npz", "S_16")
    assert set(read_npz(found.weights)) == {"cls"}


def test_a_list_of_shards(tmp_path):
    shard = "model-00001-of-00001.safetensors"
    folder = make(tmp_path / "big", VIT, names=[shard])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"head.weight": shard}}))
    for source in (folder, index):
        found = locate_weights(source)
        assert (found.kind, found.weights, found.notes) == ("huggingface", index, ())
        assert set(read_state(found.weights).tensors) == {"head.weight"}


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    make(tmp_path / "w", TIMM)
    assert locate_weights("~/w").folder == tmp_path / "w"


# ----------------------------------------------------------------------------- which file


@pytest.mark.parametrize("number", range(len(PREFERRED_FILES)))
def test_the_order_of_names_is_that_of_timm(number):
    name, notes = choose_weights_file([*PREFERRED_FILES[number:], "aaa.safetensors"])
    assert name == PREFERRED_FILES[number]
    assert notes[0].startswith(f"took {name}, not ")


def test_our_order_keeps_that_of_timm():
    from timm.models import _hub

    theirs = list(_hub._PREFERRED_FILES)
    assert [name for name in PREFERRED_FILES if not name.endswith(".json")] == theirs


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["b.pth", "a.bin", "c.safetensors"], "c.safetensors"),
        (["last.pth.tar", "notes.txt"], "last.pth.tar"),
        (["weights.pt", "optimizer.pt", "rng_state.pth", "training_args.bin"], "weights.pt"),
        (["S_16.npz"], "S_16.npz"),
    ],
)
def test_other_names_follow_their_endings(names, chosen):
    assert choose_weights_file(names)[0] == chosen


def test_only_the_companions_of_weights_are_passed_over():
    assert not any(TRAINING_STATE_FILES.fullmatch(name) for name in PREFERRED_FILES)


def test_skipped_files_are_noted(tmp_path):
    folder = make(tmp_path, TIMM, names=["model.safetensors", "pytorch_model.bin"])
    assert locate_weights(folder).notes == ("took model.safetensors, not pytorch_model.bin",)


def test_required_files_of_a_repository():
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    small = ["README.md", "config.json", "preprocessor_config.json"]
    old = ["pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "runs/model.safetensors"]
    index = "model.safetensors.index.json"
    assert set(required_files([*small, *old, *shards, index])) == {*small, *shards, index}
    assert set(required_files([*small, *old])) == {*small, "pytorch_model.bin"}
    assert set(required_files([*small, *old, "model.safetensors"])) == {*small, "model.safetensors"}


# ----------------------------------------------------------------------------- licences


@pytest.mark.parametrize(
    ("card", "terms"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\r\ntags:\r\n- vision\r\nlicense: 'apache-2.0'  # yes\r\n---\r\n", "apache-2.0"),
        ("---\nlicense:\n- cc-by-4.0\ntags: [a]\n---\n", "cc-by-4.0"),
        (
            "---\nlicense: other\nlicense_name: dinov3-license\nlicense_link: LICENSE.md\n---\n",
            "dinov3-license (LICENSE.md)",
        ),
        ("---\nlicense: a\x1b[31m\n---\n", "a\\x1b[31m"),
        ("---\ntags:\n  license: mit\n---\n", None),
        ("---\nlicense:\n---\n", None),
        ("# no head\nlicense: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_license_of_a_model_card(tmp_path, card, terms):
    (tmp_path / "README.md").write_text(card, newline="")
    assert card_license(tmp_path / "README.md") == terms


# ----------------------------------------------------------------------------- refused paths


REMEDY = "give another path, hf/OWNER/NAME of the hub, or timm/NAME"


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({"w.safetensors": SAVED, "config.json": b'{"model_'}, "", "is no JSON.*again$"),
        ({"w.safetensors": SAVED, "config.json": b'{"hidden_size": 3}'}, "", "no known library"),
        ({"w.safetensors": SAVED, "config.json": b'{"pretrained_cfg": {}}'}, "", "no architecture"),
        ({"w.safetensors": SAVED, "config.json": b"[]"}, "", "no JSON object"),
        ({"w.safetensors": SAVED, "config.json": b"{}"}, "config.json", "give its folder"),
        ({"a.bin": b"x", "b.bin": b"x"}, "", r"several files of weights: a.bin, b.bin; give one"),
        ({"w.onnx": b"x"}, "w.onnx", "exported already"),
        ({"w.onnx": b"x"}, "", "w.onnx is an ONNX file"),
        ({"cat.jpg": b"x"}, "", r"no file of weights \(it has cat.jpg\)"),
        ({}, "", "it has no files"),
        ({"run/model.safetensors": b"x", "a": b"x"}, "", "give one of its folders: .*run$"),
        ({"run/model.safetensors": b"x", "folds.json": b"{}"}, "", "without --folds, or one"),
        ({}, "\x1b.pth", r"\\x1b.pth is not there"),
    ],
)
def test_what_is_no_source_on_this_disk_is_refused(tmp_path, files, source, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert re.search(message, refusal(tmp_path / source))


def test_addresses_are_refused():
    assert "/a/w.pth is an address: give OWNER/NAME" in refusal("https://example.com/a/w.pth")


def test_a_missing_path_is_a_short_line_that_no_hub_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "unreachable_reason", lambda: pytest.fail("the hub was asked"))
    assert refusal("runs/x") == f"runs is not there; {REMEDY}"
    (tmp_path / "runs/y").mkdir(parents=True)
    assert refusal("runs/x") == f"runs/x is not there; {REMEDY}"
    assert refusal("runs/yy") == "runs/yy is not there; did you mean runs/y?"
    make(Path("weights"), names=["vit_small.safetensors"])
    assert "vit_small.safetensors" in refusal("./weights/vit_smal.safetensors")
    assert "did you mean weights/vit_small.safetensors?" in refusal("weights/vit_small")
    assert "weigths is not there; did you mean weights?" in refusal("weigths/x.pth")


@pytest.mark.parametrize("source", ["", " ", "a\0b", "x" * 5000, ".", "..", "a//b", "a/../b"])
def test_invalid_names_raise(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    assert len(refusal(source, offline=True).splitlines()) == 1


@pytest.mark.parametrize("text", ["a/b/c", "a b", "../a", "a/..", "a@b@c", "", "a/b@../../c"])
def test_names_that_the_hub_cannot_have(text):
    with pytest.raises(WeightsError, match="no name on the Hugging Face Hub"):
        hub.Repository.parse(text)


# ----------------------------------------------------------------------------- the hub's cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of huggingface_hub, which must not ask the network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def put(cache: Path, repository: str, files: dict[str, bytes], revision: str = "main") -> Path:
    """Fill the cache as huggingface_hub does: blobs, and a snapshot of links to them."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (home / "blobs" / f"{number}").write_bytes(content)
        (snapshot / name).symlink_to(Path("../..") / "blobs" / f"{number}")
    (home / "refs" / revision).write_text(COMMIT)
    return snapshot


def files(config: object) -> dict[str, bytes]:
    known = {"config.json": json.dumps(config).encode()} if config else {}
    return {**known, "model.safetensors": SAVED}


QUICK = "vit_base_patch32_clip_quickgelu_224.openai"


@pytest.mark.parametrize(
    ("repository", "config", "source"),
    [
        ("o/n", VIT, "o/n"),
        ("o/n", VIT, "hf/o/n"),
        ("o/n", VIT, "HF-Hub:o/n"),
        ("o/n", VIT, "o/n@main"),
        # as requested, whatever config.json says, and without one, which timm does not fetch
        (f"timm/{SMALL}", TIMM, f"timm/{SMALL}"),
        (f"timm/{SMALL}", TIMM, "timm/vit_small_patch16_224"),
        (f"timm/{SMALL}", None, f"timm/{SMALL}"),
        (f"timm/{SMALL}", None, f"hf-hub:timm/{SMALL}"),
        # two networks share a repository
        (timm_network.find_entry(QUICK).hub_id, TIMM, f"timm/{QUICK}"),
    ],
)
def test_the_cache_is_enough(cache, repository, config, source):
    snapshot = put(cache, repository, files(config))
    found = locate_weights(source)
    kind = "huggingface" if config == VIT else "timm"
    name = {"o/n": "o/n", f"timm/{SMALL}": SMALL}.get(repository, QUICK)
    assert (found.kind, found.name, found.folder) == (kind, name, snapshot)
    assert found.license == (None if config == VIT else "apache-2.0")
    assert found.notes == ()
    assert set(read_state(found.weights).tensors) == {"head.weight"}


def test_the_card_of_a_repository_is_read_without_a_config(cache):
    name = "open_clip_model.safetensors"
    files = {name: SAVED, "README.md": b"---\nlicense: mit\n---\n"}
    put(cache, "o/n", files)
    assert (locate_weights("o/n").kind, locate_weights("o/n").license) == ("file", "mit")
    small = ["README.md", "open_clip_config.json"]
    assert set(required_files([*small, name, "tokenizer.json"])) == {*small, name}


def test_a_revision_of_the_cache(cache):
    put(cache, "o/n", files(VIT), revision="v2")
    for revision in ("v2", COMMIT):
        assert locate_weights(f"o/n@{revision}").kind == "huggingface"
    assert "HF_HUB_OFFLINE is set" in refusal("o/n")  # its main branch is not here
    assert "--revision v3" in refusal("o/n@v3")


def test_a_name_that_timm_renamed():
    renamed = timm_network.find_entry("vit_small_patch16_224_in21k")
    assert renamed.name == "vit_small_patch16_224.augreg_in21k"


@pytest.mark.parametrize("reference", ["../../../../secret", "..", "", "a b"])
def test_a_reference_cannot_escape_the_cache(cache, reference):
    put(cache, "o/n", files(VIT))
    (cache / "models--o--n" / "refs" / "main").write_text(reference)
    make(cache.parent / "secret", VIT)
    assert "o/n" in refusal("o/n")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            "timm/vit_small_patch16_224",
            [
                "HF_HUB_OFFLINE is set",
                f"hub/models--timm--{SMALL}",
                f"https://huggingface.co/timm/{SMALL}",
                f"`hf download timm/{SMALL} --local-dir {SMALL}`",
                f"--weights {SMALL}",
            ],
        ),
        ("o/configured", ["hf download o/configured"]),
        (SMALL, [f"of timm it is timm/{SMALL}"]),
        ("no_such_network", ["timm/NAME"]),
        ("timm/vit_smal_patch16_224", ["timm/vit_small_patch16_224."]),
        ("timm/vit_small_patch16_224.nonsense", ["timm has no such name"]),
        ("timm/vit_x.y", ["fetch https://a.b/c/x.pth, and give"]),
    ],
)
def test_what_the_cache_does_not_have_is_refused_with_a_remedy(cache, monkeypatch, source, parts):
    put(cache, "o/configured", {"config.json": json.dumps(VIT).encode()})
    if source == "timm/vit_x.y":
        known = timm_network.RegistryEntry("vit_x.y", None, "https://a.b/c/x.pth", None, (224, 224))
        monkeypatch.setattr(timm_network, "find_entry", lambda _: known)
    line = refusal(source)
    assert [part for part in parts if part not in line] == []


def test_a_path_goes_before_the_hub(cache):
    put(cache, "o/n", files(VIT))
    make(Path("o/n"), TIMM)
    assert locate_weights("o/n").kind == "timm"
    assert locate_weights("hf-hub:o/n").kind == "huggingface"


def test_the_environment_switches_the_hub_off(cache, monkeypatch):
    """Without any patch: huggingface_hub reads the environment when it is imported."""
    put(cache, "o/n", files(VIT))
    monkeypatch.undo()
    try:
        monkeypatch.chdir(cache.parent / "here")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        importlib.reload(constants)
        assert locate_weights("o/n").kind == "huggingface"
        with pytest.raises(WeightsError, match="o/other was not found: HF_HUB_OFFLINE is set"):
            locate_weights("o/other")
    finally:
        monkeypatch.undo()
        importlib.reload(constants)


# ----------------------------------------------------------------------------- a hub that answers


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as fetching needs: what a repository has, and its files."""

    repositories: dict[str, dict[str, bytes]]
    refused: dict[str, tuple[int, str]]  # repository -> status, code of the hub's own
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.reply(send=False)

    def do_GET(self) -> None:
        self.reply(send=True)

    def reply(self, *, send: bool) -> None:
        words = self.path.partition("?")[0].strip("/").split("/")
        words = words[2:] if words[:2] == ["api", "models"] else words
        name, api = "/".join(words[:2]), self.path.startswith("/api")
        content = self.repositories.get(name, {})
        if name in self.refused and not (api and self.refused[name][1] == "GatedRepo"):
            return self.answer(self.refused[name][0], b"", {"X-Error-Code": self.refused[name][1]})
        if not name:
            return self.answer(200, b"", {})
        if api:
            siblings = [{"rfilename": file, "size": len(text)} for file, text in content.items()]
            info = {"id": name, "sha": COMMIT, "siblings": siblings}
            return self.answer(200, json.dumps(info).encode(), {})
        file = words[-1]
        if send:
            self.fetched.append(f"{name}/{file}")
        heads = {"ETag": f'"{name}/{file}"'.replace("/", "-"), "X-Repo-Commit": COMMIT}
        return self.answer(200, content[file], heads, send=send)

    def answer(self, status: int, body: bytes, heads: dict[str, str], *, send: bool = True) -> None:
        self.send_response(status)
        for name, value in {**heads, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if send and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(cache, monkeypatch):
    """A hub on this computer, which huggingface_hub takes for the real one."""
    repositories = {f"timm/{SMALL}": files(TIMM), "o/n": files(VIT)}
    repositories["o/n"] |= {"README.md": b"---\nlicense: mit\n---\n", "pytorch_model.bin": b"no"}
    handler = type("Mine", (Hub,), {"repositories": repositories, "refused": {}, "fetched": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{running.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    yield handler
    running.shutdown()
    running.server_close()


def test_only_what_is_needed_is_fetched_and_once(server, cache, monkeypatch, capsys):
    found = locate_weights("o/n")
    said = capsys.readouterr().err
    assert said.startswith("downloading http://127.0.0.1:")
    assert "/o/n: 3 files, 0.0 MB, to " in said
    assert (found.kind, found.name, found.license) == ("huggingface", "o/n", "mit")
    assert set(read_state(found.weights).tensors) == {"head.weight"}
    wanted = ["o/n/README.md", "o/n/config.json", "o/n/model.safetensors"]
    assert sorted(server.fetched) == wanted
    assert locate_weights("o/n").folder == found.folder
    assert sorted(server.fetched) == wanted
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_weights("o/n").folder == found.folder  # what was fetched is enough afterwards


def test_timm_is_fetched_by_its_short_name(server):
    found = locate_weights("timm/vit_small_patch16_224")
    assert (found.kind, found.name) == ("timm", SMALL)


@pytest.mark.parametrize(
    ("status", "code", "word"),
    [
        (403, "GatedRepo", "accept its terms there"),
        (401, "GatedRepo", "hf auth login"),
        (404, "RepoNotFound", "if it is gated or private"),
        (404, "RevisionNotFound", "no revision"),
        (403, "", "fetching failed"),
    ],
)
def test_gated_and_private_repositories_raise_with_a_remedy(server, cache, status, code, word):
    server.refused["o/n"] = (status, code)
    line = refusal("o/n@v1")
    assert word in line
    assert str(cache / "models--o--n") in line
    assert "hf download o/n --revision v1 --local-dir n" in line


def test_a_repository_without_weights(server):
    server.repositories["o/n"].pop("model.safetensors")
    server.repositories["o/n"].pop("pytorch_model.bin")
    assert "no file of weights (it has README.md, config.json)" in refusal("o/n")


def test_a_hub_that_fails_leaves_the_cache(server, cache):
    put(cache, "o/cached", files(VIT))
    server.refused["o/cached"] = (404, "RepoNotFound")
    found = locate_weights("o/cached")
    assert found.kind == "huggingface"
    assert found.notes[0].startswith("o/cached is from the cache: there is no ")


def test_an_unreachable_hub_is_detected_without_retries(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it tries again and again"))
    assert "http://127.0.0.1:9 cannot be reached" in refusal("o/n")
    assert "this is an offline run" in refusal("o/n", offline=True)
