"""Runs the commands of README.md and docs/*.md as they are written, follows the links, and redraws the picture.

Before each ```sh block, a comment says how to run it. Each block runs in an empty directory.

    <!-- run with ckpt=good/dcp-torch2.15.0-train model.pt=pt/legacy.pt; needs jq; first COMMAND -->
    <!-- not run: needs a network -->

`run with` copies checkpoints of tests/corpus to the names that the block uses. `needs` lists programs; without them the block
is skipped. `first` is a command that prepares the directory. FSDPCKPT_DOCS_VERBOSE=1 prints the output of each block.

    <!-- rows: run with ...; first ... -->

before a table says the same of each row, whose commands are the code that begins with "fsdpckpt ".
"""

import glob
import importlib.util
import os
import re
import shutil
import subprocess

import harness

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
CORPUS = os.path.join(harness.CORPUS, "..")
PAGES = [os.path.join(ROOT, n) for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    glob.glob(os.path.join(ROOT, "docs", "*.md")))


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def blocks(text):
    """(line number, comment before it or "", script) of each block of shell commands."""
    for found in re.finditer(r"(?:^<!-- ((?:(?!-->).)*) -->\n)?^```sh\n(.*?)^```$", text, flags=re.M | re.S):
        yield text.count("\n", 0, found.start()) + 1, found.group(1) or "", found.group(2)


def rows(text):
    """The same of each row of a table of commands."""
    for found in re.finditer(r"^<!-- rows: (.*?) -->\n((?:\|.*\n)+)", text, flags=re.M):
        first = text.count("\n", 0, found.start(2)) + 1
        for number, row in enumerate(found.group(2).splitlines()[2:], first + 2):
            yield number, found.group(1), "\n".join(re.findall(r"`(fsdpckpt [^`]*)`", row))


def parse(comment):
    """{"run with": …, "needs": …, "first": …} or {"not run": why}."""
    if comment.startswith("not run: "):
        return {"not run": comment[len("not run: "):]}
    parts = {}
    for part in comment.split("; "):
        found = re.match(r"(run with|needs|first) (.+)$", part)
        if not found:
            return None
        parts[found.group(1)] = found.group(2)
    return parts


def without_code(text):
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


class Commands(harness.Case):
    def prepare(self, how):
        """Makes a directory with the checkpoints that the comment names, and puts the command in PATH."""
        shutil.rmtree(self.dir, True)
        os.makedirs(self.path("bin"))
        os.symlink(harness.BINARY, self.path("bin", "fsdpckpt"))
        os.mkdir(self.path("work"))
        for copy in how.get("run with", "").split():
            name, source = copy.split("=")
            source, target = os.path.join(CORPUS, source), self.path("work", name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copytree(source, target) if os.path.isdir(source) else shutil.copy(source, target)

    def shell(self, script):
        env = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": self.path("bin") + os.pathsep + os.environ["PATH"]}
        return subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=self.path("work"), env=env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_block(self, where, comment, script):
        """Runs one block. Returns False if it was skipped."""
        how = parse(comment)
        self.assertTrue(script, "%s: no command" % where)
        self.assertIsNotNone(how, "%s: no comment says how to run this block: %r" % (where, comment))
        if "not run" in how or not all(shutil.which(program) for program in how.get("needs", "").split()):
            return False
        self.prepare(how)
        if "first" in how:
            p = self.shell(how["first"])
            self.assertEqual(p.returncode, 0, "%s: %s\n%s" % (where, how["first"], p.stdout))
        p = self.shell(script)
        if os.environ.get("FSDPCKPT_DOCS_VERBOSE"):
            print("== %s\n%s%s" % (where, script, p.stdout))
        self.assertEqual(p.returncode, 0, "%s:\n%s\n%s" % (where, script, p.stdout))
        return True

    def test_commands_run_as_written(self):
        run = 0
        for page in PAGES:
            for line, comment, script in [*blocks(read(page)), *rows(read(page))]:
                where = "%s:%d" % (os.path.relpath(page, ROOT), line)
                with self.subTest(where):
                    run += self.run_block(where, comment, script)
        self.assertGreater(run, 10)

    def test_a_block_that_fails_is_noticed(self):
        with self.assertRaises(self.failureException):
            self.run_block("here", "run with ckpt=good/dcp-torch2.15.0-train", "fsdpckpt inspect nowhere | cat\n")
        with self.assertRaises(self.failureException):
            self.run_block("here", "", "true\n")


class Pages(harness.Case):
    def test_links_have_targets(self):
        for page in PAGES:
            for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                path = os.path.join(os.path.dirname(page), path) if path else page
                where = "%s: %s" % (os.path.relpath(page, ROOT), target)
                self.assertTrue(os.path.exists(path), where)
                if anchor:
                    headings = re.findall(r"^#+ (.*)$", read(path), flags=re.M)
                    self.assertIn(anchor, [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], where)

    def test_named_files_exist(self):
        top = "lib|formats|train|cli|python|tests|bench|scripts|cmake|examples|packaging"
        for page in PAGES + [os.path.join(ROOT, "SECURITY.md")]:
            for name in re.findall(rf"`((?:{top})/[\w./-]*)`", read(page)):
                self.assertTrue(os.path.exists(os.path.join(ROOT, name)), f"{page} names {name}")

    def test_every_page_is_in_the_index(self):
        index = read(os.path.join(ROOT, "docs", "README.md"))
        for page in glob.glob(os.path.join(ROOT, "docs", "*.md")):
            name = os.path.basename(page)
            if name != "README.md":
                self.assertIn("(%s)" % name, index)

    def test_picture_is_up_to_date(self):
        spec = importlib.util.spec_from_file_location("make_picture", os.path.join(ROOT, "docs", "make_picture.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.assertEqual(read(os.path.join(ROOT, "docs", "layouts.svg")), module.picture(harness.BINARY),
                         "run docs/make_picture.py and look at the picture")


if __name__ == "__main__":
    harness.main()
