#!/usr/bin/env python3
"""Makes docs/layouts.svg, the picture in the README, from what `fsdpckpt inspect --tensor NAME --json` says.

    docs/make_picture.py build/release/cli/fsdpckpt > docs/layouts.svg

The source is a checkpoint that PyTorch saved (tests/corpus). tests/cli/test_docs.py fails when the file is out of date.
"""
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = os.path.join(ROOT, "tests", "corpus", "good", "dcp-torch2.15.0-fsdp2")
TENSOR = "model.layers.0.attention.wo.weight"

SIDE, GAP, TOP = 200, 150, 46
STYLE = """<style>
text{font:13px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;fill:#444}
.h{font-weight:bold;fill:#111}.rank text{font-size:11px;dominant-baseline:central;fill:#111}
rect{stroke:#fff}path{fill:none;stroke:#888;stroke-width:2}
.c0{fill:#a6cee3}.c1{fill:#b2df8a}.c2{fill:#fb9a99}.c3{fill:#fdbf6f}.c4{fill:#cab2d6}.c5{fill:#ffff99}.c6{fill:#8dd3c7}.c7{fill:#bebada}.c8{fill:#fccde5}.c9{fill:#d9d9d9}.c10{fill:#ccebc5}.c11{fill:#80b1d3}
@media(prefers-color-scheme:dark){text{fill:#aaa}.h{fill:#eee}rect{stroke:#1b1b1b}}
</style>"""


def drawing(program, checkpoint):
    """TENSOR with its chunks, each in the colour of its rank."""
    p = subprocess.run([program, "inspect", checkpoint, "--tensor", TENSOR, "--json"], check=True, stdout=subprocess.PIPE)
    tensor, cells = json.loads(p.stdout), []
    scale = [SIDE / n for n in tensor["shape"]]
    for i, chunk in enumerate(tensor["chunks"]):
        y, x = (o * s for o, s in zip(chunk["offsets"], scale))
        high, wide = (n * s for n, s in zip(chunk["sizes"], scale))
        number = chunk.get("rank", i)
        box = ", ".join("%d:%d" % (o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"]))
        cells.append('<rect class="c%d" x="%.1f" y="%.1f" width="%.1f" height="%.1f"><title>%s %d: [%s]</title></rect>'
                     '<text x="%.1f" y="%.1f">%d</text>' %
                     (number, x, y, wide, high, "rank" if "rank" in chunk else "chunk", number, box,
                      x + wide / 2, y + high / 2, number))
    return "".join(cells)


def panel(number, title, note, cells):
    x = number * (SIDE + GAP)
    middle = x + SIDE / 2
    return ('<text class="h" x="%d" y="16">%s</text><text x="%d" y="34">%s</text>\n'
            '<g class="rank" transform="translate(%d %d)">%s</g>' % (middle, title, middle, note, x, TOP, cells))


def arrow(number, to_left, lines):
    """Between panel `number` and the next."""
    left = number * (SIDE + GAP) + SIDE + 15
    right, y = left + GAP - 30, TOP + SIDE / 2
    start, end, head = (right, left, 8) if to_left else (left, right, -8)
    texts = "".join('<text x="%d" y="%d">%s</text>' % ((left + right) / 2, y + 22 + 18 * i, line)
                    for i, line in enumerate(lines))
    return '<path d="M%d %dH%dm%d -6L%d %dl%d 6"/>%s' % (start, y, end, head, end, y, head, texts)


def picture(program):
    with tempfile.TemporaryDirectory() as work:
        full, mesh = os.path.join(work, "full.h5"), os.path.join(work, "mesh")
        subprocess.run([program, "consolidate", SOURCE, "-o", full, "-q"], check=True)
        subprocess.run([program, "reshard", SOURCE, "-o", mesh, "--dp", "4", "--tp", "2", "-q"], check=True)
        parts = [panel(0, "one file", "full", drawing(program, full)),
                 panel(1, "four FSDP ranks", "Shard(0)", drawing(program, SOURCE)),
                 panel(2, "eight ranks, dp 4 × tp 2", "[Shard(0), Shard(1)]", drawing(program, mesh)),
                 arrow(0, True, ["consolidate"]), arrow(1, False, ["reshard", "--dp 4 --tp 2"])]
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img">\n'
            '<title>One weight matrix in three layouts; each coloured box is the part that one rank holds</title>\n%s\n%s\n</svg>\n'
            % (3 * SIDE + 2 * GAP, TOP + SIDE + 2, STYLE, "\n".join(parts)))


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1]))
