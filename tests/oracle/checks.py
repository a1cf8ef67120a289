"""Functions that tests share. check, run and refused count a failure and continue, and finish reports the count; must and
must_run end the case with an exception, which run_main reports."""
import os
import re
import subprocess
import sys

failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print("FAILED: %s" % what)


def run(*argv, ok=0):
    argv = list(map(str, argv))
    r = subprocess.run(argv, capture_output=True, text=True)
    check(r.returncode == ok, "%s: exit %d: %s" % (" ".join(argv[1:]), r.returncode, r.stderr.strip()))
    return r


def refused(program, source, what, *words, status=3):
    """Expects one line on stderr with these words, and no target."""
    out = source + ".h5"
    r = subprocess.run([program, "consolidate", source, "-o", out, "-q"], capture_output=True, text=True)
    check(r.returncode == status and all(w in r.stderr for w in words) and r.stderr.count("\n") == 1,
          "%s: exit %d: %s" % (what, r.returncode, r.stderr.strip()))
    check(not os.path.exists(out), what + ": something was written")


def leave():
    """Ends a rank without Python's finalization, in which a thread of torch that waits for the GIL can abort the process
    ("terminate called without an active exception", now and then with torch 2.15)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Failure(Exception):
    """Ends a case."""


def must(good, *text):
    if not good:
        raise Failure(" ".join(map(str, text)))


def must_run(*argv, ok=(0,)):
    argv = list(map(str, argv))
    r = subprocess.run(argv, capture_output=True, text=True)
    must(r.returncode in ok, "%s: exit %d: %s" % (" ".join(argv), r.returncode, r.stderr.strip()))
    return r


def record_damage_is_found(program, checkpoint, file):
    """verify notices damage in a record of a DCP file that holds no tensor."""
    path = os.path.join(checkpoint, file)
    with open(path, "r+b") as f:
        at = re.search(rb"serialization_id.*?([0-9]{30})", f.read(), re.S).start(1)
        f.seek(at)
        was = f.read(1)
        f.seek(at)
        f.write(b"x")
    r = must_run(program, "verify", checkpoint, ok=(1,))
    must(file in r.stdout and "serialization_id" in r.stdout, r)
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(was)


def run_main(main):
    """Ends the program with the status that `main` returns, or with 1 and the message of the case that failed."""
    try:
        sys.exit(main())
    except Failure as e:
        print("FAILED: %s" % e)
        sys.exit(1)


def finish(name):
    """Prints the number of failures and returns the exit status."""
    print("%s: %d failed" % (name, len(failures)))
    return 1 if failures else 0
