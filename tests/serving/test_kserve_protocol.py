"""The v2 protocol as tritonclient speaks it; its bytes were compared with that client's."""

import base64
import json
import struct
import tracemalloc
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from tests.serving.conftest import running
from tools.code_blocks import read_blocks
from vit.serving.kserve_protocol import parse_request
from vit.serving.request_body import RequestError
from vit.serving.server_config import ServerConfig

RGB = MagicMock()
"""A model of images of 8 bits."""
RGB.predictor.preprocessing.channels = None


def infer(client, body: bytes, model="tiny", **headers):
    return client.ask("POST", f"/v2/models/{model}/infer", body, **headers)


def request(name, datatype, shape, **more):
    tensor = {"name": name, "datatype": datatype, "shape": shape}
    outputs = more.pop("outputs", None)
    record = {"id": "7", "inputs": [tensor | more]}
    return json.dumps(record | ({"outputs": outputs} if outputs else {})).encode()


def encoded(files):
    return [base64.b64encode(content).decode() for _, content in files]


def rows_without_names(rows):
    return [json.loads(row) | {"image": ""} for row in rows]


def test_metadata_name_the_tensors(client):
    assert client.get("/v2").json["extensions"] == ["binary_tensor_data", "classification"]
    assert client.get("/v2/health/live").json == {"live": True}
    assert client.get("/v2/models/tiny/ready").json == {"name": "tiny", "ready": True}
    tiny = client.get("/v2/models/tiny").json
    assert [one["name"] for one in tiny["outputs"]] == ["probabilities", "rows"]
    assert tiny["outputs"][0]["shape"] == [-1, 3]
    captions = client.get("/v2/models/captions/versions/1").json
    assert [one["name"] for one in captions["outputs"]] == ["caption", "rows"]


@pytest.mark.parametrize("model", ["tiny", "captions", "fruit"])
def test_rows_of_encoded_images_are_those_of_vit_predict(client, files, predicted, model):
    files = files[:5] if model == "captions" else files
    body = request("encoded", "BYTES", [len(files)], data=encoded(files))
    answer = infer(client, body, model).json
    assert (answer["id"], answer["model_name"]) == ("7", model)
    outputs = {one["name"]: one["data"] for one in answer["outputs"]}
    assert rows_without_names(outputs["rows"]) == rows_without_names(
        predicted(model, paths=[path for path, _ in files])
    )
    assert [json.loads(row)["image"] for row in outputs["rows"][:2]] == ["0", "1"]


def test_binary_tensors_give_the_same_bits(client, files, predicted):
    strings = b"".join(struct.pack("<I", len(one)) + one for _, one in files[:3])
    outputs = [
        {"name": "probabilities", "parameters": {"binary_data": True}},
        {"name": "rows"},
    ]
    head = request(
        "encoded",
        "BYTES",
        [3, 1],
        parameters={"binary_data_size": len(strings)},
        outputs=outputs,
    )
    answer = infer(client, head + strings, Inference_Header_Content_Length=str(len(head)))
    length = int(answer.headers["inference-header-content-length"])
    record = json.loads(answer.body[:length])
    table = np.frombuffer(answer.body[length:], "<f8").reshape(record["outputs"][0]["shape"])
    for line, row in zip(predicted("tiny")[:3], table, strict=True):
        scores = [one["score"] for one in json.loads(line)["predictions"]]
        assert scores == sorted(row.tolist(), reverse=True)


def test_pixels_give_the_answer_of_their_file(client, files, predicted):
    place = next(n for n, (name, _) in enumerate(files) if name.endswith(".png"))
    pixels = np.asarray(Image.open(files[place][0]).convert("RGB"))[None]
    expected = json.loads(predicted("tiny")[place]) | {"image": ""}
    body = request("images", "UINT8", [*pixels.shape], data=pixels.ravel().tolist())
    (row,) = rows_without_names(infer(client, body).json["outputs"][1]["data"])
    assert row == expected
    parameters = {"binary_data_size": pixels.nbytes}
    wanted = [{"name": "probabilities", "parameters": {"classification": 2}}]
    head = request("images", "UINT8", [*pixels.shape], parameters=parameters, outputs=wanted)
    length = {"Inference_Header_Content_Length": str(len(head))}
    answer = infer(client, head + pixels.tobytes(), **length).json
    best = [(one["score"], one["label"]) for one in expected["predictions"][:2]]
    found = [text.split(":") for text in answer["outputs"][0]["data"]]
    assert [(float(score), label) for score, _, label in found] == best


def nested(data, levels):
    """`data` in as many lists."""
    for _ in range(levels):
        data = [data]
    return data


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b"[" + b"[]," * 3_000_000 + b"[]]", "at most 8 MB"),
        (b'{"inputs": []}', "one tensor"),
        (request("x", "UINT8", [1]), "give `images` or `encoded`"),
        (request("images", "FP32", [1, 2, 2, 3], data=[0]), "datatype is UINT8"),
        (request("images", "UINT8", [1, 2, 2, 4], data=[0]), "height, width, 3"),
        (request("images", "UINT8", [1, 2, -2, 3], data=[0]), "above 0"),
        (request("images", "UINT8", [1, 1, 1, 3], data=[1, 2, 300]), "0 to 255"),
        (request("images", "UINT8", [1, 1, 1, 3], data=[[1], [2, 3]]), "whole numbers"),
        (request("images", "UINT8", [1, 1, 1, 3], data=nested([1, 2, 3], 40)), "whole numbers"),
        (request("images", "UINT8", [1, 1, 1, 3], data=nested([1, 2, 3], 99)), "whole numbers"),
        (request("images", "UINT8", [1, 1, 1, 3]), "whole numbers"),
        (request(5, "UINT8", [1]), "name: give a string"),
        (b'{"inputs": [5]}', "not a JSON object"),
        (request("images", "UINT8", [1, 10**5, 10**5, 3], data=[0]), "than the limit"),
        (request("images", "UINT8", [1, 10**4000, 10**4000, 3], data=[0]), "than the limit"),
        (request("encoded", "BYTES", [65], data=["eA=="]), "at most 64 images"),
        (request("encoded", "BYTES", [2], data=["eA=="]), "the shape says 2"),
        (request("encoded", "BYTES", [1], data=["?"]), "base64"),
        (request("encoded", "BYTES", [1], data=["eA=="]), "not a readable image"),
        (request("encoded", "BYTES", [1], parameters={"binary_data_size": 9}), "0 bytes follow"),
        (request("encoded", "BYTES", [1], data=["eA=="], outputs=[{"name": "y"}]), "'y'"),
    ],
)
def test_wrong_requests_are_refused_with_a_sentence(client, body, words):
    answer = infer(client, body)
    assert 400 <= answer.status < 500
    assert words in answer.json["error"]


def test_lengths_that_do_not_fit_are_refused(client):
    head = request("encoded", "BYTES", [1], parameters={"binary_data_size": 8})
    for strings in (struct.pack("<I", 5) + b"abcd", struct.pack("<I", 2**32 - 1) + b"abcd"):
        answer = infer(client, head + strings, Inference_Header_Content_Length=str(len(head)))
        assert "do not fit" in answer.json["error"]
    answer = infer(client, head, Inference_Header_Content_Length="99999")
    assert answer.status == 400


def test_a_string_among_numbers_takes_no_memory_for_each_of_them():
    body = request("images", "UINT8", [1, 10, 10, 3], data=["x" * 100_000, *[0] * 299])
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="whole numbers from 0 to 255"):
            parse_request(body, None, RGB, ServerConfig())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5e6


def test_strings_are_split_up_to_the_limit_of_images():
    strings = struct.pack("<I", 0) * 65
    head = request("encoded", "BYTES", [1], parameters={"binary_data_size": len(strings)})
    with pytest.raises(RequestError, match="at most 64 images"):
        parse_request(head + strings, str(len(head)), RGB, ServerConfig())


def test_the_documented_client_gets_answers(
    tiny_run, exported, files, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("geventhttpclient", reason="pip install 'tritonclient[http]'")
    (tmp_path / "cat.jpg").write_bytes(files[1][1])
    monkeypatch.chdir(tmp_path)
    (code,) = (
        block.text
        for block in read_blocks("python")
        if block.page == "serve.md" and "tritonclient" in block.text
    )
    with running([f"photos={tiny_run}", f"pets={exported}"]) as client:
        exec(code.replace("8000", str(client.port)), {})
    assert '"predictions": [' in capsys.readouterr().out
