"""Diagrams of the docs that show time and places: `python -m tools.diagrams` writes them anew.

400 units wide, because a phone shows them at about that width. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["DIAGRAMS", "main"]

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 400
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#263238}
.mid{text-anchor:middle}.end{text-anchor:end}.strong{font-weight:600}
.box{fill:#eceff1;stroke:#90a4ae}.a{fill:#bbdefb;stroke:#42a5f5}.b{fill:#c8e6c9;stroke:#66bb6a}.c{fill:#ffe0b2;stroke:#ffa726}
.gone{fill:none;stroke:#90a4ae;stroke-dasharray:3 3}.line{stroke:#607d8b;stroke-width:1.5;fill:none}
@media (prefers-color-scheme:dark){text{fill:#eceff1}.box{fill:#37474f;stroke:#78909c}.a{fill:#0d47a1;stroke:#64b5f6}
.b{fill:#1b5e20;stroke:#81c784}.c{fill:#a04000;stroke:#ffb74d}.line{stroke:#b0bec5}}
"""


class Drawing:
    """Shapes and words, from the top left; the title is what a screen reader says."""

    def __init__(self, title: str, height: int) -> None:
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.shapes.append(f'<text class="{kind}" x="{x}" y="{y}">{words}</text>')

    def box(self, x: float, y: float, width: float, kind: str, words: str = "", height: float = 30) -> None:
        self.shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, "mid")

    def line(self, path: str) -> None:
        self.shapes.append(f'<path class="line" d="{path}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.shapes, "</svg>", ""])


def async_save() -> Drawing:
    """Who does what when, with `save` and with `async_save`."""
    drawing = Drawing("save stops training until the checkpoint exists; async_save only while the state is copied", 232)
    drawing.text(4, 18, "save", "strong")
    for x, width, kind, words in (
        (4, 76, "a", "steps"),
        (84, 148, "c", "plan, write, publish"),
        (236, 160, "a", "steps"),
    ):
        drawing.box(x, 28, width, kind, words)
    drawing.text(4, 94, "async_save", "strong")
    for x, width, kind, words in ((4, 76, "a", "steps"), (84, 42, "c", "copy"), (130, 266, "a", "steps")):
        drawing.box(x, 104, width, kind, words)
    drawing.box(130, 140, 168, "b", "plan, write, publish")
    drawing.text(122, 159, "worker", "end")
    drawing.line("M128 100V196M298 136V196")
    drawing.text(128, 212, "async_save returns", "mid")
    drawing.text(298, 212, "the checkpoint exists", "mid")
    drawing.text(396, 94, "orange: training waits", "end")
    return drawing


def tiers() -> Drawing:
    """Which step is in which tier, shortly after the save of step 60."""
    drawing = Drawing("The fast tier keeps the last two steps; the slow tier receives each step and keeps more", 180)
    columns = {step: 132 + 45 * number for number, step in enumerate((10, 20, 30, 40, 50, 60))}
    drawing.text(4, 18, "step", "strong")
    for step, x in columns.items():
        drawing.text(x + 19, 18, str(step), "mid strong")
    rows = (
        ("fast", "KeepLast(2)", {50: "b", 60: "b"}),
        ("slow", "KeepEvery(20)", {20: "b", 40: "b", 50: "b", 60: "c"}),
    )
    for number, (name, keeps, states) in enumerate(rows):
        y = 32 + 56 * number
        drawing.text(4, y + 15, name, "strong")
        drawing.text(4, y + 33, keeps)
        for step, x in columns.items():
            drawing.box(x, y, 38, states.get(step, "gone"), height=40)
    for x, kind, words in ((4, "b", "complete"), (122, "c", "being copied"), (262, "gone", "removed")):
        drawing.box(x, 156, 18, kind, height=18)
        drawing.text(x + 26, 170, words)
    return drawing


def survival() -> Drawing:
    """What is still there after what, by the place of the newest step."""
    drawing = Drawing(
        "Which places still hold the newest step after a process, a machine or all machines are lost", 292
    )
    heads = (("memory",), ("memory,", "copy on", "next host"), ("disk of", "the host"), ("shared", "storage"))
    places = [112 + 73 * number for number in range(len(heads))]
    for x, words in zip(places, heads, strict=True):
        for number, word in enumerate(words):
            drawing.text(x + 34, 18 + 16 * number, word, "mid strong")
    rows = (
        (("a rank or all", "ranks killed"), "yes yes yes yes"),
        (("a host", "restarted"), "no yes yes yes"),
        (("a host lost",), "no yes no yes"),
        (("all hosts", "lose power"), "no no yes yes"),
        (("the job on", "other hosts"), "no no no yes"),
    )
    for number, (event, answers) in enumerate(rows):
        y = 60 + 46 * number
        for line, text in enumerate(event):
            drawing.text(4, y + (24 if len(event) == 1 else 16) + 16 * line, text)
        for x, answer in zip(places, answers.split(), strict=True):
            drawing.box(x, y, 68, "b" if answer == "yes" else "c", answer, height=40)
    return drawing


DIAGRAMS = {"async": async_save, "tiers": tiers, "survival": survival}


def main() -> None:
    """Write the diagrams."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
    print(f"{len(DIAGRAMS)} diagrams in {IMAGES}", file=sys.stderr)


if __name__ == "__main__":
    main()
