"""Runs the completions in bash, zsh and fish, and renders the man pages."""

import os
import re
import shutil
import subprocess
import unittest

import harness

DOCS = os.path.join(os.path.dirname(os.path.dirname(harness.BINARY)), "docs")
BASH = r"""
compopt() { :; }
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_fsdpckpt
printf '%s\n' "${COMPREPLY[@]}"
"""
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; PS1=; PATH=$2:\$PATH; cd $3"
zpty -w shell 'zstyle ":completion:*" list-separator ""; zstyle ":completion:*" verbose no; LISTMAX=0; COLUMNS=1000; LINES=200'
zpty -w shell 'done-() { print -l -- BEGIN $compstate[nmatches]; }'
zpty -w shell 'comppostfuncs=(); list-all() { compadd -O found "$@"; builtin compadd "$@"; }'
zpty -w shell 'compadd() { local -a found; builtin compadd -O found "$@"; print -rl -- "<"$^found">" >> "'$4'"; builtin compadd "$@" }'
zpty -w -n shell "$5"$'\t'
sleep 0.1
for i in {1..100}; do [[ -s $4 ]] && break; sleep 0.1; done
sleep 0.3
zpty -d shell
"""


class Completions(harness.Case):
    def setUp(self):
        super().setUp()
        self.copy("dcp-torch2.15.0-fsdp2")
        self.path_with_binary = os.path.dirname(harness.BINARY) + ":" + os.environ.get("PATH", "")

    def shell(self, *argv):
        p = subprocess.run(argv, capture_output=True, text=True, cwd=self.dir, timeout=harness.HANG, stdin=subprocess.DEVNULL,
                           env={**os.environ, "PATH": self.path_with_binary, "LC_ALL": "C.UTF-8", "HOME": self.dir})
        return p.stdout

    def bash(self, *words):
        return self.shell("bash", "-c", BASH, "bash", os.path.join(DOCS, "completions", "fsdpckpt"), *words).split("\n")

    def fish(self, *words):
        line = " ".join(words)
        out = self.shell("fish", "-N", "-c", 'source "$argv[1]"; complete -C "$argv[2]"',
                         os.path.join(DOCS, "completions", "fsdpckpt.fish"), line)
        return [each.split("\t")[0] for each in out.splitlines()]

    def zsh(self, *words):
        log = self.path("found")
        open(log, "w", encoding="utf-8").close()
        self.shell("zsh", "-fc", ZSH, "zsh", os.path.join(DOCS, "completions"), os.path.dirname(harness.BINARY), self.dir, log,
                   " ".join(words))
        with open(log, encoding="utf-8") as f:
            found = [line[1:-1] for line in f.read().splitlines()]
        os.remove(log)
        return found

    def check(self, ask):
        for words, wanted, absent in (
            (("fsdpckpt", "resh"), {"reshard"}, {"diff"}),
            (("fsdpckpt", "consolidate", "ckpt", "--to", ""), {"accelerate", "dcp", "h5", "pt", "safetensors"}, {"npy"}),
            (("fsdpckpt", "extract", "ckpt", "--to", ""), {"npy", "json", "raw"}, {"dcp"}),
            (("fsdpckpt", "consolidate", "ckpt", "--dtype", ""), {"bf16", "f32", "f8_e4m3fn"}, {"i64"}),
            (("fsdpckpt", "reshard", "ckpt", "--tp-plan", "a"), {"auto"}, set()),
            (("fsdpckpt", "reshard", "ckpt", "--progress", ""), {"always", "never"}, set()),
            (("fsdpckpt", "extract", "ckpt", "model.no"), {"model.norm.weight"}, {"model.tok_embeddings.weight"}),
            (("fsdpckpt", "extract", "--dtype", "f32", "ckpt", "model.no"), {"model.norm.weight"}, set()),
            (("fsdpckpt", "inspect", "ckpt", "--tensor", "model.no"), {"model.norm.weight"}, set()),
            (("fsdpckpt", "inspect", "ck"), {"ckpt"}, {"model.norm.weight"}),
        ):
            with self.subTest(words=words):
                got = {g.rstrip("/ ") for g in ask(*words)}
                self.assertLessEqual(wanted, got, words)
                self.assertFalse(absent & got, words)

    @unittest.skipUnless(shutil.which("bash"), "no bash")
    def test_bash(self):
        self.check(self.bash)
        self.assertIn("--tp-plan", self.bash("fsdpckpt", "reshard", "ckpt", "--tp"))
        self.assertIn("h5", self.bash("fsdpckpt", "reshard", "ckpt", "--to", "=", "h"))
        said = self.run_tool("consolidate", "ckpt", "-o", "x.h5", "--dtype", "bfloat").stderr  # lists the same types
        self.assertEqual(said.partition("choose one of ")[2].partition(" or PyTorch's")[0].split(),
                         [g for g in self.bash("fsdpckpt", "consolidate", "ckpt", "--dtype", "") if g])

    @unittest.skipUnless(shutil.which("bash"), "no bash")
    def test_tensor_names_are_never_executed(self):
        """A tensor name with shell syntax is completed as text."""
        evil = ["$(touch owned)", "`touch owned`", "; touch owned", "a b'c\"d", "*"]
        for name in evil:
            shutil.rmtree(self.path("bad"), True)
            self.ok("convert", "ckpt", "-o", "bad", "--to", "dcp", "--include", "model.norm.weight", "--rename",
                    "s~^.*$~x" + name + "~", "-q")
            got = self.bash("fsdpckpt", "extract", "bad", "x")
            self.assertEqual(len([g for g in got if g]), 1, (name, got))
            self.assertEqual(self.shell("bash", "-c", "printf %s " + got[0]), "x" + name)
            if shutil.which("fish"):
                self.assertTrue(self.fish("fsdpckpt", "extract", "bad", "x"), name)
        self.assertNotIn("owned", os.listdir(self.dir))

    @unittest.skipUnless(shutil.which("fish"), "no fish")
    def test_fish(self):
        self.check(self.fish)

    @unittest.skipUnless(shutil.which("zsh"), "no zsh")
    def test_zsh(self):
        self.check(self.zsh)

    def test_every_command_has_a_man_page(self):
        commands = re.findall(r"^  (\w+) ", self.ok("--help").split("Commands:\n")[1].split("\n\n")[0], re.M)
        pages = ["fsdpckpt.1"] + ["fsdpckpt-%s.1" % c for c in commands]
        for page in pages:
            path = os.path.join(DOCS, "man", page)
            self.assertGreater(os.path.getsize(path), 1000)
            if shutil.which("mandoc"):
                p = subprocess.run(["mandoc", "-Tlint", "-W", "warning", path], capture_output=True, text=True, timeout=harness.HANG)
                self.assertEqual(p.stdout, "", page)
            if shutil.which("groff"):
                p = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-Kutf8", path], capture_output=True, text=True, timeout=harness.HANG)
                self.assertEqual(p.stderr, "", page)


if __name__ == "__main__":
    harness.main()
