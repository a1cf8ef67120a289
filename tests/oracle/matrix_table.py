#!/usr/bin/env python3
"""The tables of docs/FORMATS.md: what is read and written, and what converts to what, which the matrix test runs.

    matrix_table.py docs/FORMATS.md              exit 1 if a table in the page differs, or a row has no test
    matrix_table.py --write docs/FORMATS.md      update the tables in the page
    matrix_table.py --installed docs/FORMATS.md  exit 1 if this Python, with which the tests run, lacks a version that the table says

A new row needs a line in ROWS, and nothing else.
"""
import glob
import importlib.metadata
import os
import re
import sys

CORPUS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "corpus")
TESTS = os.path.join(CORPUS, "..")

# What is read or written: (what, "read" or "read, written", what it was tested with, the page that has more, a test).
# What it was tested with is a list of
#   "torch good/dcp-torch{}-*"   the versions are in the names of folders of tests/corpus
#   "h5py==3.16.0"               the tests use this package, or tests/corpus/README.md says which version wrote its files
#   "torch before 1.6"           other words
ROWS = [
    ("PyTorch DCP", "read, written", ["torch good/dcp-torch{}-*"], None, "oracle/matrix.py"),
    ("DCP with tensors in safetensors", "read", ["torch==2.15.0"], None, "oracle/dcp_safetensors.py"),
    ("DCP with the extension ZStandard", "read", ["torch dcp-zstd-torch{}"], "FORMATS.md#other-sources", "oracle/dcp_zstd.py"),
    ("`torch.save`, one file", "read, written", ["torch==2.15.0", "the format of torch before 1.6"], "TORCH_SAVE.md", "oracle/pt.py"),
    ("`torch.save`, one file per rank: plain tensors", "read, written", ["torch==2.15.0"], "TORCH_SAVE.md#one-file-per-rank",
     "cli/test_pt_ranks.py"),
    ("`torch.save`, one file per rank: DTensors, ShardedTensors (verl)", "read", ["torch pt/*-torch{}"],
     "TORCH_SAVE.md#one-file-per-rank", "oracle/pt_ranks.py"),
    ("FSDP1's flat parameters (`LOCAL_STATE_DICT`)", "read, written", ["torch pt/fsdp1-*local-torch{}"],
     "TORCH_SAVE.md#flat-parameters-fsdp1-local_state_dict", "oracle/flat_state.py"),
    ("`pytorch_model.bin.index.json`", "read", ["transformers==5.23.0"], "TORCH_SAVE.md#several-files-and-an-index", "oracle/pt.py"),
    ("torch_checkpointing, and `_experimental` of torch", "read", ["torch_checkpointing==0.1.1", "torch==2.15.0"],
     "TORCH_SAVE.md#torch_checkpointing", "oracle/numbered.py"),
    ("safetensors: one file, `model.safetensors.index.json`, one file per rank", "read, written", ["safetensors==0.8.0", "torch==2.15.0"],
     "SAFETENSORS.md", "oracle/safetensors_write.py"),
    ("HDF5 of this schema", "read, written", ["h5py==3.16.0"], "HDF5_SCHEMA.md", "oracle/matrix.py"),
    ("HDF5 of h5py, Keras, PyTables", "read", ["h5py==3.16.0"], "HDF5_SCHEMA.md#files-of-other-programs", "oracle/h5_read.py"),
    ("HDF5 that is compressed with lzf, zstd, bzip2, lz4, bitshuffle, Blosc or Blosc 2", "read", ["h5py==3.16.0", "hdf5plugin==7.1.0", "blosc2==4.14.1"],
     "HDF5_SCHEMA.md#files-of-other-programs", "cli/test_h5_others.py"),
    ("Keras: `.keras`, `.weights.h5`, `.weights.json` with its shards", "read", ["Keras==3.15.1"],
     "HDF5_SCHEMA.md#files-of-other-programs", "cli/test_h5_others.py"),
    ("FSDP folders of accelerate and the Hugging Face Trainer", "read, written", ["accelerate==1.15.0", "transformers==5.23.0"],
     "TRAINERS.md#hugging-face-accelerate-and-trainer", "oracle/accelerate_fsdp.py"),
    ("PyTorch Lightning and Fabric", "read", ["lightning==2.6.6"], "TRAINERS.md#pytorch-lightning", "oracle/lightning_read.py"),
    ("DeepSpeed ZeRO-1 to 3, and universal checkpoints", "read", ["deepspeed deepspeed/{}-*"], "TRAINERS.md#deepspeed",
     "oracle/deepspeed_read.py"),
    ("Megatron `torch_dist`", "read, written", ["megatron-core megatron/torch_dist-{}"], "TRAINERS.md#megatron", "oracle/megatron_read.py"),
    ("Megatron-FSDP's `fsdp_dtensor`", "read, written", ["megatron-core recipes/megatron-dist-llama/fsdp_dtensor-{}"],
     "TRAINERS.md#megatron", "oracle/fsdp_dtensor_written.py"),
    ("Megatron `mp_rank_XX`", "read", ["megatron-core==0.16.1"], "TRAINERS.md#megatron", "oracle/megatron_read.py"),
    ("nanotron: the model", "read", ["nanotron 0.4"], "TRAINERS.md#nanotron", "cli/test_trainers.py"),
    ("folders of verl, OLMo-core, torchtune, LitGPT, Composer, Ray Train, fairseq2 and others", "read",
     ["litgpt 0.5.13", "ai2-olmo-core 3.0.0", "mosaicml 0.32.1", "ray 2.60.0", "torchtune 0.2.1",
      "folders rebuilt from the sources of the others"], "TRAINERS.md#other-trainers", "oracle/trainer_folders.py"),
    ("vLLM's `sharded_state`, TensorRT-LLM's files of ranks, with a recipe", "read", ["files built after the sources of both"],
     "TRAINERS.md#other-trainers", "oracle/trainer_folders.py"),
    ("Flax: `flax_model.msgpack`, with an index or without, `flax.serialization.to_bytes`", "read", ["flax==0.12.8"], None,
     "oracle/flax_read.py"),
    ("quantized weights, with `--dequantize`", "read",
     ["compressed-tensors==0.20.0", "bitsandbytes==0.50.2", "auto-gptq==0.7.1", "autoawq==0.2.9", "nvidia-modelopt==0.47.0", "torchao==0.18.0",
      "optimum-quanto==0.2.7", "transformers==5.23.0"], "WEIGHTS.md#from-codes-and-scales-to-numbers", "cli/test_quantized.py"),
]

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

MARKS = {name: ("<!-- %s: made by tests/oracle/matrix_table.py -->\n" % name, "<!-- end of %s -->\n" % name) for name in ("formats", "matrix")}


class Wrong(Exception):
    """A row that does not say what the tests do."""


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version)]


def versions_in(pattern):
    """The versions in the names of folders, at {} of a pattern."""
    head, tail = pattern.split("{}")
    form = ".*".join(map(re.escape, head.split("*"))) + r"(\d+\.\d+\.\d+)" + ".*".join(map(re.escape, tail.split("*")))
    names = (os.path.relpath(p, CORPUS) for p in glob.glob(os.path.join(CORPUS, head + "*" + tail)))
    found = {m.group(1) for m in (re.fullmatch(form, name) for name in names) if m}
    if not found:
        raise Wrong("no folder of tests/corpus is called %s" % pattern)
    return sorted(found, key=numbers)


def tested_with(row):
    """The text of a row: each package with its versions."""
    text = []
    for item in row[2]:
        package, _, pattern = item.partition(" ")
        if "{}" in pattern:
            text.append("%s %s" % (package, ", ".join(versions_in(pattern))))
        else:
            text.append(item.replace("==", " "))
    return "; ".join(text)


def format_table():
    lines = ["| format | | tested with | more |", "|---|---|---|---|"]
    for row in ROWS:
        what, how, _, page, test = row
        if not os.path.isfile(os.path.join(TESTS, test)):
            raise Wrong("%s: there is no tests/%s" % (what, test))
        lines.append("| %s | %s | %s | %s |" % (what, how, tested_with(row), "[%s](%s)" % (page.split("#")[0], page) if page else ""))
    return "\n".join(lines) + "\n"


def matrix():
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


def replace(text, name, table):
    """The page with another text between the two marks."""
    begin, end = MARKS[name]
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    return before + begin + table + end + after


def check_packages():
    """Each version is that of an installed package or an older one, or the README of the corpus says that it wrote the files."""
    with open(os.path.join(CORPUS, "README.md"), encoding="utf-8") as f:
        readme = f.read()
    compared = 0
    for package, version in sorted({tuple(item.split("==")) for row in ROWS for item in row[2] if "==" in item}):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if "%s %s" % (package, version) in readme:
            continue
        if found:
            compared += 1
            if numbers(found)[:2] < numbers(version)[:2]:
                raise Wrong("%s: the table says %s, but the tests run with %s" % (package, version, found))
            if numbers(found)[:2] > numbers(version)[:2]:
                print("note: these tests run with %s %s; the table says %s" % (package, found, version))
        else:
            raise Wrong("%s %s is neither installed nor in tests/corpus/README.md" % (package, version))
    return compared


def main():
    path, write = sys.argv[-1], "--write" in sys.argv
    try:
        if "--installed" in sys.argv:
            compared = check_packages()
            print("%d packages have the version of the table" % compared)
            return 0 if compared else 77
        with open(path, encoding="utf-8") as f:
            text = f.read()
        made = replace(replace(text, "formats", format_table()), "matrix", matrix())
    except Wrong as e:
        print(e)
        return 1
    if write and made != text:
        with open(path, "w", encoding="utf-8") as f:
            f.write(made)
    if made == text or write:
        return 0
    print("%s: a table differs from that of %s; run it with --write" % (path, sys.argv[0]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
