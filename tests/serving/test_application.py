"""Rows of the server are those of `vit predict`; refusals are sentences."""

import dataclasses
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.conftest import png_bomb
from tests.serving.conftest import BOUNDARY, multipart, running
from tests.slow_cases import mostly_slow
from vit.errors import ConfigError
from vit.inference.predictor import Predictor
from vit.score_calibration import ScoreCalibration
from vit.serving.served_model import RowOptions, ServedModel
from vit.weights.saved_model import load_run, update_run

MODELS = ("tiny", "several", "captions", "fruit")


@pytest.mark.parametrize("model", mostly_slow(MODELS, 2))
def test_rows_are_those_of_vit_predict_byte_for_byte(client, files, predicted, model):
    if model == "captions":
        files = files[:5]
    expected = predicted(model, paths=[path for path, _ in files])
    assert len(set(expected)) == len(files) > 4
    assert client.send(files, model=model).rows == expected
    for place in (0, 3, len(files) - 1):
        name, content = files[place]
        assert client.send([files[place]], model=model).rows == [expected[place]]
        assert client.post(content, model=model, name=name).rows == [expected[place]]


@pytest.mark.parametrize(
    ("model", "query", "flags"),
    [
        ("tiny", {"top_k": 1}, ["--top-k", "1"]),
        ("tiny", {"top_k": 99, "threshold": 0.4}, ["--top-k", "99", "--threshold", "0.4"]),
        ("tiny", {"sets": 0.9, "reject": "true"}, ["--sets", "0.9", "--reject"]),
        ("several", {"threshold": 0.6}, ["--threshold", "0.6"]),
        ("several", {"threshold": 0}, ["--threshold", "0"]),
        ("several", {"top_k": 2}, ["--top-k", "2"]),
        ("fruit", {"top_k": 2, "threshold": 0.2}, ["--top-k", "2", "--threshold", "0.2"]),
    ],
)
def test_options_are_those_of_vit_predict(client, files, predicted, model, query, flags):
    assert client.send(files, model=model, **query).rows == predicted(model, *flags)


def test_each_client_gets_its_own_answers_whoever_asks_at_the_same_time(client, files, predicted):
    expected = {model: predicted(model) for model in ("tiny", "fruit")}

    def ask(seed: int) -> bool:
        chosen = random.Random(seed)
        model = chosen.choice([*expected])
        places = chosen.sample(range(len(files)), chosen.choice([1, 1, 2, 5]))
        answer = client.send([files[place] for place in places], model=model)
        return answer.rows == [expected[model][place] for place in places]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(60)))
    sizes = [
        line
        for line in client.get("/metrics").body.decode().splitlines()
        if "images_bucket" in line
    ]
    shared = [float(line.split()[-1]) for line in sizes if 'model="tiny"' in line]
    assert shared[-1] > shared[0], "no batch had more than one image"


def test_names_of_images_come_back_as_they_were_sent(client, files):
    content = files[0][1]
    for name in ("a b.png", "../../etc/passwd", "<img onerror=x>", "\u732b.png", "a\udcffb.png"):
        (row,) = client.send([(name, content)]).json["results"]
        assert row["image"] == name


def test_an_unreadable_image_has_an_error_beside_rows_of_the_others(client, files, predicted):
    expected = predicted("tiny")
    answer = client.send([files[0], ("text.jpg", b"no image"), files[1], ("none.png", b"")])
    assert answer.status == 200
    first, text, second, empty = answer.rows
    assert [first, second] == expected[:2]
    assert json.loads(text) == {"image": "text.jpg", "error": "not a readable image (text)"}
    assert json.loads(empty)["error"] == "an empty file (0 bytes)"


def test_only_unreadable_images_are_refused(client, files):
    whole = files[1][1]
    for content in (b"no image", whole[: len(whole) // 2], png_bomb(30_000), b"\xff\xd8\xff"):
        answer = client.post(content)
        assert answer.status == 422
        assert len(answer.json["error"]) > 10
    answer = client.send([("a", b"x"), ("b", b"y")])
    assert answer.status == 422
    assert "none of the 2 images" in answer.json["error"]
    assert len(answer.json["results"]) == 2


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"model": "../tiny"}, 404, "served are tiny, several"),
        ({"model": ""}, 404, "served are"),
        ({"topk": 3}, 400, "top_k"),
        ({"beams": 3}, 400, "flag --beams of vit serve"),
        ({"top_k": 0}, 400, "at least 1"),
        ({"top_k": "1" * 300}, 400, "at least 1"),
        ({"sets": "nan"}, 400, "above 0"),
        ({"reject": "perhaps"}, 400, "true or false"),
        ({"threshold": -0.1}, 400, "give a number from 0 to 1"),
        ({"sets": 0}, 400, "give a number above 0 to 1"),
        ({"reject": 1, "model": "several"}, 400, "calibrat"),
        ({"sets": 0.9, "model": "captions"}, 400, "no classes"),
        ({"explain": "jpg"}, 400, "give json or image"),
        ({"explain": "json", "model": "fruit"}, 400, "serve the run folder"),
        ({"name": "x" * 1001}, 400, "1000 characters"),
        ({"name": ""}, 400, "empty"),
    ],
)
def test_wrong_queries_are_refused_with_a_sentence(client, files, query, status, words):
    answer = client.post(files[0][1], **query)
    assert answer.status == status
    assert words in answer.json["error"]


def test_wrong_bodies_are_refused_with_a_sentence(client, files):
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    good = multipart(files[:2])
    bodies = [
        (b"", "image/png", 400, "no image"),
        (b"{}", "application/json", 415, "multipart"),
        (b"", kind, 400, "cut short"),
        (good[:-9], kind, 400, "cut short"),
        (good[: len(good) // 2], kind, 400, "cut short"),
        (b"--x" + good, kind, 400, "not well formed"),
        (multipart(files[:1], field="image"), kind, 400, "`file`"),
        (multipart([("n" * 5000, b"x")]), kind, 400, "not well formed"),
        (good, "multipart/form-data", 400, "boundary"),
        (good, "multipart/mixed; boundary=x", 400, "boundary"),
        (f"--{BOUNDARY}--\r\n".encode(), kind, 400, "no image"),
    ]
    for body, content_type, status, words in bodies:
        answer = client.ask("POST", "/predict", body, Content_Type=content_type)
        assert (answer.status, words in answer.json["error"]) == (status, True), answer.json
    answer = client.ask("POST", "/predict", b"x", Content_Encoding="gzip")
    assert (answer.status, "gzip" in answer.json["error"]) == (415, True)


def test_other_paths_and_methods_are_refused(client):
    for method, path, status in [
        ("GET", "/predict", 405),
        ("POST", "/models", 405),
        ("GET", "/page/../server_config.py", 404),
        ("GET", "/v2/models/none", 404),
        ("GET", "/v2/models/tiny/versions/2", 404),
    ]:
        answer = client.ask(method, path)
        assert answer.status == status
        assert answer.json["error"]
    assert "this path takes POST;" in client.ask("GET", "/predict").json["error"]


def test_maps_are_those_of_vit_predict(client, files, predicted, sources, tmp_path):
    maps = tmp_path / "maps"
    predicted("tiny", "--explain", str(maps), paths=[files[0][0]])
    (written,) = maps.glob("*.json")
    expected = json.loads(written.read_text(encoding="utf-8"))
    answer = client.send([files[0], ("bad", b"")], explain="json").json
    first, second = answer["explanations"]
    assert second is None
    assert first["seen"] == expected["seen"]
    for one, other in zip(first["classes"], expected["classes"], strict=True):
        assert (one["label"], one["weights"]) == (other["label"], other["weights"])
    shown = client.send(files[:1], explain="image").json["explanations"][0]["seen"].pop("image")
    assert shown.startswith("data:image/jpeg;base64,")
    words = client.post(files[0][1], explain="json", model="captions").json["explanations"][0]
    assert " ".join(word["text"] for word in words["words"]).split() == words["caption"].split()
    several = client.post(files[0][1], explain="json", model="several", threshold=0).json
    labels = [one["label"] for one in several["results"][0]["predictions"]]
    assert [one["label"] for one in several["explanations"][0]["classes"]] == labels
    assert len(labels) == 3


@pytest.mark.parametrize(("temperature", "exponent"), [(1.0, 1.0), (1.0, 1.2), (0.8, 1.0)])
def test_scores_that_are_kept_raw_are_not_called_calibrated(temperature, exponent):
    kept = ScoreCalibration(temperature=temperature, exponent=exponent, images=60)
    served = SimpleNamespace(predictor=SimpleNamespace(calibration=kept))
    assert ServedModel.calibrated.fget(served) == ((temperature, exponent) != (1, 1))


def test_what_it_serves_and_how_it_is(client, sources):
    models = client.get("/models").json["models"]
    assert [one["name"] for one in models] == [*sources]
    assert models[0]["classes"] == ["apple", "class10", "class2"]
    assert [one["captions"] for one in models] == [False, False, True, False]
    assert [one["rejects"] for one in models] == [True, False, False, False]
    assert [one["sets"] for one in models] == [True, False, False, False]
    assert client.get("/health").json == {"status": "alive"}
    assert client.get("/ready").json == {"status": "ready"}
    document = client.get("/openapi.json").json
    assert document["openapi"] == "3.1.0"
    for path in document["paths"]:
        if "{" not in path and "get" in document["paths"][path]:
            assert client.get(path).status == 200
    metrics = client.get("/metrics").body.decode()
    assert 'vit_requests_total{route="/models",status="200"}' in metrics


def test_metrics_count_the_answers_of_reject(client, files):
    def counts() -> dict[str, float]:
        lines = client.get("/metrics").body.decode().splitlines()
        found = [line for line in lines if line.startswith('vit_reject_images_total{answer="')]
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}

    before = counts()
    assert set(before) == {"class", "uncertain", "unlike the training images"}
    client.send(files, model="tiny")
    assert counts() == before
    rows = client.send([*files, ("text.jpg", b"text")], model="tiny", reject="true").json["results"]
    answers = [row.get("reason", "class") for row in rows if "error" not in row]
    assert len(answers) == len(files)
    assert counts() == {name: before[name] + answers.count(name) for name in before}


def test_reject_needs_no_proven_threshold_where_a_largest_distance_is_known(
    distance_run, files, tmp_path
):
    run = shutil.copytree(distance_run, tmp_path / "run")
    calibration = dataclasses.replace(load_run(run).calibration, threshold=None)
    update_run(run, {"calibration": calibration.to_dict()})
    with running([run]) as client:
        assert client.get("/models").json["models"][0]["rejects"]
        rows = client.send(files, reject="true").json["results"]
    expected = Predictor(run, device="cpu", precision="fp32")(
        [path for path, _ in files], reject=True
    )
    assert [row.get("reason") for row in rows] == [one.unknown for one in expected]
    assert {one.unknown for one in expected} == {None, "unlike the training images"}


def test_answers_forbid_sniffing_frames_and_caches(client, files):
    for answer in (client.get("/models"), client.post(files[0][1]), client.post(b"x")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


def test_an_unexpected_error_is_answered_as_json_and_logged(client, monkeypatch, capfd):
    monkeypatch.setattr(client.server.application.metrics, "text", lambda: 1 / 0)
    answer = client.get("/metrics")
    assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
    assert answer.json == {"error": "the server failed; its log has the reason"}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_page_of_another_site_cannot_ask_under_its_own_name(client):
    assert client.get("/models", Host="evil.example").status == 421
    assert client.get("/models", Host="localhost:1234").status == 200


def test_a_token_is_needed_for_all_but_health_and_the_page(exported, files):
    with running([exported], token="secret", allowed_hosts=("vit.example",)) as client:
        for path in ("/models", "/metrics", "/openapi.json", "/v2", "/nothing"):
            for header in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                answer = client.get(path, **header)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                reason = "is not the token of" if header else "needs a token"
                assert reason in answer.json["error"]
        assert client.post(files[0][1]).status == 401
        assert client.get("/ready").status == client.get("/health").status == 200
        allowed = {"Authorization": "Bearer secret", "Host": "vit.example"}
        assert client.get("/models", **allowed).status == 200


def test_reject_of_a_multilabel_network_takes_no_other_threshold(monkeypatch):
    monkeypatch.setattr("vit.inference.predictor.check_selection", lambda *_, **__: None)
    engine = SimpleNamespace(
        run=None, classes=("a", "b"), thresholds=(0.5, 0.5), calibration=None, keep_aspect=False,
        answers=None, prepare=None, preprocessing=SimpleNamespace(intensity_range=None),
    )  # fmt: skip
    model = SimpleNamespace(predictor=Predictor(engine), explains=False)
    ServedModel.check(model, RowOptions(reject=True))
    with pytest.raises(ConfigError, match=r"reject with threshold=0.4: .*leave one of the two out"):
        ServedModel.check(model, RowOptions(threshold=0.4, reject=True))
