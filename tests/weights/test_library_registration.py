"""timm and transformers know our networks, whichever library is imported first."""

import subprocess
import sys

import pytest
import torch

from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.model.build import build_classifier
from vit.weights import library_registration
from vit.weights.convert import convert
from vit.weights.saved_model import save_model

CONV_STEM = ModelConfig(
    image_size=32, patch_size=8, dim=32, depth=2, num_heads=4, num_classes=3, stem="conv"
)

OPENING = {
    "timm": "import timm; model = timm.create_model('local-dir:{run}', pretrained=True).eval()",
    "huggingface": "import transformers; from transformers import AutoModelForImageClassification;"
    " net = AutoModelForImageClassification.from_pretrained('{out}').eval();"
    " model = lambda images: net(images).logits",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "huggingface"])
@pytest.mark.parametrize("first", ["vit", "theirs"])
def test_vit_and_the_library_may_be_imported_in_any_order(tmp_path, library, first):
    run, images = tmp_path / "run", torch.randn(2, 3, 32, 32)
    model = build_classifier(CONV_STEM).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    run.mkdir()
    save_model(
        run,
        model,
        config=Config(model=CONV_STEM),
        classes=["a", "b", "c"],
        preprocessing=Preprocessing(image_size=(32, 32)),
    )
    if library == "huggingface":
        convert(run, "huggingface", tmp_path / "out")
    torch.save({"images": images, "logits": model(images).detach()}, tmp_path / "pair.pt")
    imports = {"timm": "import timm", "huggingface": "from transformers import AutoModel"}[library]
    lines = ["import vit", imports] if first == "vit" else [imports, "import vit"]
    code = f"""
import sys
{lines[0]}
assert {first != "vit"} or not {{"torch", "timm", "transformers"}} & set(sys.modules)
{lines[1]}
{OPENING[library].format(run=run, out=tmp_path / "out")}
import torch
pair = torch.load({str(tmp_path / "pair.pt")!r})
with torch.no_grad():
    print(float((model(pair["images"]) - pair["logits"]).abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5


def test_an_incompatible_library_is_still_imported():
    with pytest.warns(UserWarning, match="no_such_plugin is not registered"):
        library_registration.import_plugin("no_such_plugin")


def test_a_check_whether_the_library_is_installed_keeps_the_plugin_pending():
    finder = library_registration.PluginFinder()
    finder.pending = {"this": "a_plugin"}
    for _ in range(2):
        spec = finder.find_spec("this")
        assert spec is not None
        assert "exec_module" in vars(spec.loader)
