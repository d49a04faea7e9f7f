"""Expert files: made by `baton pack`, served by expertd, and answered from by the whole system."""
import hashlib
import os
import shutil
import signal
import subprocess
import time

import openai
import pytest

from cluster import BUILD, ROOT, SLOW, WRAP, Cluster

BATON = os.path.join(BUILD, "deploy/baton/baton")
EXPERTD = os.path.join(BUILD, "expertd/baton-expertd")
FP8 = "tests/models/tiny-glm52/fp8"
MIXED = "tests/models/tiny-glm52/mixed"
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "《红楼梦》的作者是谁？": "《红楼梦》的作者是曹雪芹。",
    "Count the items: stone, badger": "2",
}


def run(*args):
    return subprocess.run(WRAP + [BATON, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=120 * SLOW)


def pack(out, model=FP8, *more):
    return run("pack", "--model", model, "--out", out, *more)


def digest(folder):
    return {n: hashlib.sha256(open(os.path.join(folder, n), "rb").read()).hexdigest() for n in sorted(os.listdir(folder))}


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    out = tmp_path_factory.mktemp("experts") / "int4"
    r = pack(out, FP8, "--group", 64)
    assert r.returncode == 0, r.stderr
    return out


def test_one_file_per_layer_with_its_error(int4):
    assert sorted(os.listdir(int4)) == [f"layer-{n:03}.experts" for n in range(1, 9)]
    r = pack(int4, FP8, "--group", 64)
    assert r.returncode == 0 and r.stdout.count("kept, error 9.") == 8


def test_same_bytes_again_and_with_any_threads(int4, tmp_path):
    for threads in (1, 3):
        assert pack(tmp_path / "again", FP8, "--group", 64, "--threads", threads, "--layers", "2-3").returncode == 0
        again = digest(tmp_path / "again")
        assert again == {n: h for n, h in digest(int4).items() if n in again} and len(again) == 2
        shutil.rmtree(tmp_path / "again")


def test_interrupted_and_resumed(int4, tmp_path):
    out = tmp_path / "resumed"
    p = subprocess.Popen(WRAP + [BATON, "pack", "--model", FP8, "--out", out, "--group", "64", "--threads", "1"], cwd=ROOT,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.time() + 60 * SLOW
    while not (out / "layer-002.experts").exists():
        assert time.time() < end and p.poll() is None
        time.sleep(0.005)
    p.send_signal(signal.SIGINT)
    said = p.communicate(timeout=30 * SLOW)[1]
    assert p.returncode in (0, 1) and (p.returncode == 0 or "stopped in layer" in said)
    assert not [n for n in os.listdir(out) if n.endswith(".part")]
    (out / "layer-003.experts").write_bytes(b"half a file")
    assert pack(out, FP8, "--group", 64).returncode == 0
    assert digest(out) == digest(int4)


def test_verify_finds_one_bit(int4, tmp_path):
    r = run("pack", "--verify", int4)
    assert r.returncode == 0 and r.stdout.count("all hashes right") == 8
    bad = tmp_path / "layer-004.experts"
    data = bytearray((int4 / bad.name).read_bytes())
    data[-4000] ^= 4
    bad.write_bytes(data)
    r = run("pack", "--verify", bad)
    assert r.returncode == 1 and "expert 15, unit 1 is damaged" in r.stderr


def test_refusals_by_name(int4, tmp_path):
    r = pack(int4, MIXED, "--group", 64)
    assert r.returncode == 1 and "another checkpoint of this model" in r.stderr
    some = tmp_path / "some"
    shutil.copytree(int4, some)
    (some / "layer-002.experts").unlink()
    r = pack(some, MIXED, "--group", 64, "--layers", 2)  # its own file is not there, the others are of another checkpoint
    assert r.returncode == 1 and "another checkpoint of this model" in r.stderr and not (some / "layer-002.experts").exists()
    shutil.copy(some / "layer-003.experts", some / "layer-002.experts")
    r = run("pack", "--verify", some)
    assert r.returncode == 1 and "layer-002.experts: holds layer 3" in r.stderr
    later = bytearray((some / "layer-004.experts").read_bytes())
    later[8] = 9
    (some / "layer-004.experts").write_bytes(later)
    (some / "layer-002.experts").unlink()
    r = pack(some, FP8, "--group", 64)
    assert r.returncode == 1 and "version 9" in r.stderr and (some / "layer-004.experts").read_bytes() == later
    r = pack(int4, FP8, "--group", 128)
    assert r.returncode == 1 and "int4-g64-f16" in r.stderr
    r = pack(tmp_path / "x", FP8, "--bits", 5)
    assert r.returncode == 2 and "--bits 5" in r.stderr
    r = pack(tmp_path / "x", "no/such/model")
    assert r.returncode == 1 and "no/such/model" in r.stderr
    r = run("pakc")
    assert r.returncode == 2 and "did you mean pack?" in r.stderr


def expertd(*options):
    """Output of an expertd that is expected not to start."""
    args = WRAP + [EXPERTD] + [a for o in ("service.endpoint=tcp://127.0.0.1:*", "admin.port=0", *options) for a in ("--set", o)]
    r = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOW)
    assert r.returncode == 1, r.stderr
    return r.stderr


def test_expertd_refuses_what_does_not_fit(int4, tmp_path):
    assert "expected one of [model] dir and [experts] files, got neither" in expertd()
    assert "got both" in expertd(f"experts.files={int4}", f"model.dir={FP8}")
    assert "no expert files" in expertd(f"experts.files={tmp_path}")
    assert "4 shards" in expertd(f"experts.files={int4}", "experts.shards=4")
    assert "physical cores" in expertd(f"experts.files={int4}", "engine.threads=1000")
    assert "need [experts] files" in expertd(f"model.dir={FP8}", "experts.lock=yes")
    assert "names none" in expertd(f"experts.files={int4}", "experts.require_node=yes")
    assert "NUMA node 999" in expertd(f"experts.files={int4}", "engine.node=999")
    some = tmp_path / "some"
    shutil.copytree(int4, some)
    (some / "layer-005.experts").unlink()
    assert "layer-005.experts" in expertd(f"experts.files={some}")
    shutil.copy(int4 / "layer-006.experts", some / "layer-005.experts")
    assert "the file of layer 5 holds layer 6" in expertd(f"experts.files={some}")
    data = (int4 / "layer-005.experts").read_bytes()
    (some / "layer-005.experts").write_bytes(data[:-1])
    assert "truncated" in expertd(f"experts.files={some}")


@pytest.fixture(scope="module")
def packed(int4, tmp_path_factory):
    experts = ["model.dir=", f"experts.files={int4}"]
    c = Cluster(tmp_path_factory.mktemp("packed"), {"expertd-0": experts, "expertd-1": experts})
    try:
        c.start()
        yield c
    finally:
        c.stop()


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_with_four_bits(packed, question):
    client = openai.OpenAI(base_url=packed.url + "/v1", api_key="none", max_retries=0, timeout=120)
    r = client.chat.completions.create(model="tiny-glm52", temperature=0, messages=[{"role": "user", "content": question}])
    assert r.choices[0].message.content == ANSWERS[question] and r.choices[0].finish_reason == "stop"


def test_what_the_daemon_says_of_itself(packed):
    log = packed.log("expertd-0")
    assert "int4-g64-f16" in log and "shard 0 of 2" in log and "memory: " in log and "speed: memory" in log
    assert packed.metric("expertd-0", "baton_expert_calls_total") > 0
    assert packed.metric("expertd-0", "baton_expert_memory_gb_per_s") > 0


def test_idle_uses_no_processor(packed):
    def seconds(pid):
        with open(f"/proc/{pid}/stat") as f:
            part = f.read().rsplit(")", 1)[1].split()
        return (int(part[11]) + int(part[12])) / os.sysconf("SC_CLK_TCK")
    time.sleep(0.5)
    pids = [packed.proc[n].pid for n in ("expertd-0", "expertd-1")]
    before, begin = [seconds(p) for p in pids], time.time()
    time.sleep(3)
    for pid, was in zip(pids, before):
        assert (seconds(pid) - was) / (time.time() - begin) < 0.01 * SLOW + 0.004
