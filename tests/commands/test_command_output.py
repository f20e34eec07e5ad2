"""Progress off a terminal, refusals and errors of the system: plain lines on standard error."""

import io
import shlex

import pytest

from vit.commands.command_output import Progress, print_result
from vit.errors import RunError

REFUSED = [
    ("predict {tiny} near/*.jpg", "near/*.jpg: matches no file; correct the pattern"),
    ("predict {tiny} .", "no images"),
    ("predict {tiny} a.jpg --out .", "is a folder"),
    ("predict {tiny} a.jpg --out no/such/folder.csv", "no folder"),
    ("predict {tiny} a.jpg --device gpu", "device='gpu'"),
    ("predict {tiny} a.jpg --top-k 0", "at least 1"),
    ("predict {tiny} a.jpg --batch-size many", "batch_size='many' is not a whole number"),
    ("predict {tiny} a.jpg --precision bf17", "bf17"),
    ("predict {tiny} a.jpg --formt csv", "--format"),
    ("predict {tiny}", "INPUT"),
    ("predict nothing a.jpg", "nothing"),
    ("predict {tiny} {image} --engine onnx", "export it first"),
    ("predict {tiny} {image} --engine ray", "--engine ray writes files: give --out"),
    ("predict {tiny} a.jpg --resume", "resume=True: needs out"),
    ("predict {tiny} a.jpg --resume --out /dev/null", "resume=True: needs out"),
    ("predict {tiny} a.jpg --embeddings x.npy --out -", "embeddings='x.npy': needs out"),
    ("predict {tiny} a.jpg --embeddings x.csv --out a.csv", "name it .npy"),
    ("predict {tiny} a.jpg --embeddings x.npy --out x.npy --format csv", "one file"),
    ("predict {tiny} {image} --tta flip --explain x", "leave one of tta and explain out"),
    ("predict {tiny} {image} --compile --keep-aspect", "too many shapes to compile"),
    ("predict {tiny} {image} --beams 2", "beams=2: this network names classes and writes no"),
    ("predict {tiny} {image} --seed 0", "search: this network names classes"),
    ("predict {captioner} {image} --top-k 5", "top_k=5: this network writes captions and has no"),
    ("predict {captioner} {image} --sample-top-k 5", "sample_top_k=5: temperature=0.0 does not"),
    ("predict {captioner} {image} --n-best 2", "n_best=2: is more than beams=1"),
    ("predict {captioner} {image} --max-tokens 99", "max_tokens=99: this decoder writes at most 9"),
    ("predict {captioner} {image} --temperature nan", "temperature='nan'"),
    ("predict {captioner} {image} --top-p 2", "top_p=2.0"),
    ("predict {captioner} {image} --length-penalty x", "length_penalty='x' is not a finite number"),
    ("predict {captioner} {image} --explain no/such", "there is no folder"),
    ("predict {captioner} {image} --explain code.py", "is a file"),
    ("predict {captioner} {image} --explain x --merge-tokens 1", "use merge_tokens=0"),
    ("evaluate {tiny} nothing", "nothing"),
    ("evaluate {tiny} {data} --split test", "test"),
    ("evaluate {tiny} {data} --json no/such/folder.json", "no folder"),
    ("evaluate {tiny} {data} --device gpu", "device='gpu'"),
    ("evaluate {tiny} {data} --csv-separator tab", "give --out FILE.csv"),
    ("evaluate {tiny} {data} --out a.jsonl --csv-digits 3", "csv_digits=3: the format is jsonl"),
    ("evaluate {tiny} {data} --out a.txt", "rows are written as .jsonl or .csv"),
    ("evaluate {tiny} {data} --all-scores", "all_scores=True: needs out"),
    ("evaluate {tiny} {data} --beams 2", "beams=2"),
    ("evaluate {tiny} {data} --images {data}", "images="),
    ("evaluate {tiny}", "DATA"),
    ("export {captioner} --out a.onnx --tokens", "tokens=True: a captioner is exported in fp32"),
    ("export {captioner} --out a.onnx --opset 20", "opset=20: a captioner is exported in fp32"),
    ("export {captioner} --out a.onnx --precision fp16", "precision='fp16': a captioner is"),
    ("export {captioner} --out a.onnx --max-drop 0.1", "max_drop=0.1: nothing is measured without"),
    ("export {captioner} --out a.pt2", "to='torch': {captioner} writes captions, and becomes onnx"),
    ("export {captioner} --out a.xml", "to='openvino': {captioner} writes captions, and becomes"),
    ("export {captioner} --out a.pt2 --to torch", "writes captions, and becomes onnx alone"),
    ("export {captioner} --out a.pt", "a.pt: name it .onnx, such as a.onnx"),
    ("export {captioner} --out none/a.onnx", "there is no folder"),
    ("export {captioner} --out folder.onnx --overwrite", "is a folder; give the name of a file"),
    ("export none --out a.onnx", "is not there"),
    ("verify none.onnx", "is missing, or not a file"),
    ("verify none", "none is not there; give X.onnx or X.xml, or a run folder"),
    ("verify RUM", "RUM is not there; did you mean"),
    ("verify code.py", "is no exported file: give X.onnx or X.xml, or a run folder"),
    ("verify .", "no file of weights (it has"),
    ("verify . *.jpg", "matches no file"),
    ("verify {tiny} --run {tiny}", "MODEL is a run already"),
    ("convert {tiny} --to timm --out out --push 'no owner'", "write OWNER/NAME"),
    ("convert {tiny} --to timm --out out --image none.jpg", "none.jpg"),
    ("convert {tiny} --to timm --out out --merge-tokens -1", "merge_tokens=-1: must be at least 0"),
    ("data {data} --to folder --out o --shard-size 1GB", "a folder has no shards"),
    ("data {data} --to shards --out o --shard-size 3", "must be at least 1MB"),
    ("data none --to shards --out o", "no such folder"),
    ("data {long} --to folder --out o", "{long}: File name too long"),
    ("check none", "none"),
    ("check {data} --device cpu", "weights"),
    ("check {data} --json no/x.json", "no folder"),
    ("suggest .", "--weights"),
    ("models vit_smal_patch16_224", "vit_small_patch16_224"),
    ("models --pretrained vit_smal_patch16_224", "timm/vit_small_patch16_224."),
    ("models --pretrained vit_relpos_base_patch16_224", "no supported timm model matches"),
    ("summary vit_smal_patch16_224", "the nearest are vit_small_patch16_224"),
    ("summary vit_tiny_patch16_224 --position rotry", "did you mean rotary?"),
    ("summary vit_tiny_patch16_224 --img-size 97", "the nearest are 96 and 112"),
    ("summary vit_tiny_patch16_224 --epochs 3", "--epochs is not an argument"),
    ("summary vit_tiny_patch16_224 --dim 3000000000000", "choose smaller sizes"),
    ("summary vit_tiny_patch16_224 -b 0", "whole number"),
    ("summary vit_tiny_patch16_224 --json missing/x.json", "no folder missing"),
    ("summary ./nowhere", "nowhere is not there"),
    ("summary runs\0", "is not a preset"),
    ("summary run", "has the keys ['version']"),
    ("tune", "DATA is missing"),
    ("tune digits", "time is missing: say how long the whole tuning may take: --time 30m"),
    ("tune --resume --out nowhere", "no tuning to resume there"),
    ("tune digits --time 5m --model x", "leave out --model, --weights and --method"),
    ("train {val} --show-batch batch.gif", "batch.gif: give a name that ends in .png"),
    ("train {val} --show-batch no/batch.png", "there is no folder no; create it first"),
    ("train {val} --show-batch b.png --out run", "so --out has no meaning"),
    ("train {val} --show-batch b.png --resume", "so --resume has no meaning"),
    (
        "train {val} --show-batch b.png --folds 2 --model vit_tiny_patch16_224",
        "folds=2: a run trains one fold; set --fold",
    ),
    ("train {long} --precision fp32 --out o", "{long}: File name too long"),
    ("train --help augmentatoin", "did you mean augmentation?"),
    ("demo --folds 3", "--folds is not an argument"),
    ("demo --task 3", "--task is not an argument"),
    ("demo --resume 3", "--resume is not an argument"),
    ("demo --config 3", "--config is not an argument"),
]


@pytest.mark.auto_precision
@pytest.mark.parametrize(("line", "reason"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_start_is_one_line_and_writes_nothing(
    line, reason, refusal, tiny_run, captioner, tiny_data, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("near", "run", "folder.onnx"):
        (tmp_path / folder).mkdir()
    (tmp_path / "code.py").touch()
    (tmp_path / "run/config.json").write_text('{"vit": {"version": 1}}')
    before = sorted(tmp_path.rglob("*"))
    known = {"tiny": tiny_run, "captioner": captioner, "data": tiny_data, "long": "x" * 300}
    known |= {"val": tiny_data / "val", "image": tiny_data / "val/apple/0.png"}
    assert reason.format(**known) in refusal(*shlex.split(line.format(**known)))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("total", "head"), [(9, "vit data: 5 of 9 images read, "), (0, "vit data: 5 images read, ")]
)
def test_a_line_has_what_is_known(monkeypatch, capsys, total, head):
    monkeypatch.setattr("vit.commands.command_output.SECONDS", 0.0)
    with Progress("vit data") as progress:
        for done in (1, 5):
            progress(done, total, "read")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(head)
    assert line.endswith("left" if total else "images/s")


def test_long_commands_print_lines(vit, tiny_run, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr("vit.commands.command_output.SECONDS", 0.0)
    words = ["--device", "cpu", "--precision", "fp32", "-b", "9"]
    code, _, err = vit("evaluate", tiny_run, tiny_data, *words)
    assert (code, "vit evaluate: 18 of 27 images, " in "\n".join(err)) == (0, True)
    code, _, err = vit("data", tiny_data / "val", "--to", "shards", "--out", tmp_path / "x")
    assert (code, "vit data: 2 of 27 images, " in "\n".join(err)) == (0, True)


def test_a_result_is_printed_if_its_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vit.output.output_file.os.fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        print_result("top-1 90 %", str(tmp_path / "a.json"), {"top1": 0.9})
    assert capsys.readouterr().out == "top-1 90 %\n"
    assert not [*tmp_path.iterdir()]


def test_files_of_a_result_are_written_if_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    page, record = tmp_path / "a.html", tmp_path / "a.json"
    with pytest.raises(BrokenPipeError):
        print_result("top-1 90 %", str(record), {}, write=lambda: page.touch())
    assert page.exists()
    assert record.exists()
