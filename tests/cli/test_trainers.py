"""Folders of trainers, from their root to a folder for the Hugging Face hub, or to one line with the reason and the path that works.
tests/corpus/README.md says which package wrote each, and which were rebuilt from its source."""
import json
import os
import shutil
import struct

import harness
import safetensors_file

CORPUS = os.path.join(harness.CORPUS, "..")


class Trainers(harness.Case):
    def folder(self, *parts, to="run"):
        shutil.rmtree(self.path(to), ignore_errors=True)
        shutil.copytree(os.path.join(CORPUS, *parts), self.path(to))
        return to

    def assert_near(self, got, want):
        """The same names and shapes, and values of float32 that are equal up to the rounding of one product."""
        self.assertEqual({n: t[:2] for n, t in got.items()}, {n: t[:2] for n, t in want.items()})
        for name, (_, _, data) in want.items():
            numbers = lambda raw: struct.unpack("<%df" % (len(raw) // 4), raw)
            for a, b in zip(numbers(got[name][2]), numbers(data)):
                self.assertLess(abs(a - b), 1e-6, name)


class Verl(Trainers):
    def exported(self, out="hub"):
        return safetensors_file.read(self.path(out, "model.safetensors"))

    def test_one_command(self):
        for case in ("fsdp1", "fsdp1-tied", "fsdp1-orig", "fsdp1-orig-tied", "fsdp2"):
            with self.subTest(case):
                run = self.folder("verl", case)
                out = self.ok("export", f"{run}/actor/", "-o", "hub", "-f")
                self.assertEqual(self.exported(), safetensors_file.read(self.path(run, "expected.safetensors")))
                self.assertIn(f"copied:   config.json, tokenizer.json, from {run}/actor/huggingface\n", out)
                self.assertIn("checked:  tie_word_embeddings, vocab_size, num_hidden_layers of config.json", out)
                for name in ("config.json", "tokenizer.json"):
                    with open(self.path(run, "actor", "huggingface", name)) as a, open(self.path("hub", name)) as b:
                        self.assertEqual(a.read(), b.read())

    def test_the_configuration_is_compared(self):
        run = self.folder("verl", "fsdp2")
        config = self.path(run, "actor", "huggingface", "config.json")
        with open(config, encoding="utf-8") as f:
            changed = {**json.load(f), "num_hidden_layers": 3}
        with open(config, "w", encoding="utf-8") as f:
            json.dump(changed, f)
        self.fails(2, "export", f"{run}/actor", "-o", "hub",
                   contains=[f"does not fit {run}/actor/huggingface", "has 2 layers, and config.json says 3"])
        self.assertNotIn("hub", self.listing())

    def test_megatron(self):
        """verl 0.9 has model/, optimizer/ and extra/ in actor/, each with a dist_ckpt/ of megatron-core; older ones have one dist_ckpt/.
        With Megatron-FSDP, model/dist_ckpt/ has everything."""
        llama = os.path.join(harness.CORPUS, "..", "recipes", "megatron-dist-llama")
        want = safetensors_file.read(os.path.join(llama, "to.safetensors"))
        for saved, where in (("torch_dist", "model"), ("fsdp_dtensor-0.16.1", "model"), ("torch_dist", "")):
            with self.subTest(saved, where=where):
                shutil.rmtree(self.path("step"), ignore_errors=True)
                folder = os.path.normpath(os.path.join("step", "actor", where))
                shutil.copytree(os.path.join(llama, saved), self.path(folder, "dist_ckpt"))
                os.mkdir(self.path(folder, "huggingface"))
                shutil.copy(os.path.join(llama, "config.json"), self.path(folder, "huggingface"))
                for name in ("transformer_config.json", "ckpt_contents.json"):
                    with open(self.path("step", "actor", name), "w", encoding="utf-8") as f:
                        f.write("{}")
                for other, values in (("optimizer", "optim*"), ("extra", "iteration")) if where and saved == "torch_dist" else ():
                    os.mkdir(self.path("step", "actor", other))
                    self.ok("consolidate", os.path.join(llama, saved), "-o", f"step/actor/{other}/dist_ckpt", "--to", "torch_dist",
                            "--include", values, "-q")
                for source in ("step/actor", f"{folder}/dist_ckpt"):
                    p = self.run_tool("export", source, "-o", "hub", "-f", "--dtype", "bf16")
                    entered = f"fsdpckpt: {source}: reads {folder}/dist_ckpt\n" if source == "step/actor" else ""
                    self.assertEqual((p.returncode, p.stderr), (0, entered))
                    self.assertEqual(self.exported(), want)
                    self.assertIn("names:    megatron-llama, ", p.stdout)
                    self.assertIn("copied:   config.json, from ", p.stdout)

    def test_options(self):
        run = self.folder("verl", "fsdp2")
        self.ok("export", f"{run}/actor", "-o", "hub", "--dtype", "bf16")
        self.assertEqual({t[0] for t in self.exported().values()}, {"BF16"})
        shutil.copytree(self.path(run, "actor", "huggingface"), self.path("other"))
        report = json.loads(self.ok("export", f"{run}/actor", "-o", "hub2", "--like", "other", "--json"))
        self.assertEqual(report["model"]["side_files"], ["config.json", "tokenizer.json"])

    def test_lora(self):
        for case in ("fsdp1-lora", "fsdp1-orig-lora", "fsdp2-lora"):
            with self.subTest(case):
                run = self.folder("verl", case)
                p = self.run_tool("export", f"{run}/actor", "-o", "hub", "-f")
                self.assertEqual(p.returncode, 0, p.stderr)
                self.assertIn("and not lora_adapter (safetensors)", p.stderr)
                self.assert_near(self.exported(), safetensors_file.read(self.path(run, "expected.safetensors")))
                self.assertIn(f"into 4 weights; its configuration is {run}/actor/lora_adapter/adapter_config.json\n", p.stdout)
        # Without its configuration, alpha is unknown.
        shutil.rmtree(self.path(run, "actor", "lora_adapter"))
        self.fails(2, "export", f"{run}/actor", "-o", "none", contains=["belongs to a LoRA adapter", "--adapter-config FILE"])
        # A configuration that was left there is no error for a model without an adapter, unless it is named.
        plain = self.folder("verl", "fsdp2", to="plain")
        shutil.copytree(os.path.join(CORPUS, "verl", "fsdp2-lora", "actor", "lora_adapter"), self.path(plain, "actor", "lora_adapter"))
        self.assertEqual(self.run_tool("export", f"{plain}/actor", "-o", "plain-hub").returncode, 0)
        self.fails(2, "export", f"{plain}/actor", "-o", "none", "--adapter-config", f"{plain}/actor/lora_adapter",
                   contains=["has no LoRA adapter inside"])

    def test_the_optimizer_of_flat_parameters(self):
        for case in ("fsdp1", "fsdp1-lora", "fsdp1-tied", "fsdp1-orig", "fsdp1-orig-lora", "fsdp1-orig-tied"):
            with self.subTest(case):
                run = self.folder("verl", case)
                shutil.rmtree(self.path(run, "actor", "lora_adapter"), ignore_errors=True)  # a line says that it is not read
                state = ["--include", "optim.state.*", "--strip-prefix", "optim.state."]
                self.ok("consolidate", f"{run}/actor", "-o", "state.safetensors", "-f", *state)
                self.assertEqual(safetensors_file.read(self.path("state.safetensors")),
                                 safetensors_file.read(self.path(run, "optimizer.safetensors")))
                for to in ("dcp", "h5", "pt"):
                    self.ok("reshard", f"{run}/actor", "-o", "x", "--to", to, "--dp", "3", "-f")
                    self.ok("diff", "x", f"{run}/actor")
                    shutil.rmtree(self.path("x"))
                self.ok("verify", f"{run}/actor")

    def test_an_optimizer_whose_flat_parameters_are_unknown(self):
        """The optimizer of another model, and an optimizer without its model, are refused, and the model is not affected."""
        run, other = self.folder("verl", "fsdp1"), self.folder("verl", "fsdp1-lora", to="other")
        alone = [f"{run}/actor/optim_world_size_2_rank_0.pt", "-o", "all.pt"]
        said = ["optimizer state under a number", "FSDP1's flat parameters", "FSDP.optim_state_dict", "in one folder"]
        self.fails(5, "consolidate", *alone, contains=said)
        for rank in range(2):
            name = f"optim_world_size_2_rank_{rank}.pt"
            shutil.copy(self.path(other, "actor", name), self.path(run, "actor", name))
        self.fails(5, "consolidate", f"{run}/actor", "-o", "all.pt", contains=said)
        self.ok("consolidate", f"{run}/actor", "-o", "model.safetensors", "--include", "model.*", "--strip-prefix", "model.")
        self.assertEqual(safetensors_file.read(self.path("model.safetensors")),
                         safetensors_file.read(self.path(run, "expected.safetensors")))


    def test_parts_that_do_not_add_up(self):
        """With use_orig_params, the ranks have the elements of a parameter one after another. The other rank's file twice, or the
        optimizer of another model: all of its state is refused, and the model is not affected."""
        run = self.folder("verl", "fsdp1-orig")
        tied = self.folder("verl", "fsdp1-orig-tied", to="tied")
        optim = "optim_world_size_2_rank_%d.pt"
        for source in (self.path(run, "actor", optim % 1), self.path(tied, "actor", "optim_world_size_4_rank_0.pt")):
            with self.subTest(source):
                shutil.copy(source, self.path(run, "actor", optim % 0))
                p = self.run_tool("consolidate", f"{run}/actor", "-o", "all.pt")
                self.assertEqual(p.returncode, 5, p.stderr)
                self.assertIn("save FSDP.optim_state_dict(model, optimizer), or convert the model alone", p.stderr)
                self.assertNotIn("--tp-plan", p.stderr)
                state = [t for t in json.loads(self.ok("inspect", f"{run}/actor", "--json"))["tensors"] if ".exp_avg" in t["name"]]
                self.assertEqual([t["name"] for t in state if ".layers." in t["name"]], [])
                self.ok("export", f"{run}/actor", "-o", "hub", "-f")
                self.assertEqual(self.exported(), safetensors_file.read(self.path(run, "expected.safetensors")))


def put(path, tensors, **metadata):
    """Writes a safetensors file with members of `__metadata__`."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    at, header, data = 0, {"__metadata__": metadata}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def numbers(*values):
    return struct.pack("<%df" % len(values), *values)


class Nanotron(Trainers):
    def step(self):
        return self.folder("nanotron", "tp2pp2")

    def expected(self):
        return safetensors_file.read(os.path.join(CORPUS, "nanotron", "expected.safetensors"))

    def test_the_model(self):
        run = self.step()
        for source in (run, f"{run}/checkpoint_metadata.json"):
            out = self.ok("consolidate", source, "-o", "model.safetensors", "-f")
            self.assertEqual(safetensors_file.read(self.path("model.safetensors")), self.expected())
        self.assertIn("13 tensors", out)
        for to in ("dcp", "pt", "h5"):
            self.ok("reshard", run, "-o", "x", "--to", to, "--dp", "3", "-f")
            self.ok("diff", "x", run)
            shutil.rmtree(self.path("x"))
        os.mkdir(self.path(run, "optimizer"))
        self.assertIn("the optimizer of nanotron", self.ok("inspect", run))
        os.rename(self.path(run), self.path("10"))
        os.mkdir(self.path("all"))
        os.rename(self.path("10"), self.path("all", "10"))
        self.assertIn("all: reads all/10\n", self.run_tool("inspect", "all").stderr)

    def test_missing_files(self):
        run = self.step()
        qkv = os.path.join(run, "model", "model", "decoder", "0", "pp_block", "attn", "qkv_proj")
        os.remove(self.path(qkv, "model_weight_pp-rank-0-of-2_tp-rank-0-of-2.safetensors"))
        self.fails(3, "inspect", run, contains=["model.decoder.0.pp_block.attn.qkv_proj.weight has 1 files", "there are 2", "files are missing"])
        shutil.rmtree(self.path(run, "model"))
        os.mkdir(self.path(run, "model"))
        self.fails(3, "inspect", run, contains=["model/ has no model_*.safetensors"])

    def shards(self, *pairs, shape="(2, 4)", name="w", **more):
        """Two shards of two columns each, of a tensor of two rows."""
        shutil.rmtree(self.path("run"), ignore_errors=True)
        for rank, pair in enumerate(pairs):
            put(self.path("run", "model", f"model_{name}_pp-rank-0-of-1_tp-rank-{rank}-of-{len(pairs)}.safetensors"),
                {"data": ("F32", [2, 2], numbers(*(10 * rank + i for i in range(4)))), **more}, version="1.5", unsharded_shape=shape,
                local_global_slices_pairs=pair)
        with open(self.path("run", "checkpoint_metadata.json"), "w") as f:
            f.write("{}")

    def test_slices_of_a_shard_along_the_last_dimension(self):
        half = "None,None,None|%d,%d,None#None,None,None|%d,%d,None"
        pairs = [";".join((half % (0, 1, r, r + 1), half % (1, 2, 2 + r, 3 + r))) for r in range(2)]
        self.shards(*pairs, _no_weight_decay=("BOOL", [], b"\1"))
        self.ok("consolidate", "run", "-o", "w.safetensors")
        want = ("F32", [2, 4], numbers(0, 10, 1, 11, 2, 12, 3, 13))
        self.assertEqual(safetensors_file.read(self.path("w.safetensors")), {"w": want})
        self.shards(*(p.replace("None,None,None", "0,2,1") for p in pairs), shape="(np.int64(2), np.int64(4))")
        self.ok("consolidate", "run", "-o", "w.safetensors", "-f")
        self.assertEqual(safetensors_file.read(self.path("w.safetensors")), {"w": want})

    def test_hostile_metadata(self):
        all_of, first, second = "None,None,None", "None,None,None|None,None,None#None,None,None|0,2,None", "None,None,None|None,None,None#None,None,None|2,4,None"
        self.shards(first, second)
        self.ok("inspect", "run")
        for pair in ("", "x", first + ";x", first.replace("0,2", "0,2,3"), first.replace("0,2,None", "0,2,2"), first.replace("0,2", "3,5"),
                     first.replace("0,2", "2,0"), first.replace("0,2", "0,99999999999999999999"), first.replace("0,2", "-2,0"), all_of,
                     first.replace("|", ""), first.replace("0,2", "0,1"), first + ";" + second, first + ";" + first):
            with self.subTest(pair):
                self.shards(pair, second)
                self.fails(3, "consolidate", "run", "-o", "none.h5")
        for shape in ("", "(2, 4", "2, 4", "(2)", "(2, 4, 1)", "(2, -4)", "(2, 4)x", "(np.int64(2, 4)", "(2, 2)",
                      "(2147483646, 2147483646)", "(" + "1, " * 99 + ")"):
            with self.subTest(shape):
                self.shards(first, second, shape=shape)
                self.fails(3, "consolidate", "run", "-o", "none.h5")
        self.shards(first, first)
        self.fails(3, "consolidate", "run", "-o", "none.h5")
        self.shards(first, second, other=("F32", [1], bytes(4)))
        self.fails(3, "inspect", "run", contains=["should have one tensor, called data"])
        self.assertEqual(self.listing(), ["run"])
        self.shards(first, second)
        for rank in range(2):
            put(self.path("run", "model", f"model_w_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"), {"data": ("F32", [2, 2], bytes(16))})
        self.fails(5, "inspect", "run", contains=["a shard without local_global_slices_pairs"])


class Torchtune(Trainers):
    def inspected(self, source):
        """Of a folder with other checkpoints, which a line on stderr names."""
        p = self.run_tool("inspect", source)
        self.assertEqual(p.returncode, 0, p.stderr)
        return p.stdout

    def test_the_model(self):
        run = self.folder("torchtune", "lora")
        for source in (run, f"{run}/hf_model_*_0.pt"):
            p = self.run_tool("consolidate", source, "-o", "model.safetensors", "-f")
            self.assertEqual(p.returncode, 0, p.stderr)
            self.assertEqual(safetensors_file.read(self.path("model.safetensors")),
                             safetensors_file.read(os.path.join(CORPUS, "torchtune", "expected.safetensors")))
        p = self.run_tool("verify", run)
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertIn("run: reads hf_model_*_0.pt, and not adapter_model.bin (pt)", p.stderr)
        self.assertIn("2 files, no index: assumed complete", self.inspected(run))

    def test_transformers_files_without_an_index(self):
        run = self.folder("torchtune", "lora")
        for n in (1, 2):
            os.rename(self.path(run, f"hf_model_000{n}_0.pt"), self.path(run, f"pytorch_model-0000{n}-of-00002.bin"))
        os.remove(self.path(run, "adapter_model.bin"))
        out = self.inspected(run)
        self.assertIn("Tensors     12 ", out)
        self.assertNotIn("assumed complete", out)
        os.remove(self.path(run, "pytorch_model-00002-of-00002.bin"))
        self.fails(3, "inspect", run, contains=["run: the file pytorch_model-00002-of-00002.bin is missing"])

    def test_epochs(self):
        run = self.folder("torchtune", "lora")
        for n in (1, 2):
            shutil.copy(self.path(run, f"hf_model_000{n}_0.pt"), self.path(run, f"hf_model_000{n}_10.pt"))
        self.fails(2, "inspect", run, contains=["no rule says which one", f"such as '{run}/hf_model_*_0.pt'"])
        self.assertIn("Tensors     12 ", self.inspected(f"{run}/hf_model_*_10.pt"))

    def test_damage(self):
        run = self.folder("torchtune", "lora")
        first, second = (self.path(run, f"hf_model_000{n}_0.pt") for n in (1, 2))
        shutil.copy(second, self.path("second"))
        shutil.copy(first, second)
        self.fails(3, "consolidate", run, "-o", "none.h5", contains=[" is in two files, hf_model_0001_0.pt and hf_model_0002_0.pt"])
        with open(second, "wb") as f:
            f.write(bytes(100))
        self.fails(3, "consolidate", run, "-o", "none.h5", contains=["run: ", "hf_model_0002_0.pt"])
        os.remove(second)
        shutil.copy(self.path("second"), self.path(run, "hf_model_0003_0.pt"))
        self.fails(3, "consolidate", run, "-o", "none.h5", contains=["run: the file hf_model_0002_0.pt is missing"])
        os.remove(self.path(run, "hf_model_0003_0.pt"))
        os.symlink(self.path("second"), second)
        self.fails(3, "consolidate", run, "-o", "none.h5", contains=["hf_model_0002_0.pt"])
        self.assertNotIn("none.h5", self.listing())


if __name__ == "__main__":
    harness.main()
