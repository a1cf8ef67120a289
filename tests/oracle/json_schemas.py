#!/usr/bin/env python3
"""Validates every JSON document of the command with its published schema (docs/schemas), on the corpus.

usage: json_schemas.py FSDPCKPT CORPUS SCHEMAS        exit 77 without the package jsonschema

The published schemas permit unknown members, since later versions may add some. Here these are an error, and so is a member
that a schema describes but no document has.
"""
import copy
import glob
import json
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile

try:
    import jsonschema
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PROGRAM, CORPUS, SCHEMAS = map(os.path.abspath, sys.argv[1:4])
TRAIN = os.path.join(CORPUS, "good", "dcp-torch2.15.0-train")
MESH = os.path.join(CORPUS, "good", "dcp-torch2.15.0-2d-dp4tp2")


def strict(schema):
    """The schema with additionalProperties: false, so that unknown members are an error."""
    if isinstance(schema, list):
        return [strict(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        out.setdefault("additionalProperties", False)
    return out


def described(schema):
    """The names of all members that the schema describes, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(described, schema))
    if not isinstance(schema, dict):
        return set()
    names = set(schema.get("properties", {})) if isinstance(schema.get("properties"), dict) else set()
    return names.union(*(described(value) for value in schema.values()))


def members(document):
    if isinstance(document, list):
        return set().union(*map(members, document))
    if isinstance(document, dict):
        return set(document).union(*map(members, document.values()))
    return set()


class Documents:
    def __init__(self):
        self.schemas, self.validators, self.count, self.seen = {}, {}, {}, {}
        for path in sorted(glob.glob(os.path.join(SCHEMAS, "*.json"))):
            kind = os.path.splitext(os.path.basename(path))[0]
            with open(path, encoding="utf-8") as f:
                self.schemas[kind] = json.load(f)
            jsonschema.Draft202012Validator.check_schema(self.schemas[kind])
            assert self.schemas[kind]["properties"]["fsdpckpt"]["const"] == kind, path
            self.validators[kind] = jsonschema.Draft202012Validator(strict(self.schemas[kind]))

    def check(self, text, kind, what):
        start = '{\n  "fsdpckpt": "%s",\n  "schema": 1' % kind
        assert text.startswith(start), "%s: begins with %r, not %r" % (what, text[:60], start)
        return self.validate(json.loads(text), kind, what)

    def validate(self, document, kind, what):
        errors = list(self.validators[kind].iter_errors(document))
        assert not errors, "%s: not as docs/schemas/%s.json says: %s: %s" % (what, kind, errors[0].json_path, errors[0].message)
        self.count[kind] = self.count.get(kind, 0) + 1
        self.seen.setdefault(kind, set()).update(members(document))
        return document

    def run(self, kind, *args, ok=(0,), cwd=None):
        """Runs a command. Returns the document that it prints, or None if it fails without one."""
        p = subprocess.run([PROGRAM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, text=True)
        if p.returncode != 0 and not p.stdout:
            return None
        assert p.returncode in ok, (args, p.returncode, p.stderr)
        return self.check(p.stdout, kind, " ".join(args))

    def progress(self, *args, cwd):
        """Validates each line of --progress json."""
        p = subprocess.run([PROGRAM, *args, "--progress", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd,
                           text=True)
        assert p.returncode == 0, (args, p.returncode, p.stderr)
        for line in p.stderr.splitlines():
            assert line.startswith('{"fsdpckpt": "progress", "schema": 1, '), line
            self.validate(json.loads(line), "progress", " ".join(args))

    def must(self, *args, **kwargs):
        document = self.run(*args, **kwargs)
        assert document is not None, args
        return document

    def require_all(self):
        for kind, schema in self.schemas.items():
            assert self.count.get(kind, 0) > 0, "no document of the kind %s" % kind
            missing = described(schema) - self.seen[kind]
            assert not missing, "docs/schemas/%s.json: no document has %s" % (kind, ", ".join(sorted(missing)))


def recipes(documents):
    """The shipped recipes, and one with everything that they do not use."""
    for line in subprocess.run([PROGRAM, "recipes"], stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines():
        documents.must("recipe", "recipes", line.split()[0])
    meta = [os.path.join(CORPUS, "recipes", "meta-llama", side + ".safetensors") for side in ("from", "to")]
    documents.must("recipe", "recipes", "--infer", *meta, "-q")
    documents.validate({"fsdpckpt": "recipe", "schema": 1, "sizes": {"n": ["a", "b / 2"]}, "rules": [
        {"from": ["a", "b"], "to": "c", "operations": [{"stack": 0}, {"concatenate": 1, "sizes": ["n", "1"]}]},
        {"from": "d", "to": ["e", "f"], "operations": {"chunk": 0}}, {"add": "g", "same_as": "c"},
        {"from": "h", "to": "h", "operations": {"resize": 0, "from": "n", "to": "n + 1"}}], "others": "keep", "dtypes": {"*.norm": "f32"}}, "recipe",
        "an example")


def sources():
    for folder in ("good", "pt", "deepspeed", "megatron", "megatron-ranks", "unsupported"):
        for path in sorted(glob.glob(os.path.join(CORPUS, folder, "*"))):
            yield path


def read_only(documents, source):
    """Runs every command that only reads on one checkpoint."""
    seen = documents.run("inspect", "inspect", source, "--json", ok=(0, 3, 5))
    if seen is None:
        return 0
    documents.must("inspect", "inspect", source, "--json", "--headers-only")
    for kind, values in (("tensor", seen["tensors"]), ("object", seen["objects"])):
        for value in values[:3]:
            documents.run(kind, "inspect", source, "--tensor", value["name"], "--json", ok=(0, 3, 5))
    documents.must("check", "check", source, "--json", ok=(0, 1))
    documents.run("check", "check", source, "--dp", "3", "--json", ok=(0, 1))
    documents.run("verify", "verify", source, "--json", ok=(0, 1))
    documents.run("units", "units", source, "--json")
    documents.run("conversion", "consolidate", source, "-o", "none.h5", "--dry-run", "--json")
    documents.run("conversion", "reshard", source, "--dp", "2", "--dry-run", "--json")
    documents.run("rank-plan", "reshard", source, "--dp", "2", "--dry-run", "--rank", "1", "--json")
    documents.run("schema", "schema", source)
    return 1


def write(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f)


def exported(documents, work):
    """A model that needs every change to fit its reference: a padded vocabulary, and a tensor that repeats another one."""
    at = lambda name: os.path.join(work, name)
    plain = documents.must("conversion", "export", TRAIN, "-o", at("model"), "--json")
    rows = next(t["shape"][0] for t in documents.must("inspect", "inspect", at("model"), "--json")["tensors"]
                if t["name"] == "tok_embeddings.weight")
    write(at("model/config.json"), {"vocab_size": rows})
    write(at("pad.json"), {"fsdpckpt": "recipe", "schema": 1, "others": "keep", "rules": [
        {"from": "tok_embeddings.weight", "to": "tok_embeddings.weight", "operations": {"resize": 0, "to": str(rows + 3)}},
        {"add": "head.weight", "same_as": "tok_embeddings.weight"}]})
    subprocess.run([PROGRAM, "export", TRAIN, "-o", at("padded"), "--recipe", at("pad.json"), "-q"], check=True)
    fitted = documents.must("conversion", "export", at("padded"), "-o", at("fitted"), "--like", at("model"), "--json")
    assert not plain["model"]["side_files"] and fitted["model"]["tied"] and fitted["model"]["trimmed"], fitted
    for case, by in (("torchtitan-llama3", "config"), ("nanogpt", "names")):  # several recipes fit the names of the first one
        source = os.path.join(CORPUS, "recipes", case, "from.safetensors")
        chosen = documents.must("conversion", "export", source, "-o", at("dry"), "--dry-run", "--json")
        assert chosen["model"]["recipe_reason"]["by"] == by, chosen


def written(documents, work):
    """Documents of commands that write, and of findings, seals and policies."""
    at = lambda name: os.path.join(work, name)
    tool = lambda *args: subprocess.run([PROGRAM, *args], check=True, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    documents.must("conversion", "consolidate", TRAIN, "-o", at("full.h5"), "--compress", "1", "--json")
    documents.must("conversion", "reshard", MESH, "-o", at("mesh"), "--dp", "2", "--tp", "2", "--json")
    documents.must("conversion", "convert", TRAIN, "-o", at("dcp"), "--to", "dcp", "--json")
    documents.must("conversion", "average", TRAIN, TRAIN, "-o", at("mean.pt"), "--include", "model.*", "--json")
    exported(documents, work)
    documents.must("delta", "delta", TRAIN, TRAIN, "-o", at("weight_v000001"), "--json", "--include", "model.norm.bias", "--rename",
                   "s/bias/weight/")
    documents.must("fold", "fold", at("weight_v000001"), "-o", at("folded"), "--json")
    tool("consolidate", TRAIN, "-o", at("local"), "--to", "safetensors", "--max-shard-size", "1M", "-q")
    documents.must("apply", "apply", work, at("local"), "--json", "--dry-run")
    documents.must("apply", "apply", work, at("local"), "--json")
    documents.must("versions", "inspect", work, "--json", "--stats")
    documents.must("versions", "inspect", at("weight_v000001"), "--json")
    documents.must("verify", "verify", work, "--json")
    os.mkdir(at("weight_v000003"))
    documents.must("versions", "inspect", work, "--json", ok=(3,))
    os.rmdir(at("weight_v000003"))
    documents.must("view", "view", MESH, "-o", at("view.h5"), "--json")
    documents.must("inspect", "inspect", at("mesh"), "--json", "--stats")
    documents.must("tensor", "inspect", TRAIN, "--tensor", "model.norm.weight", "--stats", "--json")
    documents.progress("reshard", TRAIN, "-o", at("shown"), "--dp", "2", cwd=work)

    # A seal, and verify with it.
    tool("verify", "--seal", "dcp", "-q")
    with open(at("dcp.fsdpckpt-seal.json"), encoding="utf-8") as f:
        documents.check(f.read(), "seal", "the seal")
    assert documents.must("verify", "verify", at("dcp"), "--json")["sealed"]

    # Differences of every kind.
    tool("consolidate", TRAIN, "-o", "a.h5", "--include", "model.*")
    tool("consolidate", TRAIN, "-o", "b.h5", "--include", "model.*", "--exclude", "*.w2.*", "--dtype", "bf16")
    documents.must("diff", "diff", at("a.h5"), at("b.h5"), "--json", ok=(1,))
    documents.must("diff", "diff", at("a.h5"), at("b.h5"), "--rtol", "1e-9", "--json", ok=(1,))
    documents.must("diff", "diff", at("full.h5"), TRAIN, "--json", "--verbose")
    for place, value in ((MESH, "reshaped.h5"), (TRAIN, "other.h5")):
        tool("consolidate", place, "-o", value)
    documents.must("diff", "diff", at("reshaped.h5"), at("other.h5"), "--json", ok=(1,))
    tool("average", "a.h5", "b.h5", "-o", "near.h5", "--include", "*.w1.*")
    documents.must("diff", "diff", at("near.h5"), at("a.h5"), "--include", "*.w1.*", "--json", ok=(0, 1))
    documents.must("diff", "diff", TRAIN, os.path.join(CORPUS, "good", "dcp-torch2.15.0-fsdp1-optim"), "--json", ok=(1,))

    # A seal with a wrong digest.
    with open(at("dcp.fsdpckpt-seal.json"), encoding="utf-8") as f:
        seal = json.load(f)
    seal["tensors"][0]["crc64"] = "0123456789abcdef"
    write(at("dcp.fsdpckpt-seal.json"), seal)
    documents.must("diff", "diff", at("dcp"), at("full.h5"), "--data", "--json", ok=(3,))

    # Findings with every member.
    schema = json.loads(tool("schema", TRAIN).stdout)
    for tensor in schema["tensors"]:
        tensor.pop("path", None)
        tensor["name"] = tensor["name"].replace("model.", "module.")
    schema["tensors"][0]["shape"] = [3, 5]
    schema["tensors"].append({"name": "extra.weight", "dtype": "float32", "shape": [2]})
    write(at("changed.json"), schema)
    documents.must("check", "check", TRAIN, "--schema", at("changed.json"), "--json", ok=(1,))
    documents.must("check", "check", TRAIN, "--dp", "2", "--tp", "2", "--json", ok=(0, 1))

    # An object that runs a command when it is loaded.
    class Command:
        def __reduce__(self):
            return os.system, ("true",)
    with zipfile.ZipFile(at("command.pt"), "w") as z:
        z.writestr("command/data.pkl", pickle.dumps({"a": Command()}, 2))
        z.writestr("command/version", "3\n")
    documents.must("inspect", "inspect", at("command.pt"), "--json")
    documents.must("object", "inspect", at("command.pt"), "--tensor", "a", "--json")

    # Units with classes, ties and a policy; a schema with ties.
    tensors = [{"name": "layers.0.w.weight", "dtype": "f32", "shape": [4, 4]}, {"name": "head.weight", "dtype": "f32", "shape": [4, 4]},
               {"name": "embed.weight", "dtype": "f32", "shape": [4, 4]}]
    write(at("tied.json"), {"fsdpckpt": "schema", "schema": 1, "order": "model",
                            "tensors": [*tensors, {"name": "tied.weight", "dtype": "f32", "shape": [4, 4], "same_as": "embed.weight"}]})
    documents.must("schema", "schema", at("tied.json"))
    write(at("classes.json"), {"layers.*": "Block", "$shared": [["embed.weight", "head.weight"]]})
    write(at("policy.json"), {"$root": {"mixed_precision": {"param_dtype": "bfloat16"}}, "layers.*": {"sharding_strategy": "SHARD_GRAD_OP"}})
    documents.must("units", "units", at("tied.json"), "--policy", at("policy.json"), "--classes", at("classes.json"), "--json")


def must_refuse(documents):
    """The validators refuse a document with a missing, additional or wrongly typed member."""
    good = json.loads(subprocess.run([PROGRAM, "inspect", TRAIN, "--json"], check=True, capture_output=True, text=True).stdout)
    for spoil in (lambda d: d.pop("totals"), lambda d: d.update(surprise=1), lambda d: d["tensors"][0].update(shape="10"),
                  lambda d: d["tensors"][0]["chunks"][0].pop("sizes"), lambda d: d.update(schema=2)):
        bad = copy.deepcopy(good)
        spoil(bad)
        assert not documents.validators["inspect"].is_valid(bad)
    assert documents.validators["inspect"].is_valid(good)


def main():
    documents = Documents()
    must_refuse(documents)
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        read = sum(read_only(documents, source) for source in sources())
        written(documents, work)
    assert read > 80, read
    recipes(documents)
    documents.require_all()
    print("%d checkpoints; documents: %s" % (read, ", ".join("%s %d" % kv for kv in sorted(documents.count.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
