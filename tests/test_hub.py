"""What lies in a folder or in the cache is loaded without asking the hub, and the hub is asked once."""

import huggingface_hub
import pytest

from shardlab.hub import from_hub


class Loader:
    """A `from_pretrained` that finds what is cached."""

    def __init__(self, *cached: str):
        self.cached, self.calls = cached, []

    def __call__(self, name: str, **settings: bool) -> str:
        self.calls.append((name, settings))
        if settings.get("local_files_only") and name not in self.cached:
            raise OSError(f"{name} is not in the cache")
        return f"loaded {name}"


@pytest.fixture
def asked(monkeypatch):
    names = []

    def model_info(self, name, timeout):
        names.append(name)
        if name == "nowhere":
            raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return names


def test_what_is_cached_is_loaded_without_a_network(asked):
    load = Loader("mine")
    assert from_hub(load, "mine", trust_remote_code=False) == "loaded mine"
    assert load.calls == [("mine", {"local_files_only": True, "trust_remote_code": False})]
    assert asked == []


def test_what_the_hub_knows_is_loaded_from_it(asked):
    assert from_hub(Loader(), "theirs") == "loaded theirs"
    assert asked == ["theirs"]


def test_without_a_network_nothing_is_tried_again(asked):
    load = Loader()
    with pytest.raises(ConnectionError):
        from_hub(load, "nowhere")
    assert len(load.calls) == len(asked) == 1


def test_a_folder_that_cannot_be_loaded_is_not_looked_for_on_the_hub(asked, tmp_path):
    with pytest.raises(OSError, match="not in the cache"):
        from_hub(Loader(), str(tmp_path))
    assert asked == []
