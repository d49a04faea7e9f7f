"""An expertd without the rest of Baton, and the program that calls it without a pause."""
import os
import subprocess
import time
import urllib.request

from cluster import BUILD, ROOT, SLOW, WRAP

EXPERTD = os.path.join(BUILD, "expertd/baton-expertd")
LOAD = os.path.join(BUILD, "tests/expert_load")
BATON = os.path.join(BUILD, "deploy/baton/baton")
DENY = os.path.join(BUILD, "tests/deny")
CHECKPOINT = ("model.dir=tests/models/tiny-glm52/fp8", "engine.threads=1")


def command(endpoint, admin, options):
    args = WRAP + [EXPERTD]
    for o in (f"service.endpoint={endpoint}", f"admin.port={admin}", *options):
        args += ["--set", o]
    return args


def start(folder, endpoint, admin, *options, limits=None, deny=None, env=None):
    """Runs once it listens. deny: names of system calls that fail."""
    args = ([DENY, deny] if deny else []) + command(endpoint, admin, options or CHECKPOINT)
    log = open(os.path.join(folder, "expertd.log"), "ab")
    before = log.tell()
    p = subprocess.Popen(args, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=limits,
                         env={**os.environ, **(env or {})})
    log.close()
    end = time.time() + 20 * SLOW
    while "listens on" not in said(folder, before):
        assert time.time() < end and p.poll() is None, said(folder, before)
        time.sleep(0.005)
    return p


def refused(*options, limits=None, deny=None, env=None):
    """What an expertd says that is expected not to start."""
    args = ([DENY, deny] if deny else []) + command("tcp://127.0.0.1:*", 0, options)
    r = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOW, preexec_fn=limits, env={**os.environ, **(env or {})})
    assert r.returncode == 1, r.stderr
    return r.stderr


def said(folder, since=0):
    with open(os.path.join(folder, "expertd.log"), errors="replace") as f:
        f.seek(since)
        return f.read()


def metric(admin, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5 * SLOW) as r:
        return next(float(x.split()[-1]) for x in r.read().decode().splitlines() if x.startswith(name + " "))


def load(endpoint, transport="auto", calls=0, again=False, deny=None):
    args = ([DENY, deny] if deny else []) + WRAP + [LOAD, endpoint, transport, "2", "16", str(calls)] + (["again"] if again else [])
    return subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def under_way(p):
    """The path of its calls, once one of each size is answered."""
    line = p.stdout.readline().strip()
    assert line in ("shm", "zmq: as configured"), line
    return line


def outcome(p, seconds=10):
    text = p.communicate(timeout=seconds * SLOW)[0]
    return p.returncode, text
