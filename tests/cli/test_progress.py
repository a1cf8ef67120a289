"""Progress: one line that fits the window and disappears at the end, few lines in a log, JSON lines, colours, the clock.

Nothing here depends on the speed of the machine. A job that must last gets a sparse file of any size and is stopped when it
has shown enough.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import termios
import time
import unicodedata

import harness

PHASES = ["opening", "planning", "copying", "checking", "syncing"]
SECONDS = 120  # only a hang takes this long


def write_safetensors(path, name, data_bytes):
    """Writes a file with one float32 tensor whose data is a hole."""
    header = json.dumps({name: {"dtype": "F32", "shape": [data_bytes // 4], "data_offsets": [0, data_bytes]}}).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(f.tell() + data_bytes)


def write_many(directory, count):
    os.mkdir(directory)
    for i in range(count):
        write_safetensors(os.path.join(directory, f"model-{i + 1:05}-of-{count:05}.safetensors"), f"w{i}", 64)


def width_of(text):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class Terminal:
    """A process on a terminal of its own, and the lines on its screen. The last line may be rewritten."""

    def __init__(self, args, cwd, columns, env=None):
        self.columns = columns
        self.lines, self.column = [""], 0
        self.raw = ""        # all output
        self.drawn = []      # (columns of the window, text of the line) each time a line was rewritten
        self.pending = b""
        pid, self.fd = pty.fork()
        if pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
                os.chdir(cwd)
                full = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color", **(env or {})}
                for name in ("NO_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
                    if name not in (env or {}):
                        full.pop(name, None)
                os.execve(harness.BINARY, [harness.BINARY, *args], full)
            finally:
                os._exit(127)
        self.pid = pid

    def resize(self, columns):
        """Changes the width. Lines may still have the old width until the first one with the new width."""
        self.columns = columns
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, data):
        os.write(self.fd, data)

    def _put(self, text):
        for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\x1b|\r\n|.", text, re.DOTALL):
            line = self.lines[-1]
            if token == "\r":
                if line.strip():
                    self.drawn.append((self.columns, line))
                self.column = 0
            elif token in ("\n", "\r\n"):
                self.lines.append("")
                self.column = 0
            elif token == "\x1b[K":
                self.lines[-1] = line[:self.column]
            elif not token.startswith("\x1b"):
                self.lines[-1] = line[:self.column].ljust(self.column) + token + line[self.column + 1:]
                self.column += 1

    def read(self):
        """Reads more output. Returns False at the end."""
        ready, _, _ = select.select([self.fd], [], [], SECONDS)
        assert ready, "silence"
        try:
            new = os.read(self.fd, 65536)
        except OSError:  # Linux reports the end of a terminal as EIO
            new = b""
        data = self.pending + new
        cut = len(data)
        while cut and data[cut - 1] & 0xc0 == 0x80:
            cut -= 1
        cut -= bool(cut and data[cut - 1] >= 0xc0)
        try:
            text, self.pending = data.decode(), b""
        except UnicodeDecodeError:
            text, self.pending = data[:cut].decode(), data[cut:]
        # An incomplete escape sequence waits for the rest.
        tail = re.search(r"(\x1b(\[[0-9;]*)?|\r)$", text) if new else None
        if tail:
            self.pending = text[tail.start():].encode() + self.pending
            text = text[:tail.start()]
        self.raw += text
        self._put(text)
        return bool(new)

    def until(self, condition):
        end = time.monotonic() + SECONDS
        while not condition(self):
            assert time.monotonic() < end, (self.raw[-500:], "too late")
            assert self.read(), (self.raw[-500:], "ended")

    def finish(self):
        """Waits for the end. Returns the exit status."""
        while self.read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)

    def screen(self):
        return [line.rstrip() for line in self.lines if line.strip()]


class Screen(harness.Case):
    def on_terminal(self, *args, columns=80, env=None):
        return Terminal(args, self.dir, columns, env)

    def test_phases_come_in_order_and_the_line_disappears(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        t = self.on_terminal("reshard", "ckpt", "-o", "out", "--dp", "3", "--progress", "always")
        self.assertEqual(t.finish(), 0)
        seen = [line.split()[0] for _, line in t.drawn]
        self.assertEqual([p for i, p in enumerate(seen) if i == 0 or seen[i - 1] != p], PHASES)
        self.assertEqual(len(t.screen()), 1, t.screen())
        self.assertTrue(t.screen()[0].startswith("out: "), t.screen())
        for columns, line in t.drawn:
            self.assertLess(width_of(line), columns)

    def test_the_line_fits_when_the_window_changes(self):
        write_safetensors(self.path("big.safetensors"), "w", 1 << 42)  # lasts until it is interrupted
        for env in ({}, {"LC_ALL": "C"}):
            with self.subTest(env=env):
                t = self.on_terminal("verify", "big.safetensors", columns=120, env=env)
                t.until(lambda t: t.drawn and width_of(t.drawn[-1][1]) > 90)
                for columns in (60, 40, 20, 7, 100):
                    before = len(t.drawn)
                    t.resize(columns)
                    t.until(lambda t: any(columns * 3 // 10 < width_of(line) < columns for _, line in t.drawn[before:]))
                    settled = len(t.drawn)
                    t.until(lambda t: len(t.drawn) > settled + 3)
                    for _, line in t.drawn[settled:]:
                        self.assertLess(width_of(line), columns, line)
                        self.assertTrue(line.startswith("verifying"[:columns - 1]), line)
                t.type(b"\x03")  # Ctrl-C
                self.assertEqual(t.finish(), 130)
                self.assertEqual([line.replace("^C", "") for line in t.screen()], ["fsdpckpt: interrupted"])

    def test_interrupt_while_opening(self):
        write_many(self.path("many"), 10000)
        before = self.listing()
        for command in (("consolidate", "many", "-o", "m.h5"), ("check", "many"), ("inspect", "many")):
            with self.subTest(command=command[0]):
                t = self.on_terminal(*command, "--progress", "always")
                t.until(lambda t: "opening" in t.raw)
                t.type(b"\x03")
                self.assertEqual(t.finish(), 130)
                self.assertEqual([line.replace("^C", "") for line in t.screen()], ["fsdpckpt: interrupted"])
                self.assertEqual(self.listing(), before)

    def test_other_messages_get_lines_of_their_own(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        t = self.on_terminal("consolidate", "ckpt", "-o", "m.h5", "-v", "--progress", "always", columns=200)
        self.assertEqual(t.finish(), 0)
        lines = t.screen()
        self.assertGreaterEqual(len(lines), 2)
        for line in lines:
            self.assertTrue(line.startswith(("fsdpckpt: ", "m.h5: ")), lines)

    def test_output_clears_the_line(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        t = self.on_terminal("inspect", "ckpt", "--progress", "always")
        self.assertEqual(t.finish(), 0)
        self.assertIn("opening", t.raw)
        first = t.screen()[0]
        self.assertFalse(first.startswith("opening"), first)
        self.assertNotIn("opening 0:", t.raw[t.raw.index(first):])

    def test_a_dumb_terminal_gets_plain_lines(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        t = self.on_terminal("consolidate", "ckpt", "-o", "m.h5", "--progress", "always", env={"TERM": "dumb"})
        self.assertEqual(t.finish(), 0)
        self.assertNotIn("\x1b", t.raw)
        self.assertIn("fsdpckpt: copying ", t.raw)

    def test_colors_follow_the_options(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        for env, options, colored in (({}, (), True), ({"NO_COLOR": "1"}, (), False), ({"NO_COLOR": ""}, (), True),
                                      ({}, ("--color", "never"), False), ({"TERM": "dumb"}, (), False),
                                      ({"NO_COLOR": "1"}, ("--color", "always"), True)):
            with self.subTest(env=env, options=options):
                t = self.on_terminal("consolidate", "ckpt", "-o", "m.h5", "-f", "--progress", "always", *options, env=env)
                self.assertEqual(t.finish(), 0)
                self.assertEqual("\x1b[1m" in t.raw, colored)


class Log(harness.Case):
    def test_a_short_job_logs_nothing(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        began = time.monotonic()
        p = self.run_tool("reshard", "ckpt", "-o", "out", "--dp", "3", "--progress", "auto")
        self.assertEqual(p.returncode, 0, p.stderr)
        if time.monotonic() - began < 1:
            self.assertEqual(p.stderr, "")

    def test_a_log_gets_a_line_per_phase(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        p = self.run_tool("reshard", "ckpt", "-o", "out", "--dp", "3", "--progress", "always")
        self.assertEqual(p.returncode, 0, p.stderr)
        lines = p.stderr.splitlines()
        self.assertNotIn("\r", p.stderr)
        self.assertNotIn("\x1b", p.stderr)
        # One line for each phase; on a slow machine, another every two seconds.
        self.assertEqual([w for i, w in enumerate(line.split()[1] for line in lines)
                          if i == 0 or lines[i - 1].split()[1] != w], PHASES)
        self.assertIn("fsdpckpt: syncing 4 files", lines)

    def test_quiet_logs_nothing(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        self.assertEqual(self.ok("consolidate", "ckpt", "-o", "m.h5", "-q", "--progress", "always"), "")

    def test_json_lines(self):
        write_many(self.path("many"), 20)
        p = self.run_tool("reshard", "many", "-o", "out", "--dp", "2", "-q", "--progress", "json")
        self.assertEqual(p.returncode, 0, p.stderr)
        items = [json.loads(line) for line in p.stderr.splitlines()]
        for item in items:
            self.assertEqual(list(item.items())[:2], [("fsdpckpt", "progress"), ("schema", 1)])
            self.assertIn(item["unit"], ("bytes", "files", "tensors"))
            self.assertGreaterEqual(item["done"], 0)
        phases = [item["phase"] for item in items]
        self.assertEqual([p for i, p in enumerate(phases) if i == 0 or phases[i - 1] != p], PHASES)
        self.assertEqual(sorted(i["seconds"] for i in items), [i["seconds"] for i in items])
        copying = next(i for i in items if i["phase"] == "copying")
        self.assertEqual((copying["unit"], copying["total"]), ("bytes", 20 * 64))
        self.assertEqual((items[-1]["unit"], items[-1]["done"], items[-1]["total"]), ("files", 3, 3))

    def test_json_of_other_commands(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        for args, last in ((("verify", "ckpt"), "verifying"), (("diff", "ckpt", "ckpt", "--data"), "comparing"),
                           (("check", "ckpt"), "checking"), (("inspect", "ckpt"), "opening"),
                           (("average", "ckpt", "ckpt", "-o", "a.h5", "--take-first"), "syncing")):
            with self.subTest(command=args[0]):
                p = self.run_tool(*args, "--progress", "json", "-q")
                self.assertEqual(p.returncode, 0, p.stderr)
                items = [json.loads(line) for line in p.stderr.splitlines()]
                self.assertEqual(items[0]["phase"], "opening")
                self.assertEqual(items[-1]["phase"], last)
                self.assertEqual(items[-1]["done"], items[-1]["total"] or items[-1]["done"])

    def test_seconds_include_the_whole_command(self):
        write_many(self.path("many"), 3000)
        start = time.monotonic()
        p = self.run_tool("consolidate", "many", "-o", "m.h5", "--json", "--progress", "json")
        wall = time.monotonic() - start
        self.assertEqual(p.returncode, 0, p.stderr)
        items = [json.loads(line) for line in p.stderr.splitlines()]
        seconds = json.loads(p.stdout)["seconds"]
        self.assertLessEqual(seconds, wall)
        rounded = 0.001  # progress is rounded to milliseconds
        self.assertGreaterEqual(seconds + rounded, next(i for i in items if i["phase"] == "syncing")["seconds"])
        self.assertGreater(next(i for i in items if i["phase"] == "planning")["seconds"], items[0]["seconds"])


class Color(harness.Case):
    def plain_env(self, **more):
        return {"NO_COLOR": "", "CLICOLOR_FORCE": "", "TERM": "xterm", **more}

    def test_pipes_and_files_get_no_colors(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        os.remove(harness.largest_shard(self.path("ckpt")))
        red = "\x1b[1;31m"
        for options, env, colored in (((), {}, False), (("--color", "always"), {}, True),
                                      ((), {"CLICOLOR_FORCE": "1"}, True), ((), {"CLICOLOR_FORCE": "0"}, False),
                                      ((), {"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False),
                                      (("--color", "never"), {"CLICOLOR_FORCE": "1"}, False)):
            with self.subTest(options=options, env=env):
                p = self.run_tool("check", "ckpt", *options, env=self.plain_env(**env))
                self.assertEqual(p.returncode, 1)
                self.assertEqual(f"{red}error:\x1b[0m " in p.stdout, colored, p.stdout)
                self.assertEqual("\x1b" in p.stdout, colored)
                p = self.run_tool("consolidate", "ckpt", "-o", "m.h5", *options, env=self.plain_env(**env))
                self.assertEqual(p.returncode, 3)
                self.assertEqual(p.stderr.startswith(f"{red}fsdpckpt:\x1b[0m "), colored, p.stderr)

    def test_json_gets_no_colors(self):
        self.copy("dcp-torch2.15.0-fsdp2")
        os.remove(harness.largest_shard(self.path("ckpt")))
        p = self.run_tool("check", "ckpt", "--json", "--color", "always", "--junit", "report.xml")
        json.loads(p.stdout)
        self.assertNotIn("\x1b", p.stdout)
        with open(self.path("report.xml")) as f:
            self.assertNotIn("\x1b", f.read())


if __name__ == "__main__":
    harness.main()
