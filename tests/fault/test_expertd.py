"""An expertd alone, under calls that never pause: it ends cleanly and soon, is stopped, dies and returns; callers get right answers or an error in
time, over shared memory and over messages."""
import os
import resource
import signal
import subprocess
import time

import pytest

from cluster import ROOT, SLOW, WRAP
from lone import CHECKPOINT, EXPERTD, load, metric, outcome, said, start, under_way

ENDS = 200 if SLOW == 1 else 20


def test_ends_soon_under_load(place, files):
    folder, endpoint, admin, procs = place
    slowest = 0
    for i in range(ENDS):
        d = start(folder, endpoint, admin, *(files if i % 8 > 3 else ()))
        loads = [load(endpoint, t) for t in (("shm",), ("zmq",), ("shm",) * 4, ("shm", "zmq"))[i % 4]]
        procs[:] = [d, *loads]
        for p in loads:
            under_way(p)
        time.sleep(0.002 * (i % 7))
        begin = time.time()
        d.send_signal(signal.SIGTERM)
        assert d.wait(5 * SLOW) == 0, said(folder)[-2000:]
        slowest = max(slowest, time.time() - begin)
        for p in loads:
            code, text = outcome(p)
            assert code == 3, text
    assert slowest < 1 * SLOW, f"{slowest:.2f} s"


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_small_and_large_calls_in_turn(place, transport):
    folder, endpoint, admin, procs = place
    procs.append(start(folder, endpoint, admin))
    loads = [load(endpoint, transport, 1000) for _ in range(2)]
    procs += loads
    for p in loads:
        code, text = outcome(p, 60)
        assert code == 0, text


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_small_calls_inside_of_large_ones(place, files, transport):
    """Each caller's answers stay the same bits, whatever another's call was computed in the middle of."""
    folder, endpoint, admin, procs = place
    procs.append(start(folder, endpoint, admin, *files))
    loads = [load(endpoint, transport, 1000) for _ in range(3)]
    procs += loads
    for p in loads:
        code, text = outcome(p, 60)
        assert code == 0, text
    assert metric(admin, "baton_expert_inside_total") > 20


def test_both_paths_give_the_same_bits(place):
    folder, endpoint, admin, procs = place
    procs.append(start(folder, endpoint, admin))
    first = {}
    for transport in ("shm", "zmq"):
        p = load(endpoint, transport, 20)
        procs.append(p)
        under_way(p)
        first[transport] = p.stdout.readline().strip()
        assert outcome(p, 30)[0] == 0
    assert len(first["shm"]) == 16 and first["shm"] == first["zmq"]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_kill_and_return(place, transport):
    folder, endpoint, admin, procs = place
    for _ in range(3):
        d, p = start(folder, endpoint, admin), load(endpoint, transport)
        procs += [d, p]
        under_way(p)
        d.kill()
        begin = time.time()
        code, text = outcome(p)
        assert code == 3, text
        assert time.time() - begin < 1.5 * SLOW
        d.wait()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_stopped_is_late_not_for_ever(place, transport):
    folder, endpoint, admin, procs = place
    d, p = start(folder, endpoint, admin), load(endpoint, transport)
    procs += [d, p]
    under_way(p)
    d.send_signal(signal.SIGSTOP)
    begin = time.time()
    code, text = outcome(p)
    assert code == 4 and "no answer in time" in text
    assert 2 < time.time() - begin < 5 * SLOW
    d.send_signal(signal.SIGCONT)
    again = load(endpoint, transport, 100)
    procs.append(again)
    assert outcome(again, 30)[0] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_callers_that_die_leave_nothing(place, how):
    """Their rings are let go of; the others do not notice."""
    folder, endpoint, admin, procs = place
    d, steady = start(folder, endpoint, admin), load(endpoint, "shm", 2000)
    procs += [d, steady]
    under_way(steady)
    stopped = []
    for _ in range(10):
        p = load(endpoint, "shm")
        procs.append(p)
        under_way(p)
        p.send_signal(how)
        stopped.append(p)
    assert outcome(steady, 60)[0] == 0
    for p in stopped:
        p.kill()
        p.wait()
    end = time.time() + 5 * SLOW
    maps = True
    while maps:
        with open(f"/proc/{d.pid}/maps") as f:
            maps = [line for line in f if "baton-ring" in line]
        assert time.time() < end, maps
        time.sleep(0.05)


def test_little_lockable_memory(place):
    folder, endpoint, admin, procs = place
    procs.append(start(folder, endpoint, admin, limits=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))))
    p = load(endpoint, "shm", 100)
    procs.append(p)
    assert outcome(p, 30)[0] == 0


def test_shared_memory_not_offered(place):
    folder, endpoint, admin, procs = place
    procs.append(start(folder, endpoint, admin, *CHECKPOINT, "service.shm=no"))
    p = load(endpoint, "shm", 10)
    procs.append(p)
    code, text = outcome(p)
    assert code == 3 and "offers no shared memory" in text


def test_idle_costs_nothing(place):
    folder, endpoint, admin, procs = place
    d = start(folder, endpoint, admin)
    p = load(endpoint, "shm", 20)
    procs += [d, p]
    assert outcome(p, 30)[0] == 0
    time.sleep(0.5)

    def ticks():
        with open(f"/proc/{d.pid}/stat") as f:
            return sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13]))

    before = ticks()
    time.sleep(4)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") / 4 < 0.01 * SLOW


def test_stale_socket_of_a_dead_expertd(place):
    folder, _, admin, procs = place
    endpoint = f"ipc://{folder}/expertd"
    d = start(folder, endpoint, admin)
    procs.append(d)
    d.kill()
    d.wait()
    assert os.path.exists(f"{folder}/expertd")
    procs.append(start(folder, endpoint, admin))
    p = load(endpoint, "auto", 10)
    procs.append(p)
    assert outcome(p, 30)[0] == 0
    other = subprocess.run(WRAP + [EXPERTD, "--set", "model.dir=tests/models/tiny-glm52/fp8", "--set", f"service.endpoint={endpoint}", "--set", "admin.port=0"],
                           cwd=ROOT, capture_output=True, text=True, timeout=30 * SLOW)
    assert other.returncode == 1 and "in use" in other.stderr
