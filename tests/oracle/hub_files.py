#!/usr/bin/env python3
"""Files as the Hugging Face hub has them: the index of a variant, which save_pretrained writes, and the cache of huggingface_hub.
A shard that is missing is noticed; the root of the cache is the snapshot that huggingface_hub itself finds.

usage: hub_files.py FSDPCKPT       exit 77 without transformers
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
try:
    import huggingface_hub
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run

PROGRAM = sys.argv[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                  num_key_value_heads=2, tie_word_embeddings=False)


def names(path):
    return sorted(t["name"] for t in json.loads(must_run(PROGRAM, "inspect", path, "--json").stdout)["tensors"])


def variants(home, model):
    """model.safetensors.index.fp16.json and its shards, alone and next to the model itself."""
    folder = home / "variant"
    model.save_pretrained(folder, variant="fp16", max_shard_size="6KB")
    must((folder / "model.safetensors.index.fp16.json").exists(), "transformers names the index otherwise", os.listdir(folder))
    must(names(folder) == sorted(model.state_dict()), "the variant")
    must(names(folder / "model.safetensors.index.fp16.json") == sorted(model.state_dict()), "its index")
    both = home / "both"
    shutil.copytree(folder, both)
    save_file({"w": torch.ones(2)}, str(both / "model.safetensors"))
    must(names(both) == ["w"], "the model goes before its variant")
    shards = sorted(folder.glob("model.fp16-*.safetensors"))
    must(len(shards) > 2, "too few shards", shards)
    for number, shard in ((0, shards[0]), (-1, shards[-1])):
        cut = home / ("cut%d" % number)
        shutil.copytree(folder, cut)
        (cut / shard.name).unlink()
        must(shard.name in must_run(PROGRAM, "inspect", cut, ok=(3,)).stderr, "a missing shard is not noticed", shard.name)
    # Names that do not count the files: only the index knows of the one that is missing.
    plain = home / "plain"
    plain.mkdir()
    for file, name in (("part_a.safetensors", "a"), ("part_b.safetensors", "b")):
        save_file({name: torch.ones(2)}, str(plain / file))
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "part_a.safetensors", "b": "part_b.safetensors"}}
    for file in ("diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model.fp16.safetensors.index.json"):
        (plain / file).write_text(json.dumps(index))
        must(names(plain) == ["a", "b"], file)
        (plain / "part_b.safetensors").rename(home / "b")
        must("part_b.safetensors" in must_run(PROGRAM, "inspect", plain, ok=(3,)).stderr, "a missing file is not noticed", file)
        (home / "b").rename(plain / "part_b.safetensors")
        (plain / file).unlink()


def pickled(home):
    """The same of torch.save files, which older diffusers wrote."""
    folder = home / "pickled"
    folder.mkdir()
    for i, name in enumerate("ab"):
        torch.save({name: torch.ones(2)}, folder / ("pytorch_model.fp16-%05d-of-00002.bin" % (i + 1)))
    index = {"metadata": {}, "weight_map": {n: "pytorch_model.fp16-%05d-of-00002.bin" % (i + 1) for i, n in enumerate("ab")}}
    (folder / "pytorch_model.bin.index.fp16.json").write_text(json.dumps(index))
    must(names(folder) == ["a", "b"], "the pickled variant")
    (folder / "pytorch_model.fp16-00002-of-00002.bin").unlink()
    must_run(PROGRAM, "inspect", folder, ok=(3,))


def cache(home, model):
    """A cache as huggingface_hub lays it out, and as it finds the files in it."""
    root = home / "hub" / "models--someone--Tiny"
    for folder in ("blobs", "refs", "snapshots/" + COMMIT + "/transformer"):
        (root / folder).mkdir(parents=True)
    model.save_pretrained(home / "saved", max_shard_size="6KB")
    for number, file in enumerate(sorted((home / "saved").iterdir())):
        blob = "%064x" % number
        shutil.copy(file, root / "blobs" / blob)
        (root / "snapshots" / COMMIT / file.name).symlink_to(pathlib.Path("../../blobs") / blob)
        (root / "snapshots" / COMMIT / "transformer" / file.name).symlink_to(pathlib.Path("../../../blobs") / blob)
    (root / "refs" / "main").write_text(COMMIT)
    found = huggingface_hub.try_to_load_from_cache("someone/Tiny", "config.json", cache_dir=root.parent)
    must(found and os.path.dirname(found) == str(root / "snapshots" / COMMIT), "huggingface_hub does not find it", found)
    run = must_run(PROGRAM, "consolidate", root, "-o", home / "one.safetensors")
    must("Tiny: reads " in run.stderr and "snapshots/" + COMMIT in run.stderr, run.stderr)
    got, want = load_file(str(home / "one.safetensors")), model.state_dict()
    must(got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want), "the snapshot")
    must(names(root / "snapshots" / COMMIT / "transformer") == sorted(want), "a folder in the snapshot, as diffusers has")
    for text, status in ((COMMIT + "\n", 0), ("../../etc", 3), ("f" * 40, 3), ("", 3)):
        (root / "refs" / "main").write_text(text)
        must_run(PROGRAM, "inspect", root, ok=(status,))
    (root / "refs" / "main").unlink()
    must("without refs/main" in must_run(PROGRAM, "inspect", root, ok=(2,)).stderr, "no branch")


def main():
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(CONFIG)
    with tempfile.TemporaryDirectory(prefix="fc-hub-") as home:
        variants(pathlib.Path(home), model)
        pickled(pathlib.Path(home))
        cache(pathlib.Path(home), model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
