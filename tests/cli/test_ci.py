"""Runs the commands of the examples in docs/ci, taken from the files, on a checkpoint that fits and on one that does not."""

import json
import os
import re
import shlex
import subprocess
import xml.etree.ElementTree as xml

import harness

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "ci")
TRAIN = "dcp-torch2.15.0-train"


def read(name):
    with open(os.path.join(DOCS, name), encoding="utf-8") as f:
        return f.read()


def indent(line):
    return len(line) - len(line.lstrip())


def block(lines, start):
    """The lines after `start` that are indented more than it, without that indentation."""
    inside = []
    for line in lines[start + 1:]:
        if line.strip() and indent(line) <= indent(lines[start]):
            break
        inside.append(line)
    least = min(indent(line) for line in inside if line.strip())
    return [line[least:] for line in inside]


def workflow():
    """The environment and the steps (name, script) of the workflow. Python has no YAML parser, and this needs none."""
    lines = read("github-actions.yml").splitlines()
    env, steps, name = {}, [], None
    for i, line in enumerate(lines):
        if line.strip() == "env:":
            env = dict(entry.split(": ", 1) for entry in block(lines, i) if entry.strip())
        if line.strip().startswith("- "):
            name = None
        if line.strip().startswith("- name: "):
            name = line.split("- name: ")[1]
        if line.strip() == "run: |":
            steps.append((name, "\n".join(block(lines, i))))
    return env, steps


def hooks():
    """{id: (entry, files, whether file names are passed)} of the pre-commit hooks."""
    found = {}
    for part in re.split(r"^      - id: ", read("pre-commit-config.yaml"), flags=re.M)[1:]:
        entries = dict(re.findall(r"^        (\w+): (.*)$", part, flags=re.M))
        found[part.splitlines()[0]] = (entries["entry"], re.compile(entries["files"]),
                                       entries.get("pass_filenames") != "false")
    return found


class Examples(harness.Case):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("bin"))
        os.symlink(harness.BINARY, self.path("bin", "fsdpckpt"))
        os.mkdir(self.path("runs"))
        self.copy(TRAIN, "runs/latest")
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", "runs/latest"))

    def spoil(self):
        """Adds a layer to the schema, as if the model had changed."""
        with open(self.path("model.json")) as f:
            schema = json.load(f)
        schema["tensors"].append({"name": "model.layers.1.w1.weight", "dtype": "float32", "shape": [10, 6]})
        with open(self.path("model.json"), "w") as f:
            json.dump(schema, f, indent=2)

    def shell(self, argv, env=None):
        path = self.path("bin") + os.pathsep + os.environ["PATH"]
        return subprocess.run(argv, cwd=self.dir, env={**os.environ, **(env or {}), "PATH": path}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def steps(self):
        """{name: (exit status, output)} of the steps that run fsdpckpt, with `bash -e` as on GitHub."""
        env, steps = workflow()
        done = {}
        for name, script in steps:
            self.assertIn("fsdpckpt", script)
            if name != "Install fsdpckpt":
                p = self.shell(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], env)
                done[name] = (p.returncode, p.stdout)
        return done

    def run_hook(self, name, *changed):
        entry, files, pass_names = hooks()[name]
        names = [n for n in changed if files.search(n)]
        self.assertTrue(names, "the hook does not look at %s" % (changed,))
        return self.shell(shlex.split(entry) + (names if pass_names else []))

    def test_workflow_passes_for_a_good_checkpoint(self):
        done = self.steps()
        self.assertEqual(len(done), 3, done)
        for name, (status, output) in done.items():
            self.assertEqual(status, 0, (name, output))
            self.assertNotIn("::error", output)
        self.assertEqual(xml.parse(self.path("checkpoint.xml")).getroot().get("failures"), "0")
        self.assertTrue(os.path.exists(self.path("release.h5")))

    def test_workflow_fails_if_the_model_changed(self):
        self.spoil()
        done = self.steps()
        status, output = done.pop("The checkpoint fits the model")
        self.assertEqual(status, 1)
        self.assertIn("::error file=model.json,title=fsdpckpt check%3A missing::model.layers.1.w1.weight: missing: ", output)
        self.assertEqual(xml.parse(self.path("checkpoint.xml")).getroot().get("failures"), "1")
        self.assertEqual({status for status, _ in done.values()}, {0})

    def test_workflow_fails_if_the_release_differs(self):
        _, steps = workflow()
        name, script = steps[-1]
        self.assertIn("diff", script)
        p = self.shell(["bash", "-e", "-c", script.replace("--strip-prefix model. --force", "--dtype bf16 --strip-prefix model. --force")],
                       workflow()[0])
        self.assertEqual(p.returncode, 1, p.stdout)
        self.assertIn("dtype: float32", p.stdout)

    def test_hooks_report_a_schema_that_no_longer_fits(self):
        self.assertEqual(set(hooks()), {"checkpoints-fit", "schema-fits"})
        self.ok("consolidate", "runs/latest", "-o", "good.h5", "-q")
        self.ok("consolidate", "runs/latest", "-o", "bad.h5", "-q", "--exclude", "model.norm.*")
        p = self.run_hook("checkpoints-fit", "good.h5", "README.md")
        self.assertEqual(p.returncode, 0, p.stdout)
        p = self.run_hook("checkpoints-fit", "good.h5", "bad.h5")
        self.assertEqual(p.returncode, 1, p.stdout)
        self.assertIn("error: model.norm.weight: missing", p.stdout)
        self.assertEqual(self.run_hook("schema-fits", "model.json").returncode, 0)
        self.spoil()
        self.assertEqual(self.run_hook("schema-fits", "model.json").returncode, 1)


if __name__ == "__main__":
    harness.main()
