"""Lists of captions in all formats: what is read, and one clear line for what is wrong."""

import csv
import json
import os
import re

import openpyxl
import pytest

from vit.data.sources import table_reader
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import Entry, read_list
from vit.data.sources.list_formats import has_captions, list_format, read_rows
from vit.errors import DataError

COCO = {
    "info": {},
    "images": [{"id": 3, "file_name": "b.jpg"}, {"id": 1, "file_name": "a.jpg"}],
    "annotations": [
        {"id": 7, "image_id": 1, "caption": "one"},
        {"id": 8, "image_id": 3, "caption": "two"},
        {"id": 9, "image_id": 1, "caption": "three"},
    ],
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="list.txt"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def rows(path, notes=None):
    spec = DatasetSpec(path, captions=True)
    return list(read_rows(path, spec, [] if notes is None else notes))


def read(path, notes=None):
    spec = DatasetSpec(path, captions=True)
    return read_list(path, spec, [] if notes is None else notes)


def captions_of(path):
    found: dict[str, tuple[str, ...]] = {}
    for row in read(path).rows:
        found[row.name] = found.get(row.name, ()) + row.captions
    return [*found.items()]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("image,caption\na.jpg,one\n", "table"),
        ("caption;file_name\none;a.jpg\n", "table"),
        ("path\ttext\na.jpg\tone\n", "table"),
        ("\n \n Filename , TEXT \r\na.jpg,one\r\n", "table"),
        ("\ufeffimage,caption\na.jpg,one", "table"),
        ('{"file_name": "a.jpg", "text": "one"}\n', "JSON lines"),
        ('\ufeff{"image": "a.jpg", "captions": ["one"]}\r\n\r\n', "JSON lines"),
        ('{"images":[{"id":1,"file_name":"a.jpg"}],"annotations":'
         '[{"image_id":1,"caption":"one"}]}', "COCO"),
        ('\ufeff{\n "annotations": [{"image_id": 1, "caption": "one"}],\n'
         ' "images": [{"id": 1, "file_name": "a.jpg"}]}', "COCO"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["list", "list.txt", "list.csv", "list.json"])
def test_the_content_tells_the_format(write, content, kind, name):
    path = write(content, name)
    assert list_format(path, DatasetSpec(path, captions=True)) == kind
    assert has_captions(path)
    assert [(n.strip(), tuple(c.strip() for c in cs)) for n, cs in captions_of(path)] == [
        ("a.jpg", ("one",))
    ]


def test_columns_of_captions_and_labels(write):
    notes: list[str] = []
    path = write("id,caption_0,class,caption_1,image,text\n5,one,cat,two,a.jpg,no\n")
    contents = read(path, notes)
    assert contents.rows == [Entry("a.jpg", 2, ("cat",), "", "", ("one", "two"))]
    assert notes == [f"{path}: captions from caption_0, caption_1; not used: id, text"]
    path = write('{"file_name": "a.jpg", "text2": ["two", null], "text1": "one", "label": 3}\n')
    assert read(path).rows == [Entry("a.jpg", 1, ("3",), "", "", ("two", "", "one"))]


def test_quotes_commas_and_lines_in_a_cell(write):
    path = write('image,caption\r\na.jpg,"one, ""two""\r\nthree"\r\n\r\nb.jpg, "4, 5"\r\n')
    assert captions_of(path) == [("a.jpg", ('one, "two" three',)), ("b.jpg", ("4, 5",))]
    assert [row.line for row in rows(path)] == [2, 5]
    text = "x" * 140_000  # more than Python's own limit of a cell
    (row,) = rows(write(f'image,caption\na.jpg,"{text}"\n'))
    assert row.values["caption"] == text


def test_columns_of_captions_may_have_any_name_that_is_given(write):
    path = write("bild,beschreibung\n画像.png,左に赤い円、右に青い四角\n")
    with pytest.raises(DataError, match=r"among bild, beschreibung; .* --image-column$"):
        read(path)
    spec = DatasetSpec(
        path, captions=True, image_column="Bild", caption_column="beschreibung", labels=False
    )
    found = read_list(path, spec, []).rows
    assert [(row.name, row.captions) for row in found] == [
        ("画像.png", ("左に赤い円、右に青い四角",))
    ]
    assert has_captions(path, spec)
    assert not has_captions(path)


GOOD, LONG = "a.jpg,one,val\n", "b.jpg,two, three,val\n"
COMMAS = "4 cells, but 3 in the header; a cell with commas needs quotes around it"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            GOOD + LONG * 12 + GOOD + ",four,val\n",
            "13 lines cannot be read: line 3, 4, 5, 6, 7, 8, 9, 10, 11, 12: "
            + COMMAS
            + "; and 3 more",
        ),
        (
            LONG + GOOD + ",four,val\n" + "c.jpg,five,vla\n" + LONG,
            f"4 lines cannot be read: line 2, 6: {COMMAS}; line 4: no file name; give one, or "
            "delete the line; line 5: split is 'vla'; expected",
        ),
    ],
)
def test_all_bad_lines_are_named_at_once(write, lines, message):
    path = write("image,caption,split\n" + lines)
    with pytest.raises(DataError, match=re.escape(f"{path}: {message}")):
        read(path)


def test_a_table_as_pythons_own_reader_reads_it(write):
    text = "name,image,caption\n" + "".join(
        f'{n},"p{n}.jpg","a ""{n}"",{"x, " * n}\n\nend"\n' for n in range(30)
    )
    reference = list(csv.DictReader(text.splitlines(keepends=True)))
    found = [(row.values["image"], row.values["caption"]) for row in rows(write(text))]
    assert found == [(row["image"], row["caption"]) for row in reference]


def test_coco_as_its_own_tools_read_it(write):
    coco = pytest.importorskip("pycocotools.coco")
    path = write(json.dumps(COCO))
    reference = coco.COCO(path)
    expected = {
        image["file_name"]: [a["caption"] for a in reference.imgToAnns[number]]
        for number, image in reference.imgs.items()
    }
    assert {name: list(captions) for name, captions in captions_of(path)} == expected


def test_coco_on_one_long_line(write, monkeypatch):
    monkeypatch.setattr(table_reader, "MAX_LINE", 100)
    monkeypatch.setattr(table_reader, "BEGINNING", 50)
    path = write(json.dumps(COCO, separators=(",", ":")))
    assert captions_of(path) == [("b.jpg", ("two",)), ("a.jpg", ("one", "three"))]


IMAGE = '{"id": 1, "file_name": "a.jpg"}'


def coco(images, annotations):
    return f'{{"images": [{images}], "annotations": [{annotations}]}}'


WRONG = [
    ("", "empty"),
    ("\n\n", "nothing in it; expected a header and rows"),
    ("image,caption\n", "no captions in it; expected a line for each"),
    ("Một người, đàn ông\na.jpg,b\n", "line 1: no column of images among Một người, đàn ông; exp"),
    ("\x1b[31mred\u202e\nx\n", r"among \\x1b\[31mred\\u202e;"),
    ("hello\nworld\n", "line 1: no column of images among hello; expected"),
    (b"\x89PNG\r\n\x1a\n\0\0", r"line 3: has a NUL byte"),
    (b"\x89PNG\r\n\x1a\n", r"line 1: not UTF-8 \(byte 0x89\)"),
    ("image,caption\na,b\n".encode("utf-16"), "has a NUL byte, .*; save it as UTF-8"),
    (b"image,caption\na.jpg,caf\xe9\n", r"line 2: not UTF-8 \(byte 0xe9\); save it as UTF-8"),
    ("image,caption\na.jpg,a\0b\n", "line 2: has a NUL byte"),
    ("image,caption\ra.jpg,x\r", "line 1: lines end in CR alone, as on old Macs; save it"),
    ("image,label\na.jpg,cat\n", "line 1: no column of captions among image, label; expected cap"),
    ("name,caption\na.jpg,cat\n", "line 1: no column of images among name, caption; expected f"),
    ("image,caption,split\na.jpg,a, b,val\n", "line 2: 4 cells, but 3 in the header; a cell wit"),
    ("image,caption\na.jpg\n", "line 2: 1 cell, but 2 in the header"),
    ('image,caption\na.jpg,x\nb.jpg,"a\n\n', "line 3: not CSV .unexpected end of data"),
    ('image,caption,id\na.jpg,"a"b,1\n', "line 2: not CSV .*a quote inside a quoted cell is doub"),
    ("image,caption\na.jpg,\"['a', 'b']\"\n", "line 2: a list in a cell: .*use JSON lines"),
    ("a.jpg, one, two\nb.jpg\n", r"line 1: looks like data \(a.jpg, one, two\), not like na"),
    ('{"file_name": "a.jpg"}\n', "line 1: no column of captions among file_name"),
    ('{"text": "a"}\n', "line 1: no column of images among text; expected file_name"),
    ('{"file_name": "a", "text": "a"}\n{"file_name": "b"}\n', "line 2: no column of captions"),
    ('{"file_name": "a", "text": "a"}\n{"file_name"\n', "line 2: not JSON .Expecting"),
    ('{"file_name": "a", "text": "a"}\n[1]\n', "line 2: a list; expected an object in each line"),
    ('["a"]\n["b"]\n', "line 1, 2: a list; expected an object in each line"),
    ('{"file_name": 3, "text": "a"}\n', "line 1: file_name is a number; expected a file name"),
    ('{"file_name": "a", "text": 3}\n', "line 1: text is a number; expected a text or a list of"),
    ('{"file_name": "a", "text": {"en": "a"}}\n', "line 1: text is an object; expected a text"),
    ('{"file_name": "a", "text": [["a"]]}\n', "line 1: text holds a list; expected a text or a li"),
    ('{"file_name": "a", "text": Infinity}\n', "line 1: text is a number"),
    ('{"file_name": "a", "text": "a", "label": true}\n', "line 1: the label is true or false"),
    ('{"file_name": "a", "text": ' + "[" * 100_000 + "\n", "not JSON"),
    ("{", "line 1: not JSON"),
    ('{"images": [\n  {"id": 1,}\n', "line 2: not JSON"),
    *(
        (content, "not captions of COCO .*; expected a table")
        for content in (
            *('[{"image": "a.jpg", "caption": "one"}]', '{"images": 3, "annotations": []}'),
            *('{"images": []}', coco("3", ""), coco('{"id": 1}', ""), coco(IMAGE, "[]")),
            coco(IMAGE, '{"image_id": 2, "caption": "x"}'),
            coco(IMAGE, '{"image_id": 1, "bbox": []}'),
        )
    ),
    (coco('{"id": 1, "file_name": 3}', ""), "file_name is a number; expected a file name"),
    (coco(IMAGE + ',{"id": 1, "file_name": "b"}', ""), "several images of COCO have one id"),
    (coco(IMAGE, '{"image_id": 1, "caption": [["x"]]}'), "captions holds a list"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_what_is_wrong_is_one_clear_line(write, content, message):
    path = write(content)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_the_ending_tells_damaged_json_lines(write):
    path = write('{"file_name": \n{"file_name": "a", "text": "a"}\n', "metadata.jsonl")
    with pytest.raises(DataError, match=r"metadata.jsonl, line 1: not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("missing", {}, "No such file"),
        ("pipe", {}, "no regular"),
        ("", {}, "no regular"),
        ("list.txt", {"MAX_LINE": 100}, "line 2: more than 100 bytes in one line"),
        ("list.txt", {"MAX_BYTES": 150}, "more than the 0 GiB read here; split it"),
        ("coco.json", {"MAX_JSON_BYTES": 50}, "more than the 0 GiB"),
    ],
)
def test_what_is_no_file_or_too_long(write, tmp_path, monkeypatch, name, limits, message):
    os.mkfifo(tmp_path / "pipe")
    write("image,caption\na.jpg," + "x" * 200)
    write(json.dumps(COCO), "coco.json")
    for limit, value in limits.items():
        monkeypatch.setattr(table_reader, limit, value)
    with pytest.raises(DataError, match=message):
        read(str(tmp_path / name))


def test_a_sparse_file_beyond_the_limit(tmp_path):
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.write(b'{"images":[' + b" " * table_reader.BEGINNING)
        file.truncate(3 * 2**30)
    with pytest.raises(DataError, match=r"3.0 GiB, more than the 2 GiB read here"):
        read(str(path))


def test_other_files_are_no_lists(write):
    for content in ("# Title\n\ntext, caption\n", "image,label\n1,2\n", "[]", "{}", b"\xff\0", ""):
        assert not has_captions(write(content))


def test_a_title_above_the_columns_of_a_workbook_is_named_as_the_cause(tmp_path):
    book = openpyxl.Workbook()
    for row in (["My labels"], ["image", "label"], ["a.png", "a"], ["b.png", "b"]):
        book.active.append(row)
    book.save(tmp_path / "list.xlsx")
    with pytest.raises(DataError, match="1 in the header; the first row has to name the columns"):
        read_list(str(tmp_path / "list.xlsx"), DatasetSpec("list.xlsx"), [])
