"""What tests share that go on after a failure: counting failures, running the command, what it must refuse."""
import os
import subprocess

failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print("FAILED: %s" % what)


def run(*argv, ok=0):
    r = subprocess.run(argv, capture_output=True, text=True)
    check(r.returncode == ok, "%s: exit %d: %s" % (" ".join(argv[1:]), r.returncode, r.stderr.strip()))
    return r


def refused(program, source, what, *words, status=3):
    """One line that has the words, and no target."""
    out = source + ".h5"
    r = subprocess.run([program, "consolidate", source, "-o", out, "-q"], capture_output=True, text=True)
    check(r.returncode == status and all(w in r.stderr for w in words) and r.stderr.count("\n") == 1,
          "%s: exit %d: %s" % (what, r.returncode, r.stderr.strip()))
    check(not os.path.exists(out), what + ": something was written")


def finish(name):
    """The exit status."""
    print("%s: %d failed" % (name, len(failures)))
    return 1 if failures else 0
