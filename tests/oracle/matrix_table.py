#!/usr/bin/env python3
"""What converts to what: the one table that the matrix test runs and that the README shows.

    matrix_table.py README.md           exit 1 when its table is not this one
    matrix_table.py --write README.md   makes it so
"""
import sys

# name of --to, name for people, what writes or reads it
FORMATS = [
    ("dcp", "PyTorch DCP", "torch 1.13 to 2.15 in, 2.3 and later out"),
    ("h5", "HDF5", "ours; in also any of h5py, Keras, PyTables"),
    ("pt", "`torch.save`", "torch 1.6 to 2.15; sharded: one file a rank"),
    ("safetensors", "safetensors", "one file, `model.safetensors.index.json`, or one file a rank"),
]

# name, the checkpoint of tests/corpus/good that torch made, how it is asked for when it is not the source's own
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
    """The text between the marks."""
    sharded = ", ".join(name for name, _, _ in LAYOUTS[1:])
    lines = ["| from \\ to | " + " | ".join("`--to %s`" % name for name, _, _ in FORMATS) + " |",
             "|---" * (len(FORMATS) + 1) + "|"]
    for _, label, note in FORMATS:
        lines.append("| %s (%s) | " % (label, note) + " | ".join(["all layouts"] * len(FORMATS)) + " |")
    lines += ["", "All layouts: full, %s. The tests convert each of these %d with `convert`," %
              (sharded, len(FORMATS) ** 2 * len(LAYOUTS)),
              "`consolidate` and `reshard`, load it with the library the format is from, and compare every byte with what",
              "PyTorch saved."]
    return "\n".join(lines) + "\n"


def split(text):
    """What is before, between and after the marks."""
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
    print("%s: its table is not that of %s: run it with --write" % (path, sys.argv[0]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
