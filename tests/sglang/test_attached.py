"""A server that was started elsewhere, with a fake engine in its place: it ends without the engine attached to it."""

import pytest

from milepost.engines.cluster import EngineMissing
from milepost.engines.rollout_actor import start_rollout_engine
from milepost.engines.rollout_start import start_rollout
from milepost.engines.served_engine import FakeEngine
from milepost.storage.parameters import EnginesSection, Parameters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_an_engine_whose_server_is_gone_is_missing_until_there_is_one_again(model_dir: str) -> None:
    server = start_rollout_engine("elsewhere", 0, engine_class=FakeEngine, timeout_seconds=60, model_dir=model_dir)
    chosen = Parameters(engines=EnginesSection(rollout="sglang", sglang_urls=[server.url()]))
    attached = start_rollout("attached", 0, chosen, model_dir)
    assert attached.url() == server.url()
    server.close()
    with pytest.raises(EngineMissing, match="no SGLang server is at http://127.0.0.1:.*: start it again"):
        attached.url()
    attached.close()
    with pytest.raises(ConnectionError, match="did not answer /generate"):
        start_rollout("attached", 0, chosen, model_dir)
