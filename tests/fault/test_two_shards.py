"""Two expertd of one deployment that fail in different ways at the same time."""
import signal
import time

import pytest

from cluster import SLOW, Cluster
from test_death import answer, long_running, settle, ANSWER

TIMEOUT_S = 10


@pytest.fixture
def patient(tmp_path):
    """Services that wait long for experts, so that an early error is not their deadline."""
    wait = [f"experts.timeout_ms={TIMEOUT_S}s"]
    c = Cluster(tmp_path, {"prefill": wait, "decode": wait})
    try:
        c.start()
        yield c
    finally:
        c.stop()


def test_a_death_shows_while_another_shard_is_late(patient):
    running = long_running(patient, 2)
    for name in ("expertd-0", "expertd-1"):
        patient.signal(name, signal.SIGSTOP)
    time.sleep(0.3 * SLOW)  # a step waits for both by now
    at = time.time()
    patient.kill("expertd-1")
    settle(patient, running, at, TIMEOUT_S / 2)
    assert all(r.status != 200 or "error" in r.text for r in running)
    patient.signal("expertd-0", signal.SIGCONT)
    patient.restart("expertd-1")
    assert answer(patient) == ANSWER
