"""Help, version, usage errors, exit statuses."""

import os

import harness


class Usage(harness.Case):
    def test_help(self):
        text = self.ok("--help")
        self.assertEqual(text, self.ok("-h"))
        self.assertEqual(text, self.ok("help"))
        for command in ("consolidate", "reshard", "inspect"):
            self.assertIn(f"\n  {command} ", text)
            help_text = self.ok(command, "--help")
            self.assertIn(f"Usage: fsdpckpt {command} SRC", help_text)
            self.assertIn("--quiet", help_text)
            self.assertEqual(help_text, self.ok("help", command))
            self.assertLessEqual(max(map(len, help_text.splitlines())), 90)
        for absent in ("merge ", "export ", "load "):  # commands that do not exist are not promised
            self.assertNotIn(f"\n  {absent}", text)
        self.assertIn("--strip-prefix model.\n", self.ok("consolidate", "--help"))  # the longest example is whole
        self.assertIn("--tp-plan", self.ok("reshard", "--help"))
        self.assertNotIn("--tp-plan", self.ok("consolidate", "--help"))

    def test_version(self):
        text = self.ok("--version")
        self.assertRegex(text, r"^fsdpckpt \d+\.\d+\.\d+\n")
        for part in ("HDF5", "zlib", "seccomp"):
            self.assertIn(f"\n{part}", text)
        self.assertEqual(text, self.ok("inspect", "--version"))

    def test_usage_errors(self):
        cases = [
            ((), "no command given"),
            (("inpsect",), "did you mean 'inspect'?"),
            (("frobnicate",), "unknown command 'frobnicate'"),
            (("help", "frobnicate"), "unknown command 'frobnicate'"),
            (("--json",), "goes after a command"),
            (("--frob",), "unknown option '--frob'"),
            (("inspect",), "inspect needs SRC"),
            (("inspect", "a", "b"), "'b' is one too many"),
            (("inspect", ""), "SRC is empty"),
            (("consolidate", "a"), "consolidate needs -o"),
            (("consolidate", "a", "-o"), "needs an argument"),
            (("consolidate", "a", "--forse"), "did you mean '--force'?"),
            (("consolidate", "a", "-o", "b", "--dp", "2"), "does not take --dp"),
            (("consolidate", "a", "-o", "b", "-j", "0"), "--jobs: '0'"),
            (("consolidate", "a", "-o", "b", "--memory=lots"), "--memory: 'lots'"),
            (("consolidate", "a", "-o", "b", "--dtype", "i64"), "floating-point"),
            (("consolidate", "a", "-o", "b", "--compress", "10"), "'10' is not a level from 0 to 9"),
            (("consolidate", "a", "-o", "b", "--compress", ""), "not a level"),
            (("consolidate", "a", "-o", "b", "--compress", "x"), "not a level"),
            (("consolidate", "a", "-o", "b", "--progress", "often"), "auto, always, never"),
            (("reshard", "a", "-o", "b"), "--dp"),
            (("reshard", "a", "-o", "b", "--dp", "2", "--tp-plan", "x"), "--tp N"),
            (("inspect", "a", "--tree", "--json"), "choose one"),
            (("inspect", "a", "--html", "x", "--json"), "choose one"),
        ]
        for args, text in cases:
            with self.subTest(args=args):
                self.fails(2, *args, contains=[text])
        self.assertEqual(self.listing(), [])

    def test_unsupported_targets(self):
        source = harness.corpus("dcp-torch2.15.0-fsdp2")
        self.fails(5, "consolidate", source, "-o", "x", "--to", "onnx", contains=["--to onnx", "there are: dcp, h5"])
        self.assertEqual(self.listing(), [])

    def test_escape_sequences_do_not_reach_the_terminal(self):
        self.fails(3, "inspect", "no\x1b[31msuch\nthing")
        self.fails(2, "in\x1b]0;x\x07spect")

    def test_full_disk_on_stdout(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        for args in (("--help",), ("inspect", harness.corpus("dcp-torch2.15.0-fsdp2")),
                     ("inspect", harness.corpus("dcp-torch2.15.0-fsdp2"), "--json")):
            with open("/dev/full", "w") as full:
                self.fails(4, *args, stdout=full, contains=["standard output", "No space left"])

    def test_closed_pipe_is_quiet(self):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as out:
            p = self.run_tool("inspect", harness.corpus("dcp-torch2.15.0-fsdp2"), "--json", stdout=out)
        self.assertEqual((p.returncode, p.stderr), (0, ""))


if __name__ == "__main__":
    harness.main()
