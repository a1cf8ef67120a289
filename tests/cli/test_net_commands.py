#!/usr/bin/env python3
"""Every command, with a name on a server in place of each path that it reads: operands and options. It does what it does with the
path, or refuses with one line and makes nothing. A command, or an option with an argument, that is in no table here is a failure."""

import json
import os
import re
import shutil
import subprocess
import unittest
import urllib.parse

import net_server
from harness import BINARY
from test_net import Net, folder_of, made, safetensors
from test_net_lists import BUCKET, Bucket

HAS_ZSTD = not re.search(r"zstd +no", subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout)
# What each option that reads a path gets: the path, and what it needs next to it. OTHERS take no path that is read.
READ = {"tp-plan": ("plan.json", ["--tp", "2"]), "delta": ("updates", []), "adapter": ("adapter", []),
        "adapter-config": ("adapter/adapter_config.json", []), "recipe": ("recipe.json", []), "config": ("model/config.json", ["--recipe", "recipe.json"]),
        "hdf5-plugins": ("adapter", []), "like": ("hub", []), "against": ("model", []), "schema": ("schema.json", []),
        "policy": ("policy.json", []), "classes": ("classes.json", ["--policy", "always"])}
OTHERS = {"output", "to", "dp", "tp", "replicas", "include", "exclude", "strip-prefix", "rename", "dtype", "dtype-for", "dequantize", "quantize",
          "compress", "max-shard-size", "rank", "jobs", "memory", "progress", "color", "comm", "weights", "sort", "depth", "tensor", "html",
          "allow-missing", "allow-unexpected", "junit", "rtol", "atol", "encoding", "checksum", "level", "number", "base", "up-to", "ignore"}
# Each command: its operands that are read, and all else. A test runs it in a folder with copies of those that it changes.
BASE = {"consolidate": (["model"], ["-o", "out.safetensors"]),
        "reshard": (["model"], ["-o", "out", "--to", "safetensors", "--dp", "2"]),
        "convert": (["model"], ["-o", "out", "--to", "pt"]),
        "export": (["model"], ["-o", "out"]),
        "average": (["model", "next"], ["-o", "out.safetensors"]),
        "inspect": (["model"], ["--json"]),
        "check": (["model"], ["--json"]),
        "schema": (["model"], []),
        "diff": (["model", "next"], ["--json"]),
        "delta": (["model", "next"], ["-o", "out", "--number", "1"]),
        "fold": (["updates/weight_v000001"], ["-o", "out"]),
        "apply": (["updates"], ["copy"]),
        "view": (["model"], ["-o", "out.h5"]),
        "extract": (["model"], ["layers.0.0.weight", "-o", "out.npy"]),
        "verify": (["model"], ["--json"]),
        "units": (["model"], ["--json"]),
        "recipes": (["model", "next"], ["--infer"])}
# The same where a path cannot be on a server: the option, or the number of the operand, the exit status and what is said.
REFUSED = {("view", 0): (5, "is on a server: download it first"), "hdf5-plugins": (2, "plugins are code")}


def options_of(text):
    """The options of a command's help, {name: whether it takes an argument}."""
    return {name: bool(argument) for name, argument in re.findall(r"^  (?:-\w, |    )--([a-z0-9-]+)( [A-Z]|=[A-Z])?", text, re.MULTILINE)}


class Commands(Net):
    def setUp(self):
        super().setUp()
        model = folder_of(2, 3)
        shard = "model-00002-of-00002.safetensors"
        changed = dict(model, **{shard: model[shard][:-4] + bytes(4)})
        tree = {"model/" + name: data for name, data in model.items()}
        tree.update({"next/" + name: data for name, data in changed.items()})
        tree.update({"hub/" + name: data for name, data in model.items()})
        tree["hub/config.json"] = json.dumps({"model_type": "none", "num_hidden_layers": 2}).encode()
        tree.update({"hub/tokenizer.json": b"{}", "hub/additional_chat_templates/rag.jinja": b"hello", "hub/README.md": b"# a model"})
        tree["adapter/adapter_config.json"] = b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'
        tree["adapter/adapter_model.safetensors"] = safetensors(
            {"base_model.model.layers.0.0.lora_%s.weight" % side: ("F32", shape, made.randbytes(16)) for side, shape in (("A", [1, 4]), ("B", [4, 1]))})
        tree.update({"plan.json": b'{"layers.*.0": "colwise"}', "classes.json": b"{}", "policy.json": b'{"layers.*": true}',
                     "wrapped.safetensors": safetensors({"layers.0.%s.weight" % name: ("F32", shape, made.randbytes(4 * shape[0] * shape[1])) for name, shape in
                                                         (("base_layer", [4, 4]), ("lora_A.default", [1, 4]), ("lora_B.default", [4, 1]))}),
                     "recipe.json": b'{"fsdpckpt": "recipe", "schema": 1, "rules": [{"drop": "layers.0.1.weight"}], "others": "keep"}'})
        os.mkdir(self.path("updates"))
        for name, data in tree.items():
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            with open(self.path(name), "wb") as f:
                f.write(data)
        self.command("schema", "model", "-o", "schema.json")
        if HAS_ZSTD:
            self.command("delta", "model", "next", "-o", "updates/weight_v000001", "--number", "1")
        objects = {}
        for folder, _, names in os.walk(self.dir):
            for name in names:
                path = os.path.join(folder, name)
                objects["some runs/" + os.path.relpath(path, self.dir)] = self.bytes_of(path)
        self.server = net_server.start({urllib.parse.quote("/%s/%s" % (BUCKET, name)): data for name, data in objects.items()},
                                       None, Bucket(objects, signed=False))
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.kept = self.listing()

    def there(self, path):
        return "s3://%s/some runs/%s" % (BUCKET, path)

    def result(self, command, operands, rest):
        """Runs it. @return the exit status, what is printed, and the files that it made"""
        shutil.copytree(self.path("model"), self.path("copy"))
        environment = dict(os.environ, SSL_CERT_FILE=self.certificate[0], FSDPCKPT_NET_PACE="1", HOME=self.dir, AWS_ENDPOINT_URL=self.server.name)
        got = subprocess.run([BINARY, command, *operands, *rest], env=environment, cwd=self.dir, capture_output=True, text=True, timeout=60, check=False)
        files = {}
        for name in set(self.listing()) - set(self.kept):
            path = self.path(name)
            for folder, _, names in os.walk(path):
                files.update({os.path.relpath(os.path.join(folder, n), self.dir): self.bytes_of(os.path.join(folder, n)) for n in names})
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                files[name] = self.bytes_of(name)
                os.remove(path)
        text = (got.stdout + got.stderr).replace(self.there(""), "")
        return got.returncode, re.sub(r"\d+(\.\d+)? (s|ms)\b|[\d.]+ ([kMG]?B|bytes)/s", "T", text), files

    def compare(self, command, operands, rest, there_operands, there_rest, refused):
        here = self.result(command, operands, rest)
        there = self.result(command, there_operands, there_rest)
        if not refused:
            self.assertEqual(there, here)
            return here[0]
        status, text = refused
        self.assertEqual((there[0], text in there[1], there[1].count("\n")), (status, True, 1), there[1])
        self.assertEqual([name for name in there[2] if not name.startswith("copy/")], [])
        return 0

    def commands(self):
        return re.findall(r"^  ([a-z]+)  ", self.command("--help").split("\n\n")[2], re.MULTILINE)

    def test_every_path(self):
        self.assertEqual(sorted(self.commands()), sorted(BASE))
        done, good = set(), set()
        for command, (operands, rest) in BASE.items():
            if command in ("delta", "fold", "apply") and not HAS_ZSTD:
                continue
            for i, operand in enumerate(operands):
                with self.subTest(command=command, operand=operand):
                    there = [self.there(o) if n == i else o for n, o in enumerate(operands)]
                    status = self.compare(command, operands, rest, there, rest, REFUSED.get((command, i)))
                    self.assertIn(status, (0, 1) if command in ("diff", "check", "recipes") else (0,))
            for option, argument in options_of(self.command(command, "--help")).items():
                if not argument or option in OTHERS or (option == "delta" and not HAS_ZSTD):
                    continue
                self.assertIn(option, READ, "a new option: is its argument a path that is read?")
                path, more = READ[option]
                own = ["wrapped.safetensors"] * len(operands) if option == "adapter-config" else operands
                here = [*rest, *(more if command in ("reshard", "check", "units", "export", "consolidate") or option != "tp-plan" else []), "--" + option, path]
                with self.subTest(command=command, option=option):
                    refused = REFUSED.get((command, option)) or REFUSED.get(option)
                    status = self.compare(command, own, here, own, [*here[:-1], self.there(path)], refused)
                    done.add(option)
                    good |= {option} if status in (0, 1) else set()
        self.assertEqual(done, set(READ) - (set() if HAS_ZSTD else {"delta"}))
        self.assertEqual(done - good, set(), "each option was used at least once")

    def test_what_is_written(self):
        """A web server takes nothing: the command says so at once."""
        url = self.server.name + "/%s/" % BUCKET
        for command, (operands, rest) in BASE.items():
            options = options_of(self.command(command, "--help"))
            for option in sorted({"output", "html", "junit"} & set(options)):
                with self.subTest(command=command, option=option):
                    extension = {"html": ".html", "junit": ".xml"}.get(option) or os.path.splitext((*rest, ".json")[rest.index("-o") + 1 if "-o" in rest else -1])[1]
                    own = rest[:rest.index("-o")] + rest[rest.index("-o") + 2:] if "-o" in rest else [r for r in rest if r != "--json"]
                    self.refuses(5, command, *operands, *own, "--" + option, url + "x" + extension)
        self.refuses(5, "apply", "updates", self.there("model"))
        self.refuses(5, "verify", url + "some runs/model/model-00001-of-00002.safetensors", "--seal")

    def refuses(self, status, *arguments):
        self.server.requests.clear()
        line = self.command(*arguments, status=status, HOME=self.dir, AWS_ENDPOINT_URL=self.server.name)
        self.assertEqual(self.listing(), self.kept, line)
        return line

    def test_export_like(self):
        """Of a folder on a server, all files but the weights are copied, as of a folder here. A web server has no list of them."""
        for like in (self.there("hub/"), self.there("hub/config.json")):
            more = {"HOME": self.dir, "AWS_ENDPOINT_URL": self.server.name}
            self.command("export", self.there("model"), "-o", "out", "--like", like, "--force", **more)
            self.command("export", "model", "-o", "here", "--like", "hub", "--force")
            self.assertEqual(sorted(os.listdir(self.path("out"))), ["README.md", "additional_chat_templates", "config.json", "model-00001-of-00002.safetensors",
                                                                    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"])
            subprocess.run(["diff", "-r", self.path("out"), self.path("here")], check=True)
            shutil.rmtree(self.path("out"))
        shutil.rmtree(self.path("here"))
        self.assertIn("does not list its files", self.refuses(2, "export", "model", "-o", "out", "--like", self.server.name + "/m"))
        self.assertIn("has no config.json", self.refuses(2, "export", "model", "-o", "out", "--like", self.there("updates")))
        self.server.answer = lambda handler: handler.plain(403) or True
        self.assertIn("refuses access", self.refuses(4, "export", "model", "-o", "out", "--like", self.there("hub")))


if __name__ == "__main__":
    unittest.main()
