"""--recipe: what a recipe can say, what it does to dtypes and to the state of an optimizer, and every way it can be wrong."""

import array
import json
import os
import shutil
import struct

import harness
import safetensors_file


def counted(*shape, start=0):
    """A tensor of int16 whose elements count from `start`."""
    size = 1
    for n in shape:
        size *= n
    return "I16", list(shape), b"".join(struct.pack("<h", start + i) for i in range(size))


def values(tensor):
    return [v[0] for v in struct.iter_unpack("<h", tensor[2])]


class Language(harness.Case):
    def write(self, rules, **more):
        with open(self.path("r.json"), "w", encoding="utf-8") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": rules, **more}, f)

    def apply(self, tensors, *options):
        safetensors_file.write(self.path("in.safetensors"), tensors)
        self.ok("consolidate", "in.safetensors", "-o", "out.safetensors", "--force", "--recipe", "r.json", *options)
        return safetensors_file.read(self.path("out.safetensors"))

    def there_and_back(self, tensors, rules, **more):
        self.write(rules, **more)
        made = self.apply(tensors)
        self.assertEqual(self.apply(made, "--reverse"), tensors)
        os.rename(self.path("in.safetensors"), self.path("made.safetensors"))
        self.ok("reshard", "made.safetensors", "-o", "shards", "--dp", "3", "--force")  # chunks end anywhere
        self.ok("consolidate", "shards", "-o", "again.safetensors", "--force", "--recipe", "r.json", "--reverse")
        self.assertEqual(safetensors_file.read(self.path("again.safetensors")), tensors)
        return made

    def test_operations(self):
        a, b = counted(2, 3), counted(2, 3, start=6)
        made = self.there_and_back({"a": a, "b": b}, [{"from": ["a", "b"], "to": "c", "operations": {"concatenate": 1}}])
        self.assertEqual((made["c"][1], values(made["c"])), ([2, 6], [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]))
        made = self.there_and_back({"a": a, "b": b}, [{"from": ["a", "b"], "to": "c", "operations": {"stack": -1}}])
        self.assertEqual((made["c"][1], values(made["c"])[:4]), ([2, 3, 2], [0, 6, 1, 7]))
        made = self.there_and_back({"a": counted(6, 2)}, [{"from": "a", "to": ["x", "y", "z"], "operations": {"chunk": 0}}])
        self.assertEqual({k: values(t) for k, t in made.items()},
                         {"x": [0, 1, 2, 3], "y": [4, 5, 6, 7], "z": [8, 9, 10, 11]})
        made = self.there_and_back({"a": counted(5, 2)}, [{"from": "a", "to": ["x", "y"], "operations": {
            "split": 0, "sizes": ["1", "2 * (3 - 1)"]}}])
        self.assertEqual(made["x"][1] + made["y"][1], [1, 2, 4, 2])
        made = self.there_and_back({"a": counted(2, 3)}, [{"from": "a", "to": "a", "operations": {"transpose": [0, 1]}}])
        self.assertEqual((made["a"][1], values(made["a"])), ([3, 2], [0, 3, 1, 4, 2, 5]))

    def test_rearrange(self):
        made = self.there_and_back({"a": counted(8, 3)}, [{"from": "a", "to": "a", "operations": {
            "rearrange": "(h d two) c -> (h two d) c"}}], sizes={"h": "2", "two": "2"})
        rows = [values(made["a"])[i] // 3 for i in range(0, 24, 3)]
        self.assertEqual(rows, [0, 2, 1, 3, 4, 6, 5, 7])
        made = self.there_and_back({"a": counted(4, 6)}, [{"from": "a", "to": "a", "operations": {
            "rearrange": "(a b) (c d) -> c (d a) b"}}], sizes={"a": "2", "c": "3"})
        self.assertEqual(made["a"][1], [3, 4, 2])
        expect = [(a * 2 + b) * 6 + c * 2 + d for c in range(3) for d in range(2) for a in range(2) for b in range(2)]
        self.assertEqual(values(made["a"]), expect)

    def test_interleaved_rows_and_columns(self):
        gate, up = counted(3, 5), counted(3, 5, start=15)
        made = self.there_and_back({"gate": gate, "up": up}, [{"from": ["gate", "up"], "to": "both", "operations": [
            {"stack": 1}, {"rearrange": "n two c -> (n two) c"}]}], sizes={"two": "2"})
        self.assertEqual(values(made["both"])[:10], [0, 1, 2, 3, 4, 15, 16, 17, 18, 19])
        made = self.there_and_back({"gate": gate, "up": up}, [{"from": ["gate", "up"], "to": "both", "operations": [
            {"stack": 2}, {"rearrange": "n c two -> n (c two)"}]}], sizes={"two": "2"})
        self.assertEqual(values(made["both"])[:4], [0, 15, 1, 16])

    def test_megatron_qkv(self):
        """Groups of two queries, a key and a value, as Megatron fuses them."""
        fused = counted(2 * 4 * 3, 2)
        made = self.there_and_back({"qkv": fused}, [{"from": "qkv", "to": ["q", "k", "v"], "operations": [
            {"rearrange": "(g r d) c -> g r d c"}, {"split": 1, "sizes": ["2", "1", "1"]},
            {"rearrange": "g r d c -> (g r d) c"}]}], sizes={"g": "2", "d": "3"})
        row = {name: [values(t)[i] // 2 for i in range(0, len(values(t)), 2)] for name, t in made.items()}
        self.assertEqual(row, {"q": [*range(6), *range(12, 18)], "k": [6, 7, 8, 18, 19, 20], "v": [9, 10, 11, 21, 22, 23]})

    def test_experts_are_stacked_and_fused(self):
        tensors = {f"l.3.e.{e}.{w}": counted(2, 3, start=100 * e + 50 * (w == "up")) for e in range(11)
                   for w in ("gate", "up")}
        made = self.there_and_back(tensors, [{"from": ["l.{n}.e.{e}.gate", "l.{n}.e.{e}.up"], "to": "l.{n}.gate_up",
                                              "operations": [{"stack": 0}, {"concatenate": 1}]}])
        self.assertEqual(made["l.3.gate_up"][1], [11, 4, 3])
        self.assertEqual(values(made["l.3.gate_up"])[-6:], [1050, 1051, 1052, 1053, 1054, 1055])

    def test_numbers_of_layers_are_shifted(self):
        rules = [{"from": "mtp.{k}.w", "to": "layers.{k+layers}.w"}, {"from": "blocks.{n}.w", "to": "layers.{n}.w"},
                 {"add": "layers.{0+layers}.head", "same_as": "head"}, {"from": "head", "to": "head"}]
        with open(self.path("config.json"), "w", encoding="utf-8") as f:
            f.write('{"layers": 9}')
        tensors = {"mtp.0.w": counted(2), "mtp.1.w": counted(2, start=4), "blocks.8.w": counted(3), "blocks.0.w": counted(3),
                   "head": counted(1)}
        made = self.there_and_back(tensors, rules)
        self.assertEqual(made, {"layers.9.w": counted(2), "layers.10.w": counted(2, start=4), "layers.8.w": counted(3),
                                "layers.0.w": counted(3), "head": counted(1), "layers.9.head": counted(1)})
        os.unlink(self.path("config.json"))  # without the number, rules that need it do not apply
        safetensors_file.write(self.path("in.safetensors"), tensors)
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json",
                   contains=["no rule of the recipe r.json takes 'mtp.0.w'"])

    def test_layers_of_experts(self):
        """Two variables are unstacked, the first one from the outer dimension."""
        made = self.there_and_back({"fc1": counted(11, 3, 4, 2)}, [
            {"from": "fc1", "to": ["l.{n}.e.{e}.gate", "l.{n}.e.{e}.up"],
             "operations": [{"chunk": 2}, {"unstack": 0}, {"unstack": 0}]}])
        self.assertEqual(len(made), 66)
        self.assertEqual(values(made["l.10.e.2.up"]), list(range(260, 264)))
        safetensors_file.write(self.path("in.safetensors"), {k: t for k, t in made.items() if k != "l.4.e.1.up"})
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", "--reverse",
                   contains=["'l.{n}.e.{e}.up'"])

    def test_small_pieces_are_gathered(self):
        """Transposed and interleaved matrices, larger than a block, from shards and from compressed chunks."""
        rows, columns = 700, 900
        data = array.array("h", ((i * 7919) % 65536 - 32768 for i in range(2 * rows * columns)))
        half = rows * columns
        tensors = {name: ("I16", [rows, columns], data[at:at + half].tobytes()) for name, at in (("a", 0), ("b", half))}
        both = array.array("h", bytes(4 * half))
        both[0::2], both[1::2] = data[:half], data[half:]
        turned = array.array("h")
        for c in range(columns):
            turned.extend(data[c:half:columns])
        safetensors_file.write(self.path("in.safetensors"), tensors)
        for rules, want in (
                ([{"from": ["a", "b"], "to": "x", "operations": [{"stack": 2}, {"rearrange": "n c two -> n (c two)"}]}],
                 {"x": ("I16", [rows, 2 * columns], both.tobytes())}),
                ([{"from": "a", "to": "x", "operations": {"transpose": [0, 1]}}, {"drop": "b"}],
                 {"x": ("I16", [columns, rows], turned.tobytes())})):
            self.write(rules, sizes={"two": "2"})
            for to, options in (("dcp", ()), ("h5", ("--compress", "1")), ("h5", ())):
                self.ok("reshard", "in.safetensors", "-o", "s", "--to", to, "--dp", "3", "--force", *options)
                run = ("consolidate", "s", "-o", "out.safetensors", "--force", "--recipe", "r.json", "--memory", "1M")
                self.ok(*run)
                self.assertEqual(safetensors_file.read(self.path("out.safetensors")), want)
                if not options:
                    with self.flipped_chunk("s", "a", 1):
                        self.fails(3, *run)
                if "b" in str(rules[0]["from"]):
                    self.ok("consolidate", "out.safetensors", "-o", "back.safetensors", "--force", "--recipe", "r.json",
                            "--reverse")
                    self.assertEqual(safetensors_file.read(self.path("back.safetensors")), tensors)
                shutil.rmtree(self.path("s"))

    def test_resize(self):
        rules = [{"from": "a", "to": "b", "operations": {"resize": 0, "from": "3", "to": "5"}}]
        made = self.there_and_back({"a": counted(3, 2, start=1)}, rules)
        self.assertEqual((made["b"][1], values(made["b"])), ([5, 2], [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]))
        self.write([{"from": "a", "to": "b", "operations": {"resize": 0, "to": "5"}}])
        self.fails(2, "consolidate", "made.safetensors", "-o", "m.h5", "--recipe", "r.json", "--reverse",
                   contains=["r.json: rule 1: it cannot be reversed"])

    def test_odd_tensors(self):
        """Scalars, empty tensors, and names without a rule's variables."""
        made = self.there_and_back({"s": counted(), "e": counted(0, 4), "t": counted(4)}, [
            {"from": "s", "to": "scalar"}, {"from": "e", "to": "empty", "operations": {"transpose": [0, 1]}},
            {"from": "t", "to": "{n}", "operations": {"unstack": 0}}])
        self.assertEqual({k: t[1] for k, t in made.items()},
                         {"scalar": [], "empty": [4, 0], "0": [], "1": [], "2": [], "3": []})

    def test_sizes_come_from_the_config(self):
        rules = [{"from": "a", "to": ["x", "y"], "operations": {"split": 0, "sizes": ["half", "n - half"]}}]
        self.write(rules, sizes={"n": ["text_config.size", "size"], "half": "n / 2"})
        safetensors_file.write(self.path("in.safetensors"), {"a": counted(6)})
        run = ("consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json")
        self.fails(2, *run, contains=["needs 'size' of the model's config.json", "give it with --config"])
        with open(self.path("config.json"), "w", encoding="utf-8") as f:
            f.write('{"text_config": {"size": 6}}')
        self.ok(*run)  # found next to the source
        os.rename(self.path("config.json"), self.path("other.json"))
        self.ok(*run, "--force", "--config", "other.json")
        with open(self.path("other.json"), "w", encoding="utf-8") as f:
            f.write('{"size": 7}')
        self.fails(2, *run, "--force", "--config", "other.json", contains=["7 cannot be divided by 2"])

    def test_every_name_has_a_rule(self):
        safetensors_file.write(self.path("in.safetensors"), {"layers.0.mlp.w1.weight": counted(2), "other": counted(2)})
        self.write([{"from": "layers.{n}.mlp.w2.weight", "to": "b.{n}"}, {"from": "other", "to": "o"}])
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[
            "in.safetensors: no rule of the recipe r.json takes 'layers.0.mlp.w1.weight'; the nearest is "
            "'layers.{n}.mlp.w2.weight'", "--exclude 'layers.0.mlp.w1.weight' leaves it out"])
        self.ok("consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", "--exclude", "layers.*")
        self.assertEqual(self.listing(), ["in.safetensors", "m.h5", "r.json"])

    def test_wrong_recipes(self):
        tensors = {"a": counted(4, 2), "b": counted(4, 3), "e.0": counted(2), "e.2": counted(2)}
        safetensors_file.write(self.path("in.safetensors"), tensors)
        rest = [{"drop": "a"}, {"drop": "b"}, {"drop": "e.{n}"}]
        for rule, why in (
                ({"from": ["a", "b"], "to": "c", "operations": {"concatenate": 0}}, "different shapes"),
                ({"from": ["a", "c"], "to": "c", "operations": {"concatenate": 0}}, "'a' needs 'c', which is missing"),
                ({"from": "e.{e}", "to": "e", "operations": {"stack": 0}}, "numbered from 0"),
                ({"from": "a", "to": ["x", "y", "z"], "operations": {"chunk": 0}}, "cut into parts that sum up to 3"),
                ({"from": "a", "to": "x", "operations": {"chunk": 5}}, "has no dimension 5"),
                ({"from": "a", "to": "x", "operations": {"rearrange": "(a b) -> a b"}}, "is for 1 dimensions, but there are 2"),
                ({"from": "a", "to": "x", "operations": {"rearrange": "(a b) c -> a b c"}}, "two sizes of one dimension are unknown"),
                ({"from": "a", "to": "x", "operations": {"rearrange": "a b -> a c"}}, "do not have the same names"),
                ({"from": "a", "to": "x", "operations": {"rearrange": "(a b c -> a b c"}}, "a ')' is missing"),
                ({"from": "a", "to": "x", "operations": {"turn": 0}}, "unknown member \"turn\""),
                ({"from": "a", "to": "x", "operations": {"transpose": [0, 1], "sizes": "1"}}, "rule 1: only \"split\" and"),
                ({"from": "a", "to": ["x", "y"], "operations": {"chunk": 0, "sizes": ["1", "3"]}}, "rule 1: only \"split\" and"),
                ({"from": "a", "to": "x", "operations": {"transpose": [0, 1], "to": "1"}}, "only the operation \"resize\" has"),
                ({"drop": "a", "add": "x", "same_as": "b"}, "r.json: rule 1: it has both \"drop\" and \"add\""),
                ({"from": "a", "to": "x{n}"}, "a variable of \"to\" has no value"),
                ({"from": "a", "to": "x{n"}, "its braces do not match"),
                ({"from": "a"}, "it needs \"from\" and \"to\""),
                ({"from": "a", "to": "e"}, "makes 'e' twice")):
            with self.subTest(why):
                self.write([rule, *([{"from": "b", "to": "e"}] if rule.get("to") == "e" else []), *rest])
                self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[why])
        for second, why in (("e.18446744073709551617", "numbered from 0"),  # 2^64 + 1
                            ("e.01", "no rule of the recipe r.json takes 'e.01'")):
            with self.subTest(second):
                safetensors_file.write(self.path("wide.safetensors"), {"e.0": counted(2), second: counted(2)})
                self.write([{"from": "e.{e}", "to": "e", "operations": {"stack": 0}}])
                self.fails(2, "consolidate", "wide.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[why])
        os.unlink(self.path("wide.safetensors"))
        for more, why in (({"sizes": ["n"]}, "r.json: \"sizes\" is not an object"), ({"sizes": "n"}, "\"sizes\" is not an object"),
                          ({"sizes": {"n": 4}}, "r.json: \"n\" is not a string or an array of strings"),
                          ({"dtypes": [{"*": "f32"}]}, "r.json: \"dtypes\" is not an object"),
                          ({"dtype": {"*": "f32"}}, "r.json: unknown member \"dtype\""),
                          ({"description": 4}, "r.json: \"description\" is not a string")):
            with self.subTest(why):
                self.write([{"from": "a", "to": "x"}, *rest], **more)
                self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[why])
        for text, why in (("[]", "a recipe must be an object such as"), ("{\"rules\": []}", "not a recipe, which begins with"),
                          ("{\"fsdpckpt\": \"recipe\", \"schema\": 1}", "a recipe has \"rules\"")):
            with open(self.path("r.json"), "w", encoding="utf-8") as f:
                f.write(text)
            self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[why])
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "torchtitan", contains=["torchtitan-llama3"])
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--reverse", contains=["--reverse needs --recipe"])
        self.assertEqual(self.listing(), ["in.safetensors", "r.json"])

    def test_sizes_that_refer_to_each_other(self):
        """Each of 15 sizes has the next one ten times. Computed one by one, these are 10^15 numbers."""
        safetensors_file.write(self.path("in.safetensors"), {"a": counted(4)})
        rules = [{"from": "a", "to": ["x", "y"], "operations": {"split": 0, "sizes": ["s0", "4 - s0"]}}]
        for last, terms in (("0", " + "), ("unknown", " + ")):
            self.write(rules, sizes={**{f"s{i}": terms.join(10 * [f"s{i + 1}"]) for i in range(14)}, "s14": last})
            self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json",
                       contains=["refer to each other too often" if last == "0" else "needs 'unknown'"])
        self.write(rules, sizes={**{f"s{i}": [f"s{i + 1} / 3"] * 10 for i in range(14)}, "s14": ["no", "nowhere"]})
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json",
                   contains=["refer to each other too often"])
        self.write(rules, sizes={"s0": "s1", "s1": "s0"})
        self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=["defined by themselves"])

    def test_drop_add_and_conditions(self):
        self.write([{"from": "a", "to": "b"}, {"drop": "c", "same_as": "a", "when": "tied == 1"}, {"from": "c", "to": "d"}])
        with open(self.path("config.json"), "w", encoding="utf-8") as f:
            f.write('{"tied": true}')
        both = {"a": counted(2), "c": counted(2)}
        self.assertEqual(self.apply(both), {"b": counted(2)})
        self.assertEqual(self.apply({"b": counted(2)}, "--reverse"), both)
        os.unlink(self.path("config.json"))
        self.assertEqual(self.apply(both), {"b": counted(2), "d": counted(2)})

    def test_texts_of_the_config(self):
        self.write([{"from": "a", "to": "b", "when": "text_config.model_type.x_1"}, {"from": "a", "to": "c"}])
        for text, name in (("x_1", "b"), ("x_2", "c"), ("x_1" + 70 * " ", "c"), ("", "c")):
            with open(self.path("config.json"), "w", encoding="utf-8") as f:
                json.dump({"text_config": {"model_type": text}}, f)
            self.assertEqual(self.apply({"a": counted(2)}), {name: counted(2)})


class Dtypes(harness.Case):
    """Dtypes of a recipe: they hold in every command, and --dtype leaves them alone."""

    def setUp(self):
        super().setUp()
        floats = lambda *shape: ("F32", list(shape), array.array("f", (i / 3 for i in range(shape[0] * shape[-1]))).tobytes())
        self.source = {"a.norm": floats(4, 3), "b.norm": floats(4, 3), "w": floats(256, 128), "n": counted(3)}
        safetensors_file.write(self.path("in.safetensors"), self.source)
        self.write({"x.*": "f16", "x.norm": "bf16", "y.*": "f32"})

    def write(self, dtypes):
        rules = [{"from": ["a.norm", "b.norm"], "to": "x.norm", "operations": {"concatenate": 0}},
                 {"from": "w", "to": "y.w", "operations": {"transpose": [0, 1]}}, {"from": "n", "to": "x.n"}]
        with open(self.path("r.json"), "w", encoding="utf-8") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": rules, "dtypes": dtypes}, f)

    def dtypes(self, *options, command="consolidate"):
        self.ok(command, "in.safetensors", "-o", "out.safetensors", "--force", "--recipe", "r.json", *options)
        return {name: t[0] for name, t in safetensors_file.read(self.path("out.safetensors")).items()}

    def test_in_every_command(self):
        want = {"x.norm": "BF16", "y.w": "F32", "x.n": "I16"}
        self.assertEqual(self.dtypes(), want)
        norm = safetensors_file.read(self.path("out.safetensors"))["x.norm"]
        self.ok("average", "in.safetensors", "in.safetensors", "-o", "mean.safetensors", "--recipe", "r.json")
        self.assertEqual(safetensors_file.read(self.path("mean.safetensors"))["x.norm"], norm)
        self.ok("consolidate", "in.safetensors", "-o", "cast.safetensors", "--dtype", "bf16")  # the same rounding
        cast = safetensors_file.read(self.path("cast.safetensors"))
        self.assertEqual(norm[2], cast["a.norm"][2] + cast["b.norm"][2])
        shown = json.loads(self.ok("inspect", "in.safetensors", "--recipe", "r.json", "--json"))["tensors"]
        self.assertEqual({t["name"]: t["dtype"] for t in shown}, {"x.norm": "bfloat16", "y.w": "float32", "x.n": "int16"})
        self.ok("extract", "in.safetensors", "x.norm", "-o", "bytes", "--recipe", "r.json")
        with open(self.path("bytes"), "rb") as f:
            self.assertEqual(f.read(), norm[2])
        self.ok("view", "in.safetensors", "-o", "view.h5", "--recipe", "r.json", "--include", "?.norm")
        self.ok("consolidate", "view.h5", "-o", "view.safetensors", "--follow-external")
        self.assertEqual(safetensors_file.read(self.path("view.safetensors"))["x.norm"], norm)
        self.ok("diff", "in.safetensors", "out.safetensors", "--recipe", "r.json", "--data")
        self.ok("check", "in.safetensors", "--recipe", "r.json", "--against", "out.safetensors")
        self.ok("reshard", "in.safetensors", "-o", "ranks", "--to", "dcp", "--dp", "3", "--recipe", "r.json")
        self.ok("diff", "ranks", "out.safetensors", "--data")

    def test_with_other_options(self):
        self.assertEqual(self.dtypes("--dtype", "f16"), {"x.norm": "BF16", "y.w": "F32", "x.n": "I16"})
        self.assertEqual(self.dtypes("--dtype-for", "x.norm=f32"), {"x.norm": "F32", "y.w": "F32", "x.n": "I16"})
        self.write({"x.norm": "f32"})
        self.assertEqual(self.dtypes("--dtype", "bf16"), {"x.norm": "F32", "y.w": "BF16", "x.n": "I16"})
        codes = {"y.w": "F8_E4M3", "y.w_scale_inv": "F32"}
        self.assertEqual(self.dtypes("--quantize", "y.w"), {"x.norm": "F32", "x.n": "I16", **codes})
        self.write({})
        self.assertEqual(self.dtypes("--quantize", "y.w", "--dtype", "bf16"), {"x.norm": "BF16", "x.n": "I16", **codes})
        self.assertEqual(self.dtypes("--quantize", "y.w", "--dtype", "bf16", "--dtype-for", "*norm=f16"),
                         {"x.norm": "F16", "x.n": "I16", **codes})
        self.fails(5, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", "--quantize", "y.w", "--dtype-for",
                   "*_scale_inv=bf16", contains=["would change the weights"])

    def test_refused(self):
        for dtypes, why in (({"x.*": "i32"}, "'x.*' needs a floating-point type"), ({"x.*": "f33"}, "needs a floating-point"),
                            ({"x.*": 4}, "needs a floating-point type")):
            self.write(dtypes)
            self.fails(2, "inspect", "in.safetensors", "--recipe", "r.json", contains=[why])
        self.ok("consolidate", "in.safetensors", "-o", "codes.safetensors", "--quantize", "w")
        with open(self.path("r.json"), "w", encoding="utf-8") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": [], "others": "keep", "dtypes": {"*": "bf16"}}, f)
        self.fails(5, "consolidate", "codes.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=["tensor w holds quantized codes", "the dtypes of the recipe"])
        self.ok("consolidate", "codes.safetensors", "-o", "m.h5", "--recipe", "r.json", "--dequantize", "f32")

    def test_reversed(self):
        self.dtypes()
        run = ("consolidate", "out.safetensors", "-o", "back.safetensors", "--force", "--recipe", "r.json", "--reverse")
        p = self.run_tool(*run)
        self.assertEqual((p.returncode, p.stderr), (0, "fsdpckpt: out.safetensors: the reversed recipe r.json does not "
                                                       "restore the dtype of 'x.*', the dtype of 'x.norm', the dtype of 'y.*'\n"))
        self.assertEqual(self.run_tool(*run, "-q").stderr, "")
        back = {name: t[0] for name, t in safetensors_file.read(self.path("back.safetensors")).items()}
        self.assertEqual(back, {"a.norm": "BF16", "b.norm": "BF16", "w": "F32", "n": "I16"})
        with open(self.path("r.json"), "w", encoding="utf-8") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": [
                {"from": "a", "to": "b", "operations": {"resize": 0, "from": "5", "to": "3"}}, {"drop": "z"}]}, f)
        safetensors_file.write(self.path("out.safetensors"), {"b": counted(3)})
        p = self.run_tool(*run)
        self.assertEqual(p.stderr, "fsdpckpt: out.safetensors: the reversed recipe r.json does not restore 'z', which it drops, "
                                   "what it trims of 'a' (zeros)\n")
        self.assertEqual(safetensors_file.read(self.path("back.safetensors"))["a"][1], [5])


class Optimizer(harness.Case):
    """Optimizer state follows its parameter. tests/oracle/recipe_optimizer.py loads it with torch."""

    def write(self, rules, **more):
        with open(self.path("r.json"), "w", encoding="utf-8") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": rules, **more}, f)

    def states(self, *names, step=7):
        """Parameters of 2 × 3 elements, with what AdamW keeps of each."""
        made = {}
        for i, name in enumerate(names):
            made[name] = counted(2, 3, start=100 * i)
            made[f"optim.state.{name}.exp_avg"] = counted(2, 3, start=100 * i + 10)
            made[f"optim.state.{name}.step"] = counted(start=step)
        return made

    def apply(self, tensors, *options):
        safetensors_file.write(self.path("in.safetensors"), tensors)
        self.ok("consolidate", "in.safetensors", "-o", "out.safetensors", "--force", "--recipe", "r.json", *options)
        return safetensors_file.read(self.path("out.safetensors"))

    def test_joined_and_divided(self):
        self.write([{"from": ["a", "b"], "to": "c", "operations": {"concatenate": 1}}])
        source = self.states("a", "b")
        made = self.apply(source)
        self.assertEqual(sorted(made), ["c", "optim.state.c.exp_avg", "optim.state.c.step"])
        self.assertEqual(values(made["optim.state.c.exp_avg"]), [10, 11, 12, 110, 111, 112, 13, 14, 15, 113, 114, 115])
        self.assertEqual(values(made["optim.state.c.step"]), [7])
        self.assertEqual(self.apply(made, "--reverse"), source)
        alone = {name: t for name, t in made.items() if name != "c"}  # the optimizer without the model
        self.assertEqual(self.apply(alone, "--reverse"), {name: t for name, t in source.items() if name not in "ab"})
        self.ok("consolidate", "in.safetensors", "-o", "c.safetensors", "--recipe", "r.json", "--reverse", "--force")
        safetensors_file.write(self.path("made.safetensors"), made)
        self.ok("view", "made.safetensors", "-o", "view.h5", "--recipe", "r.json", "--reverse")
        safetensors_file.write(self.path("in.safetensors"), source)
        self.ok("diff", "view.h5", "in.safetensors", "--data", "--follow-external", "-q")
        self.ok("check", "made.safetensors", "--recipe", "r.json", "--reverse")

    def test_experts(self):
        source = self.states(*(f"l.2.e.{e}.w" for e in range(11)))
        self.write([{"from": "l.{n}.e.{e}.w", "to": "l.{n}.w", "operations": [{"stack": 0}, {"transpose": [1, 2]}]}])
        made = self.apply(source)
        self.assertEqual((made["optim.state.l.2.w.exp_avg"][1], values(made["optim.state.l.2.w.step"])), ([11, 3, 2], [7]))
        self.assertEqual(values(made["optim.state.l.2.w.exp_avg"])[6:12], [110, 113, 111, 114, 112, 115])
        self.assertEqual(self.apply(made, "--reverse"), source)

    def test_dropped_and_kept(self):
        self.write([{"from": "a", "to": "x"}, {"drop": "b"}], others="keep")
        made = self.apply({**self.states("a", "b", "z"), "optim.state.a.row": counted(5)})
        self.assertEqual(sorted(made), ["optim.state.x.exp_avg", "optim.state.x.row", "optim.state.x.step",
                                        "optim.state.z.exp_avg", "optim.state.z.step", "x", "z"])

    def test_refused(self):
        joined = [{"from": ["a", "b"], "to": "c", "operations": {"concatenate": 0}}]
        both, other = self.states("a", "b"), counted(start=8)
        for rules, tensors, why in (
                (joined, {**both, "optim.state.b.step": other}, "differs from 'optim.state.a.step'"),
                (joined, {**both, "optim.state.b.step": counted(1, start=7)}, "differs from 'optim.state.a.step'"),
                (joined, {**both, "optim.state.a.row": counted(2), "optim.state.b.row": counted(2)}, "has another shape than"),
                (joined, {n: t for n, t in both.items() if n != "optim.state.b.step"}, "but not for 'b', which the recipe joins with"),
                ([{"from": "a", "to": "c"}], both, "no rule of the recipe r.json takes 'b'"),
                ([{"from": "a", "to": "c"}, {"drop": "b"}], {**both, "optim.state.0.step": other}, "numbers its parameter")):
            with self.subTest(why):
                self.write(rules)
                safetensors_file.write(self.path("in.safetensors"), tensors)
                self.fails(2, "consolidate", "in.safetensors", "-o", "m.h5", "--recipe", "r.json", contains=[why])
        self.write(joined)
        safetensors_file.write(self.path("in.safetensors"), {**both, "optim.state.b.step": other})
        self.ok("inspect", "in.safetensors", "--recipe", "r.json", "--headers-only")  # reads no data
        self.assertEqual(self.listing(), ["in.safetensors", "r.json"])

    def test_lists_of_parameters(self):
        rules = [{"from": "tok_embeddings.weight", "to": "embed.weight"},
                 {"from": "layers.{n}.w1.weight", "to": ["h.{n}.gate", "h.{n}.up"], "operations": {"chunk": 0}},
                 {"from": "layers.{n}.w1.bias", "to": "h.{n}.bias"}, {"from": "layers.{n}.w2.weight", "to": "h.{n}.down",
                                                                     "operations": {"transpose": [0, 1]}},
                 {"from": "norm.{k}", "to": "ln.{k}"}, {"from": "norm.weight", "to": "ln.weight"}, {"drop": "norm.bias"}]
        names = ["embed.weight", "h.0.gate", "h.0.up", "h.0.bias", "h.0.down", "ln.weight"]
        for source in ("dcp-torch1.13.1-fsdp1-optim", "dcp-torch2.0.1-fsdp1-optim", "dcp-torch2.15.0-fsdp1-optim",
                       "dcp-torch2.15.0-train"):
            with self.subTest(source):
                self.write(rules)
                given = (os.path.join(harness.CORPUS, source), "--strip-prefix", "model.",
                         *(("--exclude", "nested.*") if source.endswith("-train") else ()), "--recipe", "r.json")
                for to in ("dcp", "h5", "pt"):
                    self.ok("consolidate" if to != "dcp" else "reshard", *given, "-o", f"o.{to}", "--to", to, "--force",
                            *(("--dp", "2") if to == "dcp" else ()))
                    made = json.loads(self.ok("inspect", f"o.{to}", "--json"))
                    lists = [o["value"] for o in made["objects"] if o["name"].endswith(".params")]
                    lists += [g["params"] for o in made["objects"] if o["name"] == "optim.param_groups" for g in o["value"]]
                    self.assertEqual(sorted(n for names in lists for n in names), sorted(names), to)
                    state = {t["name"]: t for t in made["tensors"] if ".state." in t["name"]}
                    self.assertEqual(sorted({n.split(".state.")[1].rsplit(".", 1)[0] for n in state}), sorted(names))
                    key = next(n for n in state if n.endswith("h.0.down.exp_avg"))
                    self.assertEqual((state[key]["shape"], ".".join(state[key]["path"])), ([10, 6], key))
                    self.assertIn("{'$tuple': [0.9, 0.9", str(made["objects"]))
                    self.ok("check", f"o.{to}")


if __name__ == "__main__":
    harness.main()
