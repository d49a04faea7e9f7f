"""An expertd for a long time: as fast and as large at the end as at the begin; callers that outlive many of it."""
import os
import signal
import time

from cluster import SLOW
from lone import load, metric, outcome, start, under_way

SECONDS = float(os.environ.get("BATON_TEST_SOAK_S", "6"))


class Look:
    """What of a process must not change while it serves."""

    def __init__(self, pid):
        self.fds = len(os.listdir(f"/proc/{pid}/fd"))
        self.affinity = sorted(str(os.sched_getaffinity(int(t))) for t in os.listdir(f"/proc/{pid}/task"))
        with open(f"/proc/{pid}/maps") as f:
            self.rings = sum("baton-ring" in line for line in f)
        with open(f"/proc/{pid}/numa_maps") as f:
            self.nodes = {}
            for part in f.read().split():
                if part[0] == "N" and part[1:2].isdigit() and "=" in part:
                    node, pages = part.split("=")
                    self.nodes[node] = self.nodes.get(node, 0) + int(pages)
        with open(f"/proc/{pid}/status") as f:
            self.mib = next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024


def batch(place):
    """Seconds of computation per call, of calls of both sizes on both ways."""
    folder, endpoint, admin, procs = place
    before = metric(admin, "baton_expert_compute_seconds_sum"), metric(admin, "baton_expert_compute_seconds_count")
    p = load(endpoint, "zmq" if batch.n % 4 == 0 else "shm", 200)
    batch.n += 1
    procs[1:] = [p]
    code, text = outcome(p, 60)
    assert code == 0, text
    return (metric(admin, "baton_expert_compute_seconds_sum") - before[0]) / (metric(admin, "baton_expert_compute_seconds_count") - before[1])


batch.n = 0


def settled(pid):
    """The rings of callers that have ended are let go of soon."""
    end = time.time() + 5 * SLOW
    while (look := Look(pid)).rings:
        assert time.time() < end
        time.sleep(0.05)
    return look


def test_no_slower_and_no_larger(place, files):
    folder, endpoint, admin, procs = place
    d = start(folder, endpoint, admin, *files)
    procs.append(d)
    end, took = time.time() + SECONDS, [batch(place) for _ in range(5)]
    first = settled(d.pid)
    while time.time() < end or len(took) < 15:
        took.append(batch(place))
    last = settled(d.pid)
    third = len(took) // 3
    assert min(took[-third:]) < 1.5 * min(took[:third]), took  # the best of each: others use this machine too
    assert (last.fds, last.affinity, set(last.nodes)) == (first.fds, first.affinity, set(first.nodes))
    if SLOW == 1:  # sanitizers keep what was freed
        assert last.mib < first.mib + 4


def test_callers_outlive_many_daemons(place, files):
    """Each call is answered in the end, and with the same bits by every one of them."""
    folder, endpoint, admin, procs = place
    loads = []
    for i in range(10):
        d = start(folder, endpoint, admin, *files)
        procs.append(d)
        if not loads:
            loads = [load(endpoint, t, 0, again=True) for t in ("shm", "zmq")]
            procs += loads
            for p in loads:
                under_way(p)
        end = time.time() + 20 * SLOW
        while any(metric(admin, f'baton_expert_path_calls_total{{path="{w}"}}') < 20 for w in ("shm", "zmq")):
            assert time.time() < end and all(p.poll() is None for p in loads)
            time.sleep(0.01)
        d.send_signal((signal.SIGKILL, signal.SIGTERM)[i % 2])
        d.wait(20 * SLOW)
    assert all(p.poll() is None for p in loads)  # no wrong answer ended them
