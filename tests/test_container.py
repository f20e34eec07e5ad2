"""The Dockerfile and the manifest for Kubernetes say what the package understands.

No Docker runs in the tests: the steps of the Dockerfile do, in a fresh virtual environment.
"""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.exported.test_exported_classifier import written
from tests.serving.conftest import ask, wait_for
from vit.commands import serve_command
from vit.commands.command_parser import CommandParser, options_of
from vit.serving import application
from vit.serving.server_config import ServerConfig

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MANIFEST = ROOT / "docs" / "examples" / "kubernetes.yaml"


def instruction(name: str) -> list[str]:
    """The words of an instruction in the exec form."""
    text = re.search(rf"^{name} .*?(\[.*\])$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)
    assert text is not None
    words: list[str] = json.loads(text[1])
    return words


def copied() -> list[str]:
    """Files and folders that the build copies from the repository."""
    lines = re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    return [word for line in lines for word in line.split()]


def test_the_build_sees_what_it_copies_and_the_rest_stays_outside():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n", 1)[1].split()
    assert rules[0] == "*"
    assert sorted(copied()) == sorted(rule[1:] for rule in rules if rule.startswith("!"))
    assert all((ROOT / name).exists() for name in copied())
    assert not any(fnmatch("vit", rule) for rule in rules[1:])


def parse(words: list[str]):
    parser = CommandParser(prog="vit serve")
    serve_command.add_arguments(parser)
    return parser.parse(words)


def test_the_container_is_not_root_and_starts_a_server_of_its_own_port():
    vit, serve, *flags = instruction("ENTRYPOINT")
    assert (vit, serve) == ("vit", "serve")
    args = parse([*flags, *instruction("CMD")])
    config = options_of(args, ServerConfig)
    assert (config.host, args.models) == ("0.0.0.0", ["/model"])
    assert f"EXPOSE {config.port}\n" in DOCKERFILE
    assert f":{config.port}/health" in instruction("HEALTHCHECK")[-1]
    last_user = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert f"useradd --uid {last_user}" in DOCKERFILE


def test_the_template_of_a_space_serves_one_model_inside_its_page(monkeypatch):
    """Of the Hugging Face hub, whose front matter has the port."""
    space = ROOT / "packaging" / "space"
    lines = (space / "Dockerfile").read_text(encoding="utf-8").splitlines()
    program, *words = json.loads(lines[-1].removeprefix("CMD "))[1:]
    args = parse(words)
    config = options_of(args, ServerConfig)
    front = yaml.safe_load((space / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert (front["sdk"], front["app_port"]) == ("docker", config.port)
    assert (config.host, args.models) == ("0.0.0.0", ["model.onnx"])
    assert f"COPY {program} {args.models[0]} ./" in lines
    monkeypatch.setattr(application, "PAGE_POLICY", application.PAGE_POLICY)
    assert "frame-ancestors 'none'" in application.PAGE_POLICY
    runpy.run_path(str(space / program))
    assert application.PAGE_POLICY.endswith("frame-ancestors https://huggingface.co")


def test_the_manifest_fits_the_server_and_the_image():
    parts = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}
    assert {*parts} == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    pod = parts["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = parse(container["args"])
    config = options_of(args, ServerConfig)
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    sources = [args.token_file, *(word.rpartition("=")[2] for word in args.models)]
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in sources)
    names = {one["name"] for one in pod["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == names
    (port,) = container["ports"]
    assert port["containerPort"] == config.port
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.stop_timeout + waits
    probes = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")
    }
    assert [one["path"] for one in probes.values()] == ["/ready", "/ready", "/health"]
    assert {one["port"] for one in probes.values()} == {port["name"]}
    selector = parts["Service"]["spec"]["selector"]
    assert selector == pod["metadata"]["labels"]
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == selector
    assert parts["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    target = parts["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
    assert target == parts["Deployment"]["metadata"]["name"]


def run(words: list[object], folder: Path) -> None:
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "HOME", "VIRTUAL_ENV")
} | {"HOME": "/nonexistent", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def needed(wheel: Path, *extras: str) -> list[Requirement]:
    """Libraries that a wheel needs on this machine."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    found = [
        Requirement(line.removeprefix("Requires-Dist: "))
        for line in lines
        if line.startswith("Requires-Dist: ")
    ]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras)
    ]


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_lead_to_a_server_that_answers(tiny_data, tmp_path):
    """Libraries are those of the running interpreter, so that nothing is downloaded."""
    pytest.importorskip("setuptools", minversion="77")
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source)
    assert "pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ." in DOCKERFILE
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*wheel, "--wheel-dir", tmp_path, "."], source)
    (built,) = tmp_path.glob("*.whl")
    run([sys.executable, "-m", "venv", environment], tmp_path)
    python = environment / "bin" / "python"
    (packages,) = (environment / "lib").glob("python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (packages / "base.pth").write_text("\n".join(libraries) + "\n")
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--ignore-installed"]
    run([*pip, built], tmp_path)
    assert '.whl)[serve,onnx]"' in DOCKERFILE
    assert len(needed(built, "serve", "onnx")) > len(needed(built)) + 5
    for one in needed(built, "serve", "onnx"):
        assert one.specifier.contains(version(one.name), prereleases=True), one

    model, log = written(tmp_path / "fruit.onnx"), tmp_path / "log"
    vit, *words = instruction("ENTRYPOINT")
    words = [str(environment / "bin" / vit), *words, "--host", "127.0.0.1", "--port", "0"]
    with (
        open(log, "w") as file,
        subprocess.Popen(
            [*words, str(model)], cwd=source.parent, env=ENVIRONMENT, stderr=file
        ) as server,
    ):
        try:
            wait_for(lambda: "listening at" in log.read_text() or server.poll() is not None)
            (port,) = map(int, re.findall(r"listening at http://127.0.0.1:(\d+)", log.read_text()))
            assert ask(port, "GET", "/ready").json == {"status": "ready"}
            assert b"<html" in ask(port, "GET", "/").body
            image = next((tiny_data / "val").rglob("*.*")).read_bytes()
            assert len(ask(port, "POST", "/predict", image).json["results"]) == 1
            _, *check = [word.replace(":8000/", f":{port}/") for word in instruction("HEALTHCHECK")]
            run([python, *check], tmp_path)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
        finally:
            server.kill()
    with pytest.raises(AssertionError, match="refused"):
        run([python, *check], tmp_path)
