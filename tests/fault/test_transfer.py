"""The KV link misbehaves on purpose ([test] kv_faults of prefill). After each fault: every request has ended in one way within its deadline, no answer of
status 200 is wrong, pages are free again in decode and prefill, the router is ready, and the same processes go on to answer."""
import json
import re
import signal
import threading
import time

import pytest

from cluster import SLOW, Cluster, chat

CHAT = "/v1/chat/completions"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
TRANSFER_S, LINK_S = 2, 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    c = Cluster(tmp_path_factory.mktemp("baton"),
                {"decode": [f"limits.transfer_ms={int(TRANSFER_S * SLOW * 1000)}ms"],
                 "prefill": [f"kvlink.timeout_ms={int(LINK_S * SLOW * 1000)}ms"]})
    c.plain = list(c.set["prefill"])
    try:
        c.start()
        yield c
    finally:
        c.stop()


class Watch:
    """A prefill that was started anew with these rules; requests to it, and what must hold after them."""

    def __init__(self, cluster, rules, seed=1):
        self.cluster = cluster
        cluster.signal("prefill", signal.SIGTERM)
        assert cluster.proc["prefill"].wait(20 * SLOW) == 0, cluster.log("prefill")[-2000:]
        cluster.wait_ready(False, 5)
        cluster.set["prefill"] = cluster.plain + [f"test.kv_faults={rules}", f"test.kv_seed={seed}"]
        cluster.restart("prefill")
        self.pids = {n: p.pid for n, p in cluster.proc.items()}
        self.pages = {n: cluster.free_at_rest(n) for n in ("decode", "prefill")}

    def ask(self, within):
        """(status, error code, seconds) of one request, which has ended in time and is right when its status is 200."""
        at = time.time()
        status, headers, text = self.cluster.post(CHAT, chat(QUESTION))
        took = time.time() - at
        assert took < within * SLOW, f"ended after {took:.1f} s"
        body = json.loads(text)
        if status == 200:
            choice = body["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
            return status, None, took
        assert status in (429, 503, 504), text
        assert status == 504 or headers["Retry-After"]
        return status, body["error"]["code"], took

    def over(self, answers=True):
        for name, pages in self.pages.items():
            self.cluster.wait_pages_back(name, pages)
            end = time.time() + 10 * SLOW
            while self.cluster.pages(name, "quarantined"):
                assert time.time() < end, f"{name}: the quarantine does not empty although the link is quiet"
                time.sleep(0.05)
        self.cluster.wait_ready()
        if answers:
            assert self.ask(5)[0] == 200
        assert {n: p.pid for n, p in self.cluster.proc.items()} == self.pids
        assert all(p.poll() is None for p in self.cluster.proc.values())


def grows(cluster, name, series, act):
    """(result of act(), by how much the series grew)."""
    before = cluster.metric(name, series)
    result = act()
    return result, cluster.metric(name, series) - before


def test_dropped_notice_is_retried(cluster):
    w = Watch(cluster, "drop-notice=1")
    status, _, took = w.ask(TRANSFER_S + 2)
    assert status == 200 and took >= TRANSFER_S * SLOW, "only the transfer's deadline can tell"
    w.over()


def test_two_dropped_notices_are_an_error(cluster):
    w = Watch(cluster, "drop-notice=2")
    status, code, _ = w.ask(2 * TRANSFER_S + 2)
    assert (status, code) == (503, "transfer_failed")
    w.over()


def test_duplicate_notice_is_counted(cluster):
    w = Watch(cluster, "duplicate-notice=1")
    (status, _, _), late = grows(cluster, "decode", "baton_late_notices_total", lambda: w.ask(2))
    assert status == 200 and late == 1
    w.over()


def test_delayed_notice_is_waited_for(cluster):
    w = Watch(cluster, "delay-notice=500")
    (status, _, took), bad = grows(cluster, "decode", "baton_failed_total", lambda: w.ask(3))
    assert status == 200 and took >= 0.5 and bad == 0
    w.over()


def test_notice_after_the_deadline_is_not_taken(cluster):
    w = Watch(cluster, f"delay-notice={int((TRANSFER_S + 1) * SLOW * 1000)}")
    (status, code, _), tokens = grows(cluster, "decode", "baton_tokens_total", lambda: w.ask(2 * TRANSFER_S + 2))
    assert (status, code) == (503, "transfer_failed") and tokens == 0
    w.over(answers=False)


def test_corrupt_page_is_noticed_and_retried(cluster):
    w = Watch(cluster, "corrupt-page=2")
    (status, _, _), bad = grows(cluster, "decode", "baton_bad_transfers_total", lambda: w.ask(3))
    assert status == 200 and bad == 1
    w.over()


def test_pages_always_corrupt_are_an_error(cluster):
    w = Watch(cluster, "corrupt-page%100")
    (status, code, _), bad = grows(cluster, "decode", "baton_bad_transfers_total", lambda: w.ask(3))
    assert (status, code) == (503, "transfer_failed") and bad == 2
    w.over(answers=False)


@pytest.mark.parametrize("rule", ["fail-after=2", "reset=2"])
def test_broken_connection_is_retried_on_a_new_one(cluster, rule):
    w = Watch(cluster, rule)
    (status, _, _), failed = grows(cluster, "prefill", "baton_failed_total", lambda: w.ask(3))
    assert status == 200 and failed == 1
    w.over()


def test_puts_that_always_fail_are_an_error(cluster):
    w = Watch(cluster, "fail-after%100")
    status, code, _ = w.ask(3)
    assert (status, code) == (503, "transfer_failed")
    w.over(answers=False)


def test_silent_connection_is_given_up(cluster):
    w = Watch(cluster, "silence=1")
    status, _, took = w.ask(TRANSFER_S + 3)
    assert status == 200 and took >= LINK_S * SLOW, "only the link's deadline can tell"
    w.over()


@pytest.mark.parametrize("seed", [1, 2])
def test_all_of_it_under_load(cluster, seed):
    w = Watch(cluster, "drop-notice%10,duplicate-notice%20,delay-notice=100%20,corrupt-page%1,fail-after%1,reset%1,silence%10", seed)
    got = []

    def client():
        for _ in range(4):
            got.append(w.ask(60))

    threads = [threading.Thread(target=client) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 24, "a request ended with a wrong text, late, or not at all"
    assert any(status == 200 for status, _, _ in got)
    assert {code for status, code, _ in got if status != 200} <= {"transfer_failed"}
    w.over(answers=False)


def test_unknown_rule_is_refused(cluster):
    cluster.signal("prefill", signal.SIGTERM)
    assert cluster.proc["prefill"].wait(20 * SLOW) == 0
    cluster.set["prefill"] = cluster.plain + ["test.kv_faults=drop-notice=1,lose-page=3"]
    cluster.spawn("prefill")
    assert cluster.proc["prefill"].wait(30 * SLOW) == 1
    assert re.search(r'there is no fault rule "lose-page"', cluster.log("prefill"))
    cluster.set["prefill"] = cluster.plain
    cluster.restart("prefill")
    status, _, text = cluster.post(CHAT, chat(QUESTION))
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == ANSWER
