import pytest


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """A word-level tokenizer.json that cuts and pads, as those of published models may."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "alpha": 1, "beta": 2, "gamma": 3, "<end>": 400}  # ids with a gap
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Tokenized text must not land in the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardlab"
