"""Pieces of the report's page: HTML without scripts, one style sheet, everything inside the file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
:root { --ink: #1c2430; --muted: #5d6672; --line: #e1e5ea; --paper: #ffffff; --soft: #f5f7f9;
        --accent: #1f5fa8; --warn: #8a5300; --warn-soft: #fdf6ea; }
* { box-sizing: border-box; }
html { color-scheme: light; }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 16px/1.55 "Inter", "Segoe UI", "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
       font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased; }
main { max-width: 58rem; margin: 0 auto; padding: 3.5rem 1.75rem 5rem; }
.eyebrow { margin: 0; color: var(--muted); font-size: .82rem; letter-spacing: .04em; }
h1 { margin: .15rem 0 0; font-size: 2.3rem; line-height: 1.15; letter-spacing: -.02em; font-weight: 650; }
h2 { margin: 3.25rem 0 .35rem; font-size: 1.2rem; letter-spacing: -.01em; font-weight: 650; }
h3 { margin: 1.4rem 0 .4rem; font-size: .95rem; font-weight: 600; }
p { margin: .35rem 0 .9rem; max-width: 44rem; }
.lead { margin-top: .7rem; font-size: 1.06rem; color: #38424e; }
.note { color: var(--muted); font-size: .88rem; }
.scores { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 2.2rem;
          margin: 1.8rem 0 1.5rem; }
.score .name { display: block; font-size: .85rem; color: var(--muted); }
.score .value { display: block; font-size: 3.3rem; line-height: 1.1; letter-spacing: -.035em;
                font-weight: 650; }
.score .range { display: block; font-size: .85rem; color: var(--muted); }
.score.after .value { color: var(--accent); }
.arrow { width: 3rem; color: #a3abb6; }
.arrow svg { display: block; width: 100%; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); margin: 0;
         border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.tiles div { padding: .8rem 1rem .85rem 0; min-width: 0; }
.tiles dt { font-size: .8rem; color: var(--muted); }
.tiles dd { margin: 0; font-size: 1.16rem; font-weight: 600; letter-spacing: -.01em;
            overflow-wrap: anywhere; }
.missing { margin: 1.8rem 0 0; padding: .8rem 1.1rem; background: var(--warn-soft);
           border-left: 3px solid #d9a441; color: var(--warn); font-size: .92rem; }
.missing ul { margin: .25rem 0 0; padding-left: 1.1rem; }
figure { margin: .9rem 0 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-top: .35rem; color: var(--muted); font-size: .86rem; line-height: 1.4; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1.2rem;
           margin-top: .9rem; }
.gallery figure { margin: 0; break-inside: avoid; }
.gallery img { border-radius: 3px; background: var(--soft); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; margin: .5rem 0 0; }
th, td { text-align: left; vertical-align: top; padding: .32rem 1rem .32rem 0;
         border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; }
td.number, th.number { text-align: right; }
.pairs { columns: 2 22rem; column-gap: 2.5rem; margin-top: .6rem; }
.pairs div { display: flex; justify-content: space-between; gap: 1rem; break-inside: avoid;
             padding: .26rem 0; border-bottom: 1px solid var(--line); font-size: .85rem; }
.pairs span { color: var(--muted); }
.pairs b { font-weight: 500; text-align: right; overflow-wrap: anywhere; }
pre { margin: .6rem 0 0; padding: .85rem 1.1rem; background: var(--soft); border-radius: 4px;
      white-space: pre-wrap; overflow-wrap: anywhere;
      font: .88rem/1.5 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
footer { margin-top: 3.5rem; color: var(--muted); font-size: .82rem; }
@media print {
  @page { margin: 16mm 14mm; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 1.6rem; break-after: avoid; }
  figure, table, pre, .missing { break-inside: avoid; }
}
"""

_ARROW = (
    '<span class="arrow"><svg viewBox="0 0 48 16" fill="none" stroke="currentColor" stroke-width="2" '
    'stroke-linecap="round" stroke-linejoin="round"><path d="M2 8h42M37 2l7 6-7 6"/></svg></span>'
)


def page(title: str, body: Iterable[str]) -> str:
    """Returns a whole document."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n'
        + "\n".join(body)
        + ("\n</main></body></html>\n")
    )


def paragraph(text: str, kind: str = "") -> str:
    """Returns a paragraph, of class `kind` if one is given."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """Returns a section's heading."""
    return f"<h2>{escape(text)}</h2>"


def scores(before: tuple[str, str, str], after: tuple[str, str, str]) -> str:
    """Returns the two large numbers; each is (name, value, range)."""
    return f'<div class="scores">{_score("before", before)}{_ARROW}{_score("after", after)}</div>'


def compared(main: tuple[str, str, str], *others: tuple[str, str, str]) -> str:
    """Returns large numbers side by side, without an arrow."""
    return f'<div class="scores">{_score("after", main)}{"".join(_score("before", o) for o in others)}</div>'


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns a row of small numbers with names."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="tiles">{cells}</dl>'


def missing(parts: Sequence[str]) -> str:
    """Returns the box with the missing parts."""
    items = "".join(f"<li>{escape(part)}</li>" for part in parts)
    return f'<div class="missing">Missing from this report:<ul>{items}</ul></div>'


def drawing(svg: str, alternative: str, caption: str = "") -> str:
    """Returns a figure; the SVG is an image, so that its ids cannot collide with others."""
    source = base64.b64encode(svg.encode()).decode()
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    image = f'<img src="data:image/svg+xml;base64,{source}" alt="{escape(alternative)}">'
    return f"<figure>{image}{below}</figure>"


def gallery(pictures: Sequence[tuple[Path, str]]) -> str:
    """Returns PNG files with captions."""
    cells = "".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" '
        f'alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
        for path, caption in pictures
    )
    return f'<div class="gallery">{cells}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; every column but the first holds numbers."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ["", *[' class="number"'] * (len(values) - 1)]
        pairs = zip(kinds, values, strict=True)
        return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in pairs)

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{lines}</tbody></table>"


def name_values(values: Sequence[tuple[str, str]]) -> str:
    """Returns names and values in two columns."""
    cells = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in values)
    return f'<div class="pairs">{cells}</div>'


def command(text: str) -> str:
    """Returns lines for a shell."""
    return f"<pre>{escape(text)}</pre>"


def _score(kind: str, parts: tuple[str, str, str]) -> str:
    spans = zip(("name", "value", "range"), parts, strict=True)
    inner = "".join(f'<span class="{role}">{escape(text)}</span>' for role, text in spans)
    return f'<div class="score {kind}">{inner}</div>'
