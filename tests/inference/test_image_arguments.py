"""Image arguments: lists are read alike by all engines."""

from PIL import Image

from vit.inference.image_arguments import find_images


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
