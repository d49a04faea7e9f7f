"""An expertd on machines and in containers that lack something: other topologies, fewer processors, system calls that are refused. It starts and says
what it was not given, or it says by name why it does not start."""
import os
import re
import time

import pytest

from lone import load, outcome, refused, said, start, under_way

EIGHT = {"HWLOC_SYNTHETIC": "package:8 [numa(memory=4GB)] core:3 pu:2"}  # hwloc then knows this machine, and binds nothing


def digest(place, *options, **more):
    """Of the answers of an expertd that starts so; and its log."""
    folder, endpoint, admin, procs = place
    before = len(said(folder)) if os.path.exists(os.path.join(folder, "expertd.log")) else 0
    d = start(folder, endpoint, admin, *options, **more)
    p = load(endpoint, "shm", 20)
    procs += [d, p]
    under_way(p)
    bits = p.stdout.readline().strip()
    assert outcome(p, 30)[0] == 0
    d.terminate()
    assert d.wait(30) == 0
    return bits, said(folder, before)


def threads(log):
    return int(re.search(r"(\d+) threads, loaded", log).group(1))


def test_each_node_of_eight(place, files):
    """Threads are the physical cores of the node; memory that is not there is not claimed; any number of threads gives the same bits."""
    want, log = digest(place, *files, "engine.node=5", env=EIGHT)
    assert threads(log) == 3
    assert "memory is not bound to node 5" in log and "0.00 GiB on node 5" in log
    for n in (1, 2):
        bits, log = digest(place, *files, "engine.node=7", f"engine.threads={n}", env=EIGHT)
        assert threads(log) == n and bits == want
    assert "require_node is set" in refused(*files, "engine.node=5", "experts.require_node=yes", env=EIGHT)
    assert "there is no NUMA node 8: this machine has 0-7" in refused(*files, "engine.node=8", env=EIGHT)
    assert "may use 3 physical cores" in refused(*files, "engine.node=0", "engine.threads=4", env=EIGHT)


def test_one_processor_of_several(place, files):
    want, log = digest(place, *files)
    one = {min(os.sched_getaffinity(0))}
    bits, log = digest(place, *files, limits=lambda: os.sched_setaffinity(0, one))
    assert threads(log) == 1 and bits == want
    assert "may use 1 physical cores" in refused(*files, "engine.threads=2", limits=lambda: os.sched_setaffinity(0, one))
    bits, log = digest(place, *files, "engine.threads=2", "engine.oversubscribe=yes", limits=lambda: os.sched_setaffinity(0, one))
    assert "they are not pinned" in log and bits == want


def test_processors_are_taken_away_while_it_runs(place, files):
    folder, endpoint, admin, procs = place
    d = start(folder, endpoint, admin, *files)
    loads = [load(endpoint, t, 600) for t in ("shm", "zmq")]
    procs += [d, *loads]
    for p in loads:
        under_way(p)
    for cpu in sorted(os.sched_getaffinity(0)) * 3:
        for thread in os.listdir(f"/proc/{d.pid}/task"):
            os.sched_setaffinity(int(thread), {cpu})
        time.sleep(0.02)
    for p in loads:
        code, text = outcome(p, 60)
        assert code == 0, text


@pytest.mark.parametrize("deny", ["mbind,set_mempolicy", "mbind,set_mempolicy,move_pages"])
def test_memory_that_may_not_be_bound(place, files, deny):
    tells = "move_pages" not in deny
    bits, log = digest(place, *files, "engine.node=0", deny=deny)
    assert "memory is not bound to node 0: Operation not permitted" in log
    assert ("GiB on node 0, not bound" if tells else "on nodes that the system does not tell, not bound") in log
    if not tells:
        text = refused(*files, "engine.node=0", "experts.require_node=yes", deny=deny)
        assert "the system does not tell, and [experts] require_node is set" in text


def test_threads_that_may_not_be_pinned(files):
    assert "Operation not permitted" in refused(*files, "engine.node=0", deny="sched_setaffinity")
    assert "cannot pin a thread to processor" in refused(*files, deny="sched_setaffinity")


def test_no_shared_memory(place, files):
    """A daemon that cannot have it says so; a caller that cannot goes another way, unless told not to."""
    assert "cannot offer shared memory" in refused(*files, deny="memfd_create")
    folder, endpoint, admin, procs = place
    want, _ = digest(place, *files)
    procs.append(start(folder, endpoint, admin, *files))
    p = load(endpoint, "auto", 20, deny="memfd_create")
    procs.append(p)
    assert re.match("zmq: no shared memory of [0-9]+ bytes: Operation not permitted", p.stdout.readline())
    assert p.stdout.readline().strip() == want and outcome(p, 30)[0] == 0
    p = load(endpoint, "shm", 20, deny="memfd_create")
    procs.append(p)
    code, text = outcome(p, 30)
    assert code != 0 and "no shared memory of" in text
