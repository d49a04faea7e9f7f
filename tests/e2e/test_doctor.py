"""baton doctor: a known slow host from its facts, translation, refusals, and this host itself."""
import json
import os
import shutil
import subprocess

import pytest

from cluster import BUILD, ROOT, SLOW, WRAP

BATON = os.path.join(BUILD, "deploy/baton/baton")
SLOW_HOST = "tests/unit/deploy/cases/slow_4xh100"
OPTIONS = SLOW_HOST + "/options.txt"


def doctor(*args, text=None, env=None):
    return subprocess.run(WRAP + [BATON, "doctor", *map(str, args)], cwd=ROOT, capture_output=True, text=True, input=text,
                          timeout=120 * SLOW, env={**os.environ, **(env or {})})


def report(*args, **more):
    r = doctor(*args, "--json", **more)
    assert r.returncode in (0, 1, 2), r.stderr
    out = json.loads(r.stdout)
    assert out["status"] == r.returncode
    out["by_id"] = {f["id"]: f for f in out["findings"]}
    return out


def check_files(folder):
    """Every file passes its daemon's own --check."""
    names = sorted(os.listdir(folder))
    assert names
    for name in names:
        kind = name.split(".")[0].split("-")[0]
        r = subprocess.run(WRAP + [os.path.join(BUILD, kind, "baton-" + kind), "--config", os.path.join(folder, name), "--check"],
                           cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOW)
        assert r.returncode == 0 and r.stdout == "ok\n", name + r.stderr
    return names


def test_what_is_wrong_with_the_slow_host(tmp_path):
    r = report("--facts", SLOW_HOST, "--from-sglang", OPTIONS, "--out", tmp_path / "same", "--better", tmp_path / "better")
    assert r["status"] == 1
    first = r["findings"][0]
    assert first["id"] == "memory-nodes" and first["what"].startswith("half of the memory nodes are unused")
    assert "both nodes in use are in socket 0" in first["what"] and "245.8 of 491.5 GB/s" in first["numbers"]
    assert 0.6 < first["gain"] < 0.7
    assert "NVLink joins only the pairs 0-1, 2-3" in r["by_id"]["all-reduce"]["what"]
    assert "no speculative decoding" in r["by_id"]["speculation"]["what"]
    assert "idle: 4, 5" in r["by_id"]["gpus-idle"]["what"]
    given, better = r["ceilings"]["given"], r["ceilings"]["better"]
    # 75 layers x 8 experts x 3/4 x 3 x 6144 x 2048 x 4.125 bit over one socket, then a sum of parts.
    assert given["expert_bytes"] == pytest.approx(75 * 8 * 0.75 * 3 * 6144 * 2048 * 4.125 / 8)
    assert given["expert_ms"] == pytest.approx(given["expert_bytes"] / 245.76e6)
    assert given["memory_tok_per_s"] == pytest.approx(28.1, abs=0.1)
    assert given["tok_per_s"] == pytest.approx(22.5, abs=0.1)
    assert given["total_ms"] == pytest.approx(sum(given[k] for k in ("expert_ms", "device_ms", "all_reduce_ms", "hand_over_ms")))
    assert better["tok_per_s"] > 1.5 * given["tok_per_s"] and better["expert_gb_per_s"] == pytest.approx(491.52)
    assert check_files(tmp_path / "same") == ["decode-0.conf", "expertd-0.conf", "expertd-1.conf", "prefill-0.conf", "router.conf"]
    names = check_files(tmp_path / "better")
    assert {"expertd-0.conf", "expertd-1.conf", "expertd-2.conf", "expertd-3.conf"} < set(names)
    assert sorted(names) == sorted(r["better"]["files"])
    # What is called better has nothing of this left to say.
    again = report("--facts", SLOW_HOST, "--config", tmp_path / "better")
    assert again["by_id"]["memory-nodes"]["level"] == "ok" and again["by_id"]["all-reduce"]["level"] == "ok"
    assert again["by_id"]["gpus-idle"]["level"] == "ok" and again["by_id"]["threads"]["level"] == "ok"
    assert again["ceilings"]["given"]["tok_per_s"] == pytest.approx(better["tok_per_s"])


def test_the_same_for_people():
    r = doctor("--facts", SLOW_HOST, "--from-sglang", OPTIONS)
    assert r.returncode == 1
    for part in ("75 layers x 8 experts x 0.75 not on the device", "= 8.76 GB", "22.5 tok/s", "tool-call-parser glm47: not kept",
                 "--- expertd-3.conf", "works, with warnings", "not known here:"):
        assert part in r.stdout, part


def test_assumptions_can_be_set():
    r = report("--facts", SLOW_HOST, "--from-sglang", OPTIONS, "--set", "socket_gb_per_s=400", "--set", "sockets=4")
    assert r["by_id"]["memory-nodes"]["numbers"].startswith("800.0 of 1600.0 GB/s")
    bad = doctor("--facts", SLOW_HOST, "--set", "socket_gb_per_z=4")
    assert bad.returncode == 3 and "did you mean socket_gb_per_s?" in bad.stderr
    bad = doctor("--facts", SLOW_HOST, "--set", "gpu_fraction=2")
    assert bad.returncode == 3 and "from 0.01 to 1" in bad.stderr
    bad = doctor("--facts", SLOW_HOST, "--set", "sockets=3")
    assert bad.returncode == 3 and "3 sockets do not divide 4" in bad.stderr


def test_the_demo_on_this_host():
    r = report("--config", "deploy/conf/demo")
    for rule in ("shards", "experts-held", "pair"):
        assert r["by_id"][rule]["level"] == "ok", r["by_id"][rule]
    assert r["host"]["nodes"] and r["host"]["nodes"][0]["cores"] >= 1
    assert "fail" not in [f["level"] for f in r["findings"]], r["findings"]


def test_configs_that_cannot_work(tmp_path):
    for name in os.listdir(os.path.join(ROOT, "deploy/conf/demo")):
        shutil.copy(os.path.join(ROOT, "deploy/conf/demo", name), tmp_path / name)
    edit = tmp_path / "expertd-1.conf"
    edit.write_text(edit.read_text().replace("shard = 1", "shard = 0"))
    assert report("--config", tmp_path)["by_id"]["shards"]["level"] == "fail"
    edit = tmp_path / "decode.conf"
    edit.write_text(edit.read_text().replace("pages = 512", "pages = 100"))
    r = report("--config", tmp_path)
    assert r["status"] == 2 and "[engine] pages = 128" in r["by_id"]["kv-pool"]["change"]
    edit.write_text(edit.read_text().replace("tp = 4", "tp = 2"))
    assert "differ in [engine] tp" in report("--config", tmp_path)["by_id"]["pair"]["what"]
    edit.write_text("[engine]\ntpp = 3\n")
    r = doctor("--config", tmp_path)
    assert r.returncode == 2 and "decode.conf:2" in r.stderr and "did you mean \"tp\"?" in r.stderr
    (tmp_path / "other.conf").write_text("")
    r = doctor("--config", tmp_path / "other.conf")
    assert r.returncode == 2 and "the name tells no daemon" in r.stderr


def test_wrong_use_and_hostile_facts(tmp_path):
    assert doctor("--bogus").returncode == 3
    assert doctor("stray").returncode == 3
    assert "--out needs --from-sglang" in doctor("--out", tmp_path).stderr
    assert doctor("--facts", tmp_path / "no").returncode == 3
    (tmp_path / "numactl.txt").write_text("node 0 cpus: 0-3\nnode 1 cpus: 3\n")
    r = doctor("--facts", tmp_path)
    assert r.returncode == 3 and "numactl.txt:2: nodes 0 and 1 have a processor in common" in r.stderr
    (tmp_path / "numactl.txt").write_bytes(b"node 0\0")
    assert "zero byte" in doctor("--facts", tmp_path).stderr
    r = doctor("--facts", SLOW_HOST, "--from-sglang", "-", text="tp-size 4\nport x\n")
    assert r.returncode == 3 and "-:2: port: expected a number" in r.stderr
    (tmp_path / "out").mkdir()
    (tmp_path / "out/router.conf").write_text("mine")
    r = doctor("--facts", SLOW_HOST, "--from-sglang", OPTIONS, "--out", tmp_path / "out")
    assert r.returncode == 3 and "exists" in r.stderr and (tmp_path / "out/router.conf").read_text() == "mine"


def test_captured_facts_give_the_same(tmp_path):
    r = doctor("--capture", tmp_path / "facts")
    assert r.returncode == 0, r.stderr
    assert {"numactl.txt", "lscpu.txt", "host.txt", "ucx.txt"} <= set(os.listdir(tmp_path / "facts"))
    assert doctor("--capture", tmp_path / "facts").returncode == 3  # nothing is written over
    there, here = report("--facts", tmp_path / "facts", "--config", "deploy/conf/demo"), report("--config", "deploy/conf/demo")
    assert [f["id"] for f in there["findings"]] == [f["id"] for f in here["findings"]]
    assert [(n["node"], n["cores"], n["size_mb"]) for n in there["host"]["nodes"]] == \
        [(n["node"], n["cores"], n["size_mb"]) for n in here["host"]["nodes"]]


def test_gpus_of_a_host_with_nvidia_smi(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncase $1 in topo) cat {ROOT}/tests/unit/deploy/facts_4gpu/topo.txt ;;"
                   f" *) cat {ROOT}/tests/unit/deploy/facts_4gpu/gpus.csv ;; esac\n")
    smi.chmod(0o755)
    r = doctor("--capture", tmp_path / "facts", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert r.returncode == 0, r.stderr
    lines = (tmp_path / "facts/gpus.csv").read_text().splitlines()
    assert lines[0].endswith(", numa_node") and lines[1].endswith(", -1") and len(lines) == 5
    assert "NV18" in (tmp_path / "facts/topo.txt").read_text()
    # What a future nvidia-smi prints otherwise is left out, and the rest is used.
    smi.write_text("#!/bin/sh\necho surprise\n")
    r = doctor("--json", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert r.returncode == 0 and "left out of this host's facts: gpus.csv:1" in r.stderr
    assert json.loads(r.stdout)["host"]["nodes"] and not json.loads(r.stdout)["host"]["gpus"]


def test_measured_bandwidth_is_used():
    r = report("--measure", "--config", "deploy/conf/demo")
    assert r["host"]["nodes"][0]["measured"] and r["host"]["nodes"][0]["gb_per_s"] > (0.5 if SLOW == 1 else 0.005)
    assert doctor("--measure", "--facts", SLOW_HOST).returncode == 3


def test_the_table_is_the_one_of_migrating():
    table = doctor("--list-options").stdout
    assert table and table in open(os.path.join(ROOT, "deploy/MIGRATING.md")).read()
