"""config.json as Python's json writes it, with NaN and Infinity, which Transformers has for Mamba's time_step_limit. What Python
reads is read, what it refuses is refused, and what is not changed keeps its bytes."""

import json
import os
import random
import shutil

import harness
import safetensors_file

RECIPES = os.path.join(harness.CORPUS, "..", "recipes")
LIMITS = {"time_step_limit": [0.0, float("inf")], "none": float("nan"), "rope": {"low": float("-inf"), "deep": [[{"x": float("nan")}]]},
          "text": 'NaN, "Infinity" and \\', "-Infinity": "]"}
PLAIN = {"w.weight": ("F32", [2, 2], bytes(16))}
CODES = {"w.weight": ("F8_E4M3", [2, 2], bytes(4)), "w.weight_scale_inv": ("F32", [1, 1], b"\0\0\x80?")}


def unique(pairs):
    """An object whose keys differ, as the program wants it."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


class ConfigJson(harness.Case):
    def like(self, text):
        os.makedirs(self.path("like"), exist_ok=True)
        with open(self.path("like", "config.json"), "wb") as f:
            f.write(text)
        return self.path("like")

    def kept(self):
        with open(self.path("out", "config.json"), "rb") as f:
            return f.read()

    def test_python_writes_infinity(self):
        safetensors_file.write(self.path("in.safetensors"), PLAIN)
        text = json.dumps(LIMITS, indent=2).encode()
        self.assertTrue(all(text.count(word) == n for word, n in ((b"NaN", 3), (b"-Infinity", 2), (b"Infinity", 4))), text)
        self.ok("export", "in.safetensors", "-o", "out", "--like", self.like(text))
        self.assertEqual(self.kept(), text)

    def test_dequantize_keeps_infinity(self):
        safetensors_file.write(self.path("in.safetensors"), CODES)
        without = json.dumps(LIMITS)
        text = without[:-1] + ', "quantization_config": {"quant_method": "fp8", "limits": [NaN, -Infinity, "]"]}}'
        self.ok("export", "in.safetensors", "-o", "out", "--like", self.like(text.encode()), "--dequantize", "f32")
        self.assertEqual(self.kept(), without.encode())

    def test_recipe_takes_its_sizes(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        with open(os.path.join(here, "config.json"), encoding="utf-8") as f:
            config = {**LIMITS, **json.load(f)}
        arguments = ("consolidate", os.path.join(here, "from.safetensors"), "-o", "out.safetensors", "-f", "--recipe", "torchtitan-llama3",
                     "--config")
        self.ok(*arguments, self.like(json.dumps(config).encode()))
        self.assertEqual(safetensors_file.read(self.path("out.safetensors")), safetensors_file.read(os.path.join(here, "to.safetensors")))
        config["num_attention_heads"] = float("inf")
        self.fails(2, *arguments, self.like(json.dumps(config).encode()), contains=["num_attention_heads"])

    def test_only_what_python_reads(self):
        """Texts that differ from a good one in a word here and there; Python's json decides."""
        safetensors_file.write(self.path("in.safetensors"), PLAIN)
        chance, outcomes = random.Random(4), {0: 0, 2: 0}
        words = ["NaN", "Infinity", "-Infinity", "-", "Inf", "nan", "{", "}", "[", "]", ",", ":", '"', '\\', '"k"', "1", " ", "null"]
        good = '{ "a" : [ NaN , 1 , -Infinity ] , "b \\" NaN" : Infinity , "c" : "\\\\" , "d" : { "e" : NaN } }'.split(" ")
        for _ in range(150):
            parts = list(good)
            for _ in range(chance.choice((1, 1, 2))):
                at = chance.randrange(len(parts))
                parts[at:at + chance.choice((0, 1))] = [chance.choice(words)]
            text = chance.choice(("", " ")).join(parts)
            try:
                status = 0 if isinstance(json.loads(text, object_pairs_hook=unique), dict) else 2
            except ValueError:
                status = 2
            outcomes[status] += 1
            run = self.run_tool("export", "in.safetensors", "-o", "out", "--like", self.like(text.encode()), "--dry-run")
            self.assertEqual(run.returncode, status, text + run.stderr)
            shutil.rmtree(self.path("out"), ignore_errors=True)
        self.assertTrue(min(outcomes.values()) >= 15, outcomes)

    def test_other_files_are_plain_json(self):
        safetensors_file.write(self.path("in.safetensors"), PLAIN)
        with open(self.path("plan.json"), "w", encoding="utf-8") as f:
            f.write('{"w": Infinity}')
        self.fails(2, "reshard", "in.safetensors", "-o", "ranks", "--tp", "2", "--tp-plan", "plan.json", contains=["plan.json:1:"])


if __name__ == "__main__":
    harness.main()
