import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

from cluster import ROOT, SLOW, WRAP, Cluster, free_ports  # noqa: E402
from lone import BATON  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    c = Cluster(tmp_path_factory.mktemp("baton"))
    try:
        c.start()
        yield c
    finally:
        c.stop()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Options of an expertd of expert files."""
    out = tmp_path_factory.mktemp("experts")
    subprocess.run(WRAP + [BATON, "pack", "--model", "tests/models/tiny-glm52/fp8", "--out", out, "--group", "64"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, timeout=120 * SLOW)
    return (f"experts.files={out}",)


@pytest.fixture
def place(tmp_path):
    """Folder, endpoint, admin port; processes in the list are ended."""
    port, admin = free_ports(2)
    procs = []
    yield str(tmp_path), f"tcp://127.0.0.1:{port}", admin, procs
    for p in procs:
        if p.poll() is None:
            p.kill()
        p.wait()
