"""HTML pages of reports: one offline file, no script, every text escaped.

Text becomes markup in one place, `tag`. Anything that is not `Html` is made printable and escaped:
class names and file names come from users.
"""

import html
from collections.abc import Mapping

from vit.errors import printable

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LONG = 72  # characters of a name that are shown; beyond, its ends
VOID = frozenset({"meta", "img", "br"})

LIGHT = """
    --ink: #1b2027; --soft: #56606e; --line: #d8dee6; --paper: #ffffff; --card: #f5f7fa;
    --train: #b45309; --val: #1d4ed8; --bar: #dbe6ff; --strong: #ffffff;
"""
DARK = """
    --ink: #e7ebf1; --soft: #9ba6b5; --line: #323a46; --paper: #12161c; --card: #1a2029;
    --train: #f2ae63; --val: #85a9ff; --bar: #26375e; --strong: #ffffff;
"""
STYLE = (
    ":root { color-scheme: light dark;"
    + LIGHT
    + "}\n@media (prefers-color-scheme: dark) { :root {"
    + DARK
    + "} }\n@media print { :root { color-scheme: light;"
    + LIGHT
    + """} }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem;
    background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
    overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 2.75rem 0 .5rem; font-size: 1.2rem; break-after: avoid; }
p { margin: .4rem 0; max-width: 46rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { margin: .3rem 0 1rem; padding: .7rem .9rem; border: 1px solid var(--line);
    border-radius: 8px; background: var(--card); white-space: pre-wrap; }
.soft { color: var(--soft); }
.small { font-size: .88rem; }
.hero { display: flex; flex-wrap: wrap; align-items: baseline; gap: .2rem 1.2rem;
    margin: 1.4rem 0 .6rem; }
.hero b { font-size: clamp(2.8rem, 9vw, 4.2rem); line-height: 1; letter-spacing: -.02em;
    font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr));
    gap: .6rem; margin: 1.2rem 0; padding: 0; }
.tiles div { padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 8px;
    background: var(--card); break-inside: avoid; display: flex; flex-direction: column;
    justify-content: space-between; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600; white-space: nowrap; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
    gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
.wide { width: 100%; }
th { font-weight: 600; text-align: left; }
thead th { color: var(--soft); font-size: .82rem; vertical-align: bottom; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; overflow-wrap: normal; }
th code, td code { white-space: nowrap; overflow-wrap: normal; }
tr { break-inside: avoid; }
.bar { background: linear-gradient(var(--bar), var(--bar)) left / 0 100% no-repeat; }
.name { min-width: 7rem; max-width: 22rem; font-weight: 400; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--val); }
.heat { font-size: .85rem; }
.heat td { min-width: 2.05rem; padding: .3rem .2rem; border: 1px solid var(--line);
    text-align: center; }
.heat th { border: 0; font-weight: 400; }
.heat tbody th { position: sticky; left: 0; background: var(--paper); text-align: right; }
.heat tbody bdi { display: block; max-width: 12rem; overflow: hidden; white-space: nowrap;
    text-overflow: ellipsis; }
.heat thead th { padding: .3rem .1rem; text-align: left; color: var(--ink); white-space: nowrap; }
.heat .up { display: inline-block; max-height: 9rem; overflow: hidden; writing-mode: vertical-rl;
    transform: rotate(180deg); white-space: nowrap; text-overflow: ellipsis; }
.heat .strong { color: var(--strong); }
.heat .none { color: var(--soft); opacity: .45; }
.wall { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .9rem;
    margin: .8rem 0 0; padding: 0; }
.wall figure { border: 1px solid var(--line); border-radius: 8px; background: var(--card);
    overflow: hidden; }
.wall img { display: block; width: 100%; height: 8.5rem; object-fit: contain;
    background: repeating-conic-gradient(#8884 0 25%, #8882 0 50%) 0 0 / 16px 16px; }
.wall img.tiny { image-rendering: pixelated; }
.wall figcaption { padding: .45rem .6rem .55rem; font-size: .85rem; line-height: 1.35; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; }
svg .title { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .best { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 4; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .train { stroke: var(--train); }
svg .val { stroke: var(--val); }
svg .train.line { stroke-dasharray: 6 5; }
svg circle.train { fill: var(--train); }
svg circle.val { fill: var(--val); }
svg circle.other { fill: var(--soft); opacity: .55; }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--line); }
@media (max-width: 34rem) {
    .wordy { display: none; }
    .name { min-width: 4.4rem; }
    .heat tbody bdi { max-width: 6rem; }
    .wall { grid-template-columns: repeat(2, 1fr); }
    th, td { padding: .28rem .4rem; }
}
@media print {
    html { font-size: 12px; }
    body { max-width: none; padding: 0; }
    * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
    .scroll { overflow: visible; }
    details:not([open]) { display: none; }
}
"""
)


class Html(str):
    """Markup that may stand as it is."""

    __slots__ = ()


def safe(value: object) -> Html:
    """`value` as markup: any text but `Html` is made printable and escaped."""
    return value if isinstance(value, Html) else Html(html.escape(printable(value)))


def join(*parts: object) -> Html:
    """`parts` one after the other, each made safe."""
    return Html("".join(safe(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; `class_` is the attribute class, `text_anchor` is text-anchor, None is left out.

    Children are separated by nothing, so that no space appears where none was meant.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def called(name: object) -> Html:
    """A name that somebody chose; its writing direction does not reach its neighbours."""
    text = printable(name)
    if len(text) <= LONG:
        return tag("bdi", text)
    return tag("bdi", f"{text[: LONG // 2]} ... {text[-LONG // 3 :]}", title=text)


def table(head: list[Html], rows: list[list[Html]], **attributes: object) -> Html:
    """A table from cells; it scrolls by itself where the page is narrow."""
    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", *head)),
            tag("tbody", *(join(tag("tr", *row), Html("\n")) for row in rows)),
            **attributes,
        ),
        class_="scroll",
    )


def numbers(*values: object) -> list[Html]:
    """Cells of numbers, one for each of `values`."""
    return [tag("td", value, class_="n") for value in values]


def document(title: str, *sections: Html) -> Html:
    """The whole page; `sections` are its body."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    lines = [join(section, Html("\n")) for section in sections]
    return join(Html("<!DOCTYPE html>\n"), tag("html", head, tag("body", *lines), lang="en"))


def hero(number: str, words: str, tiles: Mapping[str, object]) -> Html:
    """The one number, what it is, and the smaller ones beside it."""
    return join(
        tag("div", tag("b", number), tag("span", words), class_="hero"),
        tag(
            "dl",
            *(tag("div", tag("dt", k), tag("dd", v)) for k, v in tiles.items()),
            class_="tiles",
        ),
    )
