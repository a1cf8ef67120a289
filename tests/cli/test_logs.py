"""Names and values that would be commands in the log of GitHub, Azure or TeamCity, in the output of every command."""

import json
import re
import struct

import harness

NAMES = ["::error::one", "  ::warning file=a::two", "\u00a0\u3000::notice::three", "##[error]four", "a ##[group]five",
         "##vso[task.setvariable variable=x]six", "##teamcity[seven]", ":", "::add-mask::eight", "l.0.::stop-commands::nine"]
COMMAND = re.compile(r"^\s*::|##(\[|vso\[|teamcity\[)")


def write(path, shift=0, names=NAMES):
    """A safetensors file whose tensors, objects and values have such names."""
    tensors = {n: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate(names)}
    header = json.dumps({"__metadata__": {n: n for n in names}, **tensors}).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for i in range(len(names)):
            f.write(struct.pack("<4f", i + shift, 1, 2, 3))


class Logs(harness.Case):
    def harmless(self, *args, ok=(0, 1, 2, 3, 5)):
        """Runs a command and expects that no line of its output is a command. @return the output"""
        p = self.run_tool(*args)
        self.assertIn(p.returncode, ok, (args, p.stderr))
        for line in (p.stdout + p.stderr).splitlines():
            own = "--github" in args and re.match(r"::(error|warning|notice) (file=\S*,)?title=fsdpckpt check", line)
            self.assertTrue(own or not COMMAND.search(line), (args, line))
        self.seen.add(args[0])
        return p.stdout

    def test_every_command(self):
        self.seen = set()
        write(self.path("a.safetensors"))
        write(self.path("b.safetensors"), 1)
        write(self.path("::error::c.safetensors"), 0, NAMES[1:])
        a, b, c = "a.safetensors", "b.safetensors", "::error::c.safetensors"
        for more in ((), ("--all",), ("--tree",), ("--json",), ("--stats",), ("--depth", "2"), ("-v",), ("--sort", "name", "--all"),
                     *(("--tensor", n) for n in NAMES), ("--tensor", NAMES[0], "--json"), ("--html", "::error::p.html")):
            self.harmless("inspect", a, *more, ok=(0,))
        shown = self.harmless("inspect", a)
        self.assertIn("\\x3a:error::one", shown)
        self.assertIn("#\\x23[error]four", shown)
        for more in ((), ("--json",), ("--github",), ("--against", b), ("--against", c), ("--against", c, "--github"),
                     ("--against", c, "--json"), ("--schema", c, "--github"), ("--dp", "3", "--tp", "2")):
            self.harmless("check", a, *more)
        found = self.harmless("schema", a)
        self.assertIn(NAMES[3], json.dumps(json.loads(found), ensure_ascii=False))
        for pair in ((a, b), (a, c), (c, a), (a,)):
            for more in ((), ("--json",), ("-v",), ("--data",), ("--rtol", "1e-9")):
                self.harmless("diff", *pair, *more)
        self.harmless("view", a, "-o", "::error::v.h5")
        self.assertEqual(json.loads(self.harmless("extract", a, "__metadata__", "--to", "json"))[NAMES[3]], NAMES[3])
        for name in NAMES:
            self.harmless("extract", a, name + "x")
        for more in ((), ("--json",), ("-v",), ("--seal", "--force")):
            self.harmless("verify", c, *more)
        for more in ((), ("--json",), ("--policy", "always")):
            self.harmless("units", a, *more)
        self.harmless("recipes")
        self.harmless("recipes", NAMES[0])
        for pair in ((a, b), (a, c), (c, a), (a,)):
            self.harmless("recipes", "--infer", *pair)
        jobs = (("consolidate", "::error::o.h5"), ("reshard", "::error::r", "--dp", "2"), ("convert", "::error::t.h5"),
                ("export", "::error::e"), ("export", "::error::f", "--like", "::error::none"))
        for command, target, *layout in jobs:
            for more in (("--dry-run", "-v"), ("--dry-run", "--json"), ("-v",), (), ("--force", "--json"), ("--include", NAMES[0] + "x"),
                         ("--force", "--rename", "s/.*/::error::all/"), ("--force", "--recipe", "auto"),
                         ("--force", "--max-shard-size", NAMES[3])):
                self.harmless(command, c, "-o", target, *layout, *more)
        self.harmless("reshard", a, "-o", "r2", "--dp", "2", "--dry-run", "--rank", "1")
        self.harmless("reshard", a, "-o", "r2", "--dp", "2", "--dry-run", "--rank", "1", "--json")
        self.harmless("average", a, b, "-o", "::error::m.h5")
        self.harmless("delta", a, b, "-o", "::error::d", "--number", "1")
        self.harmless("delta", a, a, "-o", "::error::weight_v000001", "--json")
        for more in ((), ("--force", "--json")):
            self.harmless("fold", "::error::d", "-o", "::error::f", *more)
        self.harmless("fold", "::error::d", "-o", "::error::weight_v000009")
        for more in ((), ("--stats",), ("--json",), ("--tree",), ("--tensor", NAMES[0])):
            self.harmless("inspect", "::error::d", *more)
        for more in ((), ("--json",), ("--github",), ("--junit", "::error::d.xml")):
            self.harmless("check", "::error::d", *more)
        for more in ((), ("--json",), ("--seal",)):
            self.harmless("verify", "::error::d", *more)
        for more in (("--dry-run",), ("--json",), ()):
            self.harmless("apply", "::error::updates", "::error::model", *more)
        self.harmless("average", a, c, "-o", "::error::n.h5")
        with open(self.path(c), "r+b") as f:
            f.truncate(200)
        formats = {"accelerate", "dcp", "fsdp_dtensor", "h5", "pt", "safetensors", "torch_dist"}
        known = [n for n in re.findall(r"^  ([a-z][a-z0-9]*) ", self.run_tool("--help").stdout, re.MULTILINE) if n not in formats]
        self.assertTrue(len(known) > 10 and set(known) <= self.seen | {"help"}, set(known) - self.seen)
        for command in known:
            for source in (c, "::error::missing", "##[error]missing"):
                self.harmless(command, source)
            self.harmless(command, "::error::x", "--::error::option")
        self.harmless("::error::command")
        self.harmless("##[error]command")
        for form in ("h5", "dcp", "pt"):
            self.harmless("reshard", a, "-o", "g-" + form, "--to", form, "--dp", "2", "-q", "--force")
            for more in ((), ("--tree",), ("--json",)):
                self.harmless("inspect", "g-" + form, *more)
            self.harmless("verify", "g-" + form)


if __name__ == "__main__":
    harness.main()
