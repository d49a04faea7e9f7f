"""Daemons that are killed, stopped or restarted under load. After each: every request ended in one way within its deadline, no answer of status 200 is
wrong, pages are back or in quarantine, and service returns without touching the survivors."""
import json
import signal
import threading
import time

import pytest

from cluster import SLOW, chat, events

CHAT = "/v1/chat/completions"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


class Request(threading.Thread):
    """A request whose outcome is kept: text, or the error, and when it ended."""

    def __init__(self, cluster, body):
        super().__init__(daemon=True)
        self.cluster, self.body, self.status, self.text, self.end = cluster, body, None, "", None
        self.start()

    def run(self):
        try:
            self.status, _, self.text = self.cluster.post(CHAT, self.body)
        except Exception as e:  # a stream that breaks off is an honest failure
            self.status, self.text = "broken", repr(e)
        self.end = time.time()

    def honest(self):
        """Right, or an error; never a wrong text with status 200."""
        if self.status != 200:
            return True
        if not self.body.get("stream"):
            c = json.loads(self.text)["choices"][0]
            return c["finish_reason"] in ("stop", "length")
        data = events(self.text)
        return bool(data) and (data[-1] == "[DONE]" or "error" in json.loads(data[-1]))


def answer(cluster):
    status, _, text = cluster.post(CHAT, chat(QUESTION))
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]["content"]


def long_running(cluster, n=4):
    """Streams that go on for a while: stop tokens are held back for 3000 tokens."""
    r = [Request(cluster, chat("Count from one to a thousand.", stream=True, max_tokens=3000, min_tokens=3000)) for _ in range(n)]
    end = time.time() + 20 * SLOW
    while cluster.metric("decode", "baton_running_requests") < n:
        assert time.time() < end
        time.sleep(0.02)
    return r


def settle(cluster, requests, since, within):
    for r in requests:
        r.join(60 * SLOW)
        assert not r.is_alive(), "a request did not end"
        assert r.end - since < within * SLOW, f"ended {r.end - since:.1f} s after the fault"
        assert r.honest(), r.text[-500:]


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_kill_and_restart(cluster, victim):
    others = [n for n in cluster.proc if n != victim]
    pids = {n: cluster.proc[n].pid for n in others}
    pages = cluster.free_at_rest("decode") if victim == "prefill" else None
    running = long_running(cluster) if victim == "decode" else []
    mixed = [Request(cluster, chat("word " * 3000)) for _ in range(3)]
    time.sleep(0.3)
    at = time.time()
    cluster.kill(victim)
    settle(cluster, running + mixed, at, 2.5)
    if victim == "decode":
        assert all(r.status != 200 or "error" in r.text for r in running)
    cluster.wait_ready(False, 3)
    status, headers, text = cluster.post(CHAT, chat(QUESTION))
    assert status in (429, 502, 503) and headers["Retry-After"] and "error" in json.loads(text)
    cluster.restart(victim)
    assert answer(cluster) == ANSWER
    assert {n: cluster.proc[n].pid for n in others} == pids
    if pages is not None:
        cluster.wait_pages_back("decode", pages)


def test_expertd_killed_under_load(cluster):
    pages = cluster.free_at_rest("decode")
    running = long_running(cluster)
    at = time.time()
    cluster.kill("expertd-1")
    settle(cluster, running, at, 5)
    assert all(r.status != 200 or "error" in r.text for r in running)
    cluster.wait_ready(False, 5)
    cluster.restart("expertd-1")
    assert answer(cluster) == ANSWER
    cluster.wait_pages_back("decode", pages)


def test_stopped_decode_is_silent_then_back(cluster):
    running = long_running(cluster, 2)
    at = time.time()
    cluster.signal("decode", signal.SIGSTOP)
    settle(cluster, running, at, 4)
    cluster.wait_ready(False, 5)
    cluster.signal("decode", signal.SIGCONT)
    cluster.wait_ready()
    assert answer(cluster) == ANSWER


def test_stopped_prefill_is_silent_then_back(cluster):
    pages = cluster.free_at_rest("decode")
    waiting = [Request(cluster, chat("word " * 3000)) for _ in range(2)]
    time.sleep(0.2)
    at = time.time()
    cluster.signal("prefill", signal.SIGSTOP)
    settle(cluster, waiting, at, 5)
    cluster.signal("prefill", signal.SIGCONT)
    cluster.wait_ready()
    assert answer(cluster) == ANSWER
    cluster.wait_pages_back("decode", pages)
    end = time.time() + 20 * SLOW
    while cluster.pages("decode", "quarantined"):
        assert time.time() < end, "the quarantine did not empty although prefill is back"
        time.sleep(0.1)


def test_router_killed_cancels_its_requests(cluster):
    pages = cluster.free_at_rest("decode")
    running = long_running(cluster)
    cluster.kill("router")
    for r in running:
        r.join(10 * SLOW)
        assert not r.is_alive() and r.honest()
    cluster.restart("router")
    assert answer(cluster) == ANSWER
    cluster.wait_pages_back("decode", pages)


def test_client_gone_frees_pages(cluster):
    import http.client
    pages = cluster.free_at_rest("decode")
    for stream in (True, False):
        conns = []
        for _ in range(3):
            c = http.client.HTTPConnection("127.0.0.1", cluster.http, timeout=30)
            c.request("POST", CHAT, json.dumps(chat("Count.", stream=stream, max_tokens=3000, min_tokens=3000)), {"Content-Type": "application/json"})
            conns.append(c)
        end = time.time() + 20 * SLOW
        while cluster.metric("decode", "baton_running_requests") < 3:
            assert time.time() < end
            time.sleep(0.02)
        at = time.time()
        for c in conns:
            c.sock.close() if c.sock else c.close()
            c.close()
        cluster.wait_pages_back("decode", pages, 3)
        assert time.time() - at < 2 * SLOW


def test_golden_text_after_all_of_it(cluster):
    assert [answer(cluster) for _ in range(5)] == [ANSWER] * 5
