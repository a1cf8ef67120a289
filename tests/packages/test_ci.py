"""What people write in a pipeline: the GitHub Action, the hooks for pre-commit, and the two examples of docs/ci that use them.
Their commands are taken from the files and run with the command of this build, on a checkpoint that fits and on one that does
not."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
import harness  # noqa: E402

if not importlib.util.find_spec("yaml"):
    print("skipped: PyYAML is not installed")
    sys.exit(77)
import yaml  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "dcp-torch2.15.0-train"


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def fill_in(text, inputs, env):
    """Replaces the expressions of GitHub that the files use."""
    def value(match):
        kind, name = match.group(1).split(".")
        return {"inputs": inputs, "env": env}[kind][name]
    return re.sub(r"\$\{\{ *([a-z.]+|env\.[A-Z]+) *\}\}", value, str(text))


class Pipeline(harness.Case):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("bin"))
        os.symlink(harness.BINARY, self.path("bin", "fsdpckpt"))
        os.mkdir(self.path("runs"))
        self.copy(TRAIN, "runs/latest")
        Path(self.path("model.json")).write_text(self.ok("schema", "runs/latest"))

    def spoil(self):
        """Adds a layer to the schema, as if the model had changed."""
        schema = json.loads(Path(self.path("model.json")).read_text())
        schema["tensors"].append({"name": "model.layers.1.w1.weight", "dtype": "float32", "shape": [10, 6]})
        Path(self.path("model.json")).write_text(json.dumps(schema, indent=2))

    def shell(self, argv, env=None):
        path = self.path("bin") + os.pathsep + os.environ["PATH"]
        return subprocess.run(argv, cwd=self.dir, env={**os.environ, **(env or {}), "PATH": path}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def script(self, text, env):
        """Runs a script as GitHub does."""
        p = self.shell(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text], env)
        return p.returncode, p.stdout


class Workflow(Pipeline):
    def action(self, given, env):
        """The second step of the Action; the first builds the command (test_action.py)."""
        action = read("action.yml")
        self.assertLessEqual(set(given), set(action["inputs"]))
        inputs = {name: given.get(name, about["default"]) for name, about in action["inputs"].items()}
        install, check = action["runs"]["steps"]
        self.assertNotIn("if", install)
        self.assertEqual(check["if"], "inputs.checkpoint != ''")
        for step in (install, check):
            self.assertEqual(step["shell"], "bash")
        return self.script(check["run"], {name: fill_in(text, inputs, env) for name, text in check["env"].items()})

    def steps(self):
        """{name: (exit status, output)} of the steps that use fsdpckpt."""
        job = read("docs/ci/github-actions.yml")["jobs"]["check"]
        done = {}
        for step in job["steps"]:
            if "run" in step:
                done[step["name"]] = self.script(step["run"], job["env"])
            elif "/fsdpckpt@" in step["uses"]:
                given = {name: fill_in(text, {}, job["env"]) for name, text in step["with"].items()}
                done[step["name"]] = self.action(given, job["env"])
        return done

    def test_a_good_checkpoint_passes(self):
        done = self.steps()
        self.assertEqual(len(done), 3, done)
        for name, (status, output) in done.items():
            self.assertEqual(status, 0, (name, output))
            self.assertNotIn("::error", output)
        self.assertEqual(xml.parse(self.path("checkpoint.xml")).getroot().get("failures"), "0")
        self.assertTrue(os.path.exists(self.path("release.h5")))

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "needs transformers")
    def test_a_model_of_transformers(self):
        """A Llama, whose own names begin with "model.", saved with its optimizer."""
        shutil.rmtree(self.path("runs"))
        os.unlink(self.path("model.json"))
        p = self.shell([sys.executable, "-c", """
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96))
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
optimizer.step()
dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}, checkpoint_id="runs/latest")
"""])
        self.assertEqual(p.returncode, 0, p.stdout)
        Path(self.path("model.json")).write_text(self.ok("schema", "runs/latest"))
        self.test_a_good_checkpoint_passes()
        self.assertIn("lm_head.weight", self.ok("inspect", "release.h5", "--all"))

    def test_it_fails_if_the_model_changed(self):
        self.spoil()
        done = self.steps()
        status, output = done.pop("The checkpoint fits the model")
        self.assertEqual(status, 1, output)
        self.assertIn("::error file=model.json,title=fsdpckpt check%3A missing::model.layers.1.w1.weight: missing: ", output)
        self.assertEqual(xml.parse(self.path("checkpoint.xml")).getroot().get("failures"), "1")
        self.assertEqual({status for status, _ in done.values()}, {0})

    def test_it_fails_if_the_release_differs(self):
        job = read("docs/ci/github-actions.yml")["jobs"]["check"]
        script = job["steps"][-2]["run"]
        self.assertIn("diff", script)
        status, output = self.script(script.replace("--force", "--dtype bf16 --force"), job["env"])
        self.assertEqual(status, 1, output)
        self.assertIn("dtype: float32", output)

    def test_the_action_has_defaults_and_keeps_words_apart(self):
        os.rename(self.path("runs"), self.path("two words"))
        os.rename(self.path("model.json"), self.path("the model.json"))
        self.assertEqual(self.action({"checkpoint": "two words/latest"}, {})[0], 0)
        status, output = self.action({"checkpoint": "two words/latest", "options": "--schema 'the model.json' --exclude '*'"}, {})
        self.assertEqual(status, 0, output)
        self.assertIn("fits the model.json: 0 errors, 0 warnings; 0 tensors", output)
        self.assertTrue(os.path.exists(self.path("fsdpckpt.xml")))


class Hooks(Pipeline):
    def setUp(self):
        super().setUp()
        self.ok("consolidate", "runs/latest", "-o", "good.h5", "-q")
        self.ok("consolidate", "runs/latest", "-o", "bad.h5", "-q", "--exclude", "model.norm.*")
        (example,) = read("docs/ci/pre-commit-config.yaml")["repos"]
        self.used = {hook["id"]: hook for hook in example["hooks"]}
        self.offered = {hook["id"]: hook for hook in read(".pre-commit-hooks.yaml")}
        self.assertEqual(set(self.used), set(self.offered))

    def run_hook(self, name, *changed, **more):
        hook = {**self.offered[name], **self.used[name], **more}
        names = [n for n in changed if re.search(hook["files"], n)]
        self.assertTrue(names, "the hook does not look at %s" % (changed,))
        pass_names = hook.get("pass_filenames", True)
        return self.shell(shlex.split(hook["entry"]) + hook["args"] + (names if pass_names else []))

    def test_a_file_that_does_not_fit(self):
        p = self.run_hook("fsdpckpt-check", "good.h5", "README.md")
        self.assertEqual(p.returncode, 0, p.stdout)
        p = self.run_hook("fsdpckpt-check", "bad.h5", "good.h5")
        self.assertEqual(p.returncode, 1, p.stdout)
        self.assertIn("error: model.norm.weight: missing", p.stdout)

    def test_without_options_only_the_file_itself_counts(self):
        args = self.offered["fsdpckpt-check"]["args"]
        self.assertEqual(self.run_hook("fsdpckpt-check", "good.h5", args=args).returncode, 0)
        with open(self.path("good.h5"), "r+b") as f:
            f.truncate(2000)
        self.assertEqual(self.run_hook("fsdpckpt-check", "good.h5", args=args).returncode, 1)
        self.assertEqual(self.run_hook("fsdpckpt-check", "good.h5", args=["--dp", "2"]).returncode, 2)

    def test_options_with_blanks_and_stars_stay_as_they_are(self):
        os.rename(self.path("model.json"), self.path("a model.json"))
        args = ["--schema", "a model.json", "--exclude", "*.norm.*", "--exclude", "optim*", "--"]
        p = self.run_hook("fsdpckpt-check", "bad.h5", "good.h5", args=args)
        self.assertEqual(p.returncode, 0, p.stdout)

    def test_a_schema_that_no_longer_fits(self):
        self.assertEqual(self.run_hook("fsdpckpt", "model.json").returncode, 0)
        self.spoil()
        self.assertEqual(self.run_hook("fsdpckpt", "model.json").returncode, 1)

    @unittest.skipUnless(importlib.util.find_spec("pre_commit"), "pre-commit is not installed")
    def test_pre_commit_itself(self):
        """The real program, on a clone of the manifest; the command is already installed."""
        def git(*line, at=self.dir):
            p = self.shell(["git", "-C", str(at), "-c", "user.name=x", "-c", "user.email=x@example.org", *line])
            self.assertEqual(p.returncode, 0, p.stdout)
            return p.stdout.strip()

        hooks = Path(self.path("hooks"))
        hooks.mkdir()
        (hooks / ".pre-commit-hooks.yaml").write_text((ROOT / ".pre-commit-hooks.yaml").read_text())
        git("init", "-q", at=hooks)
        git("add", ".", at=hooks)
        git("commit", "-qm", "hooks", at=hooks)
        config = read("docs/ci/pre-commit-config.yaml")
        config["repos"][0].update(repo=str(hooks), rev=git("rev-parse", "HEAD", at=hooks))
        for hook in config["repos"][0]["hooks"]:
            hook["language"] = "system"
        Path(self.path(".pre-commit-config.yaml")).write_text(yaml.safe_dump(config))
        Path(self.path(".gitignore")).write_text("bin\nhooks\ncache\n")
        git("init", "-q")
        git("add", ".")

        def pre_commit():
            p = self.shell([sys.executable, "-m", "pre_commit", "run", "--all-files"], {"PRE_COMMIT_HOME": self.path("cache")})
            return p.returncode, p.stdout

        status, output = pre_commit()
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r"checkpoints fit model\.json\.+Failed")
        self.assertRegex(output, r"the latest checkpoint fits model\.json\.+Passed")
        self.assertIn("error: model.norm.weight: missing", output)
        git("rm", "-qf", "bad.h5")
        status, output = pre_commit()
        self.assertEqual(status, 0, output)


if __name__ == "__main__":
    harness.main()
