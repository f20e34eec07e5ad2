"""The document says what the server does, by schemathesis, which makes requests from it."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.serving.conftest import running
from vit.serving.application import OPEN_PATHS
from vit.serving.openapi_document import openapi_document
from vit.serving.server_config import ServerConfig


def test_a_token_is_asked_for_where_the_server_asks_for_it():
    for token in (None, "abc"):
        document = openapi_document(ServerConfig(token=token), ["a", "b"], OPEN_PATHS)
        assert ("security" in document) == (token is not None)
        free = {
            path for path, item in document["paths"].items() if "security" in item.get("get", {})
        }
        assert free == (
            {"/health", "/ready", "/v2/health/live", "/v2/health/ready"} if token else set()
        )
    parameters = document["paths"]["/predict"]["post"]["parameters"]
    assert parameters[0]["schema"]["enum"] == ["a", "b"]


SETTINGS = """
[checks]
# that bytes are an image, and numbers as many as a shape needs, is in no schema
positive_data_acceptance.enabled = false
# a request that is too large is refused as such, whatever else is wrong with it
negative_data_rejection.expected-statuses = [400, 401, 404, 405, 413, 415, 422, 429]
"""


@pytest.mark.slow
def test_schemathesis_finds_nothing(tiny_run, exported, tmp_path):
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    with running([f"tiny={tiny_run}", f"fruit={exported}"], token="abc") as client:
        words = f"run {client.server.url}/openapi.json --max-examples 25 --seed 1 --no-color"
        token = ["-H", "Authorization: Bearer abc"]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words.split(), *token],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        operations = sum(len({"get", "post"} & {*item}) for item in document_paths(client))
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(rf"Tested: +{operations}\n", done.stdout), done.stdout[-2000:]
    assert operations == 11


def document_paths(client):
    return client.get("/openapi.json", Authorization="Bearer abc").json["paths"].values()
