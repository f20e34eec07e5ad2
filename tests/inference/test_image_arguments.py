"""Image arguments: lists are read alike by all engines."""

from PIL import Image

from vit.inference.image_arguments import find_images, input_rows


def found(word, *, lists):
    notes = []
    return find_images([str(word)], notify=notes.append, lists=lists)


def test_local_lists_are_read_alike_by_all_engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / name)
    listed = tmp_path / "data" / "list.csv"
    for header in ("image", "file_name"):
        listed.write_text(f"{header},label\na.png,x\nb.png,y\n")
        names = found("data/list.csv", lists=True)
        assert names == found("data/list.csv", lists=False)
        assert [str(tmp_path / name) for name in names] == [
            str(tmp_path / "data" / name) for name in ("a.png", "b.png")
        ]
    listed.write_text("image\ns3://bucket/a.png\nb.png\n")
    assert found("data/list.csv", lists=True) == ["s3://bucket/a.png", "data/b.png"]


def test_rows_of_an_image_in_several_lists_have_the_cells_of_all(tmp_path):
    (tmp_path / "a.csv").write_text("path,site,n\nx/1.png,A,1\nx/1.png,B,2\nx/2.png,C,3\n")
    (tmp_path / "b.jsonl").write_text('{"file_name": "x/1.png", "site": "D", "more": [1]}\n')
    rows = input_rows([str(tmp_path / "a.csv"), str(tmp_path), "-", str(tmp_path / "b.jsonl")])
    one, two = (str(tmp_path / f"x/{number}.png") for number in (1, 2))
    assert rows[one] == {
        "path": "x/1.png",
        "site": "A",
        "n": "1",  # of the first line
        "file_name": "x/1.png",
        "more": [1],
    }
    assert rows[two] == {"path": "x/2.png", "site": "C", "n": "3"}
