#!/usr/bin/env python3
"""The table of conversions, which the matrix test runs and docs/FORMATS.md shows.

    matrix_table.py docs/FORMATS.md           exit 1 if the table in the page differs
    matrix_table.py --write docs/FORMATS.md   update the table in the page
"""
import sys

# name of --to, name for people, what writes or reads it
FORMATS = [
    ("dcp", "PyTorch DCP", "read from torch 1.13 to 2.15; torch 2.3 and later loads ours"),
    ("h5", "HDF5", "ours; any file of h5py, Keras or PyTables is read too"),
    ("pt", "`torch.save`", "torch 1.6 to 2.15; sharded: one file per rank"),
    ("safetensors", "safetensors", "one file, `model.safetensors.index.json`, or one file per rank"),
]

# name, checkpoint of tests/corpus/good, options that select the layout unless the source has it
LAYOUTS = [
    ("full", "dcp-torch2.15.0-shapes", None),
    ("FSDP", "dcp-torch2.15.0-train", ["--dp", "2"]),
    ("TP", "dcp-torch2.15.0-tp", ["--tp", "2"]),
    ("2D FSDP+TP", "dcp-torch2.15.0-2d-uneven", ["--dp", "3", "--tp", "2"]),
    ("HSDP", "dcp-torch2.15.0-hsdp", ["--replicas", "2", "--dp", "2"]),
    ("HSDP+TP", "dcp-torch2.15.0-hsdp-tp", ["--replicas", "2", "--dp", "2", "--tp", "2"]),
]

BEGIN, END = "<!-- matrix: made by tests/oracle/matrix_table.py -->\n", "<!-- end of matrix -->\n"


def table():
    """The text between the two marks in the page."""
    sharded = ", ".join(name for name, _, _ in LAYOUTS[1:])
    lines = ["| from \\ to | " + " | ".join("`--to %s`" % name for name, _, _ in FORMATS) + " |",
             "|---" * (len(FORMATS) + 1) + "|"]
    for _, label, note in FORMATS:
        lines.append("| %s (%s) | " % (label, note) + " | ".join(["all layouts"] * len(FORMATS)) + " |")
    lines += ["", "All layouts: full, %s. The tests convert each of these %d combinations" %
              (sharded, len(FORMATS) ** 2 * len(LAYOUTS)),
              "with `convert`, `consolidate` and `reshard`, load the result with the library that defines the format, and compare",
              "every byte with what PyTorch saved."]
    return "\n".join(lines) + "\n"


def split(text):
    """Splits the page into the text before, between and after the marks."""
    before, rest = text.split(BEGIN, 1)
    between, after = rest.split(END, 1)
    return before + BEGIN, between, END + after


def main():
    path = sys.argv[-1]
    with open(path, encoding="utf-8") as f:
        before, between, after = split(f.read())
    if between == table():
        return 0
    if "--write" in sys.argv:
        with open(path, "w", encoding="utf-8") as f:
            f.write(before + table() + after)
        return 0
    print("%s: the table differs from that of %s; run it with --write" % (path, sys.argv[0]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
