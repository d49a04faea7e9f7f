"""What does not fit together is refused with its reason, at start or at the connection, and what fits goes on."""
import json
import os
import re
import shutil
import socket
import time

import pytest

from cluster import ROOT, SLOW, Cluster, chat, free_ports

CHAT = "/v1/chat/completions"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
MODELS = os.path.join(ROOT, "tests/models/tiny-glm52")
ALONE = ["experts.resident=all", "engine.tp=1"]  # for a prefill or decode that needs no expertd


def wait_for(what, found, seconds=20):
    end = time.time() + seconds * SLOW
    while not found():
        assert time.time() < end, what
        time.sleep(0.05)


def answer(cluster):
    status, _, text = cluster.post(CHAT, chat(QUESTION))
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]["content"]


@pytest.fixture
def pair(tmp_path):
    """Makes a router, a prefill and a decode that need no expertd, with these further options; none is waited for."""
    made = []

    def make(options):
        c = Cluster(tmp_path, {n: ALONE + options.get(n, []) for n in ("prefill", "decode")})
        made.append(c)
        for name in ("prefill", "decode", "router"):
            c.spawn(name)
        return c

    yield make
    for c in made:
        c.stop()


def not_ready_because(cluster, *words):
    """/ready says no and why, and so does the router's log."""
    wait_for(f"/ready does not say {words}", lambda: all(w in reason(cluster) for w in words), 30)
    log = cluster.log("router")
    assert all(w in log for w in words), log[-1500:]
    status, headers, text = cluster.post(CHAT, chat(QUESTION))
    assert status == 503 and headers["Retry-After"], text


def reason(cluster):
    """Why the router is not ready; nothing while it does not listen yet."""
    try:
        status, text = cluster.get("/ready", timeout=2)
    except OSError:
        return ""
    assert status == 503, "ready although nothing fits"
    return json.loads(text)["reason"]


def test_two_routers_share_one_pair(cluster):
    second = free_ports(1)[0]
    own = [o for o in cluster.set["router"] if not o.startswith("http.port")]
    cluster.set["router-1"] = own + [f"http.port={second}", "router.name=router-1"]
    cluster.spawn("router-1", "router")
    first = cluster.http
    try:
        wait_for("the second router is not ready", lambda: _ready(cluster, second))
        for port in (first, second, first, second):
            cluster.http = port
            assert answer(cluster) == ANSWER
        cluster.kill("router-1")
        cluster.http = first
        assert answer(cluster) == ANSWER
    finally:
        cluster.http = first
        if cluster.proc["router-1"].poll() is None:
            cluster.kill("router-1")


def _ready(cluster, port):
    try:
        return cluster.get("/ready", timeout=2, port=port)[0] == 200
    except OSError:
        return False


def test_other_kv_dtype_is_refused(pair):
    not_ready_because(pair({"decode": ["engine.kv_dtype=fp8"]}), "decode-0 has kv_dtype fp8, prefill-0 expects bf16")


def test_other_model_files_are_refused(pair):
    not_ready_because(pair({"prefill": ["model.dir=tests/models/tiny-glm52/mixed"]}), "fingerprint", "decode-0", "prefill-0")


def test_port_in_use(cluster):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        for kind, option in (("router", f"http.port={port}"), ("prefill", f"service.endpoint=tcp://127.0.0.1:{port}"), ("decode", f"admin.port={port}")):
            code, log = run_alone(cluster.folder, kind, [option])
            assert code == 1 and str(port) in log and re.search("in use", log, re.I), log


def run_alone(folder, kind, options):
    """(exit status, log) of a daemon that is expected not to start."""
    c = Cluster(folder)
    name = f"{kind}-alone"
    c.set[name] = c.set[kind] + (ALONE if kind != "router" else []) + options
    c.spawn(name, kind)
    code = c.proc[name].wait(30 * SLOW)
    return code, c.log(name)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_checkpoint_is_refused(tmp_path, kind, keep):
    folder = tmp_path / "model"
    shutil.copytree(os.path.join(MODELS, "fp8"), folder)
    cut = "model-00002-of-00002.safetensors"
    with open(folder / cut, "r+b") as f:
        f.truncate(keep if keep >= 0 else os.path.getsize(folder / cut) + keep)
    code, log = run_alone(tmp_path, kind, [f"model.dir={folder}"])
    assert code == 1 and cut in log, log
