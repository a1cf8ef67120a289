"""units: the FSDP units of checkpoints and schemas for each policy, and refused inputs."""

import json

import harness

MESH = "dcp-torch2.15.0-2d-dp4tp2"
STATE = "dcp-torch2.15.0-fsdp1-optim"


class Units(harness.Case):
    def write(self, name, data):
        with open(self.path(name), "w") as f:
            json.dump(data, f)
        return name

    def schema(self, *names, shape=(4, 2), dtype="float32"):
        tensors = [{"name": n, "dtype": dtype, "shape": list(shape)} for n in names]
        return self.write("model.json", {"fsdpckpt": "schema", "schema": 1, "tensors": tensors})

    def units(self, source, *args):
        return json.loads(self.ok("units", source, *args, "--json"))

    def test_every_parameter_is_in_one_unit(self):
        for name in (MESH, STATE):
            out = self.units(harness.corpus(name))
            seen = json.loads(self.ok("inspect", harness.corpus(name), "--json"))
            model = [t["name"] for t in seen["tensors"] if not t["name"].startswith("optim")]
            held = [p["name"] for u in out["units"] for p in u["parameters"]]
            self.assertEqual(sorted(held), sorted(model))
            self.assertEqual(out["left_out"], len(seen["tensors"]) - len(model) + len(seen["objects"]))
            self.assertEqual([u["root"] for u in out["units"]], [False] * (len(out["units"]) - 1) + [True])
            self.assertEqual(out["units"][0]["module"], "model.layers.0")
            self.assertEqual(out["units"][-1]["module"], "model")  # the top-level key of the state dict, not a module
            self.assertEqual(out["bytes"], sum(u["bytes"] for u in out["units"]))
            for u in out["units"]:
                self.assertEqual(u["numel"], sum(p["numel"] for p in u["parameters"]))

    def test_schema_and_checkpoint_agree(self):
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", harness.corpus(STATE)))
        a, b = self.units("model.json"), self.units(harness.corpus(STATE))
        self.assertEqual(a["units"], b["units"])

    def test_text_output(self):
        source = self.schema("embed.weight", "layers.0.a.weight", "layers.0.a.bias", "layers.1.a.weight", "bn.running_mean")
        lines = self.ok("units", source).splitlines()
        self.assertEqual(lines[0], "layers.0: 2 parameters, 16 elements, 64 bytes")
        self.assertRegex(lines[1], r"^ +32 bytes  float32   layers\.0\.a\.weight 4×2$")
        self.assertEqual(lines[5], "(root): 1 parameter, 8 elements, 32 bytes")
        self.assertEqual(lines[7], "model.json: 3 units of 4 parameters, 32 elements, 128 bytes")
        self.assertEqual(lines[8], "not in a unit: 1 buffers, 0 ignored, 0 objects and tensors of optimizer state")
        self.assertEqual(lines[9], "largest unit: layers.0, 64 bytes")
        self.assertEqual(self.ok("units", source, "-q"), "")

    def test_policies(self):
        source = self.schema("embed.weight", "layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight")
        names = lambda *args: [u["module"] for u in self.units(source, *args)["units"]]
        self.assertEqual(names(), ["layers.0", "layers.1", ""])
        self.assertEqual(names("--policy", "blocks"), ["layers.0", "layers.1", ""])
        self.assertEqual(names("--policy", "size:16"), ["layers.0", ""])
        self.assertEqual(names("--policy", "size:1k"), [""])
        classes = self.write("classes.json", {"layers.*": "Block"})
        self.assertEqual(names("--policy", "class:Block", "--classes", classes), ["layers.0", "layers.1", ""])
        self.assertEqual(names("--policy", "class:Block+name:embed", "--classes", classes),
                         ["embed", "layers.0", "layers.1", ""])
        self.assertEqual(names("--policy", "always+leaf:Block", "--classes", classes),
                         ["embed", "layers", ""])
        self.assertEqual(names("--policy", "always+leaf:Block+exclude:ModuleList+size:8", "--classes", classes),
                         ["embed", "layers.0.a", "layers.0.b", "layers.0", "layers.1.a", "layers.1", ""])
        policy = self.write("policy.json", {"$policy": "name:layers.1", "$root": {"cpu_offload": True}})
        out = self.units(source, "--policy", policy)
        self.assertEqual([(u["module"], u["options"]["cpu_offload"]) for u in out["units"]], [("layers.1", True), ("", True)])
        policy = self.write("policy.json", {"layers.*": True, "layers.0": False, "embed": {"cpu_offload": True}})
        out = self.units(source, "--policy", policy)
        self.assertEqual([u["module"] for u in out["units"]], ["embed", "layers.1", ""])
        self.assertEqual([u["options"]["cpu_offload"] for u in out["units"]], [True, False, False])
        self.assertEqual(names("--ignore", "layers.0"), ["layers.1", ""])
        self.assertEqual(self.units(source, "--ignore", "layers.0")["ignored"], ["layers.0.a.weight", "layers.0.b.weight"])
        self.assertEqual(names("--include", "layers.1.*"), ["layers.1", ""])

    def test_rules_without_a_match_are_reported(self):
        source = self.schema("layers.0.a.weight")
        policy = self.write("policy.json", {"layer.*": True})
        self.assertIn("1 rules match nothing, the first is 'layer.*'", self.ok("units", source, "--policy", policy))

    def test_wrong_policies_are_refused(self):
        source = self.schema("embed.weight", "head.weight", "layers.0.a.weight")
        self.fails(2, "units", source, "--policy", "class:Block", contains=["no module has the class Block", "--classes"])
        self.fails(2, "units", source, "--policy", "class:", contains=["needs the name of a class"])
        for wrong in ("size:", "size:0", "size:x", "size:1KB", "size:99999999999999999999"):
            self.fails(2, "units", source, "--policy", wrong, contains=["size:100M"])
        for wrong, text in (("name:", "needs a pattern"), ("name:laeyrs.*", "no module fits the pattern laeyrs.*"),
                            ("always+", "each part is always, size:N"), ("always+blocks", "each part is always"),
                            ("always+leaf:Block", "no module has the class Block"),
                            ("size:1+leaf:+leaf:", "once per policy")):
            self.fails(2, "units", source, "--policy", wrong, contains=[text])
        for content, text in (({"$policy": 1}, "must be a string"), ({"$policy": "leaf:A"}, "come after the policy"),
                              ({"$policy": "always", "layers.*": True}, "give one of them")):
            self.fails(2, "units", source, "--policy", self.write("wrong.json", content), contains=["wrong.json", text])
        self.fails(2, "units", source, "--policy", "blokcs",
                   contains=["--policy 'blokcs': neither a file nor a known policy; use blocks, always, size:N, class:"])
        classes = self.write("classes.json", {"$shared": [["embed.weight", "head.weight"]]})
        policy = self.write("policy.json", {"head": True})
        self.fails(2, "units", source, "--policy", policy, "--classes", classes, contains=["shared parameter", "'the root'"])
        self.fails(2, "units", source, "--classes", self.write("c.json", {"$frozen": ["embed"]}),
                   contains=["requires_grad=True and False"])
        p = self.run_tool("units", source, "--policy", self.write("p.json", {"$root": {"use_orig_params": True}}),
                          "--classes", "c.json")
        self.assertEqual(p.returncode, 0)
        self.assertIn("fsdpckpt: warning: the root module has both", p.stderr)
        self.assertIn("(root): 3 parameters", p.stdout)
        only_state = self.schema("optim.state.a.weight.exp_avg")
        self.fails(2, "units", only_state, contains=["no parameters"])

    def test_ten_thousand_tensors(self):
        source = self.schema(*(f"model.layers.{i}.{p}.weight" for i in range(1250)
                               for p in ("q", "k", "v", "o", "g", "u", "d", "n")), shape=(1 << 20, 1 << 12))
        out = self.units(source)
        self.assertEqual(len(out["units"]), 1251)
        self.assertEqual(out["units"][1249]["module"], "model.layers.1249")
        self.assertEqual(out["bytes"], 10000 << 34)


if __name__ == "__main__":
    harness.main()
