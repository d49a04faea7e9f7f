import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

from cluster import Cluster  # noqa: E402


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    c = Cluster(tmp_path_factory.mktemp("baton"))
    try:
        c.start()
        yield c
        free = c.free_at_rest("decode"), c.free_at_rest("prefill")
        assert free == (512, 256), "pages were lost"
    finally:
        c.stop()


@pytest.fixture
def client(cluster):
    import openai
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120)
