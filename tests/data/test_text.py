"""Text from files: what is read, in which order, and what is held out."""

import os
import pickle
import sys
import time

import pytest
import torch

from shardlab.data import encoder as encoder_module
from shardlab.data import token_cache
from shardlab.data.encoder import Encoder
from shardlab.data.files import FileTokens, stdlib_files, text_files
from shardlab.data.text import Text
from shardlab.errors import ConfigError


def used_tokens(data):
    """Every token that some window of `data` holds, in order (neighbouring windows share one)."""
    windows = [torch.cat([inputs, labels[-1:]]) for inputs, labels in (data[i] for i in range(len(data)))]
    return torch.cat([windows[0][:1], *(window[1:] for window in windows)]).tolist()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_windows_are_the_bytes_of_the_file_in_order(tmp_path):
    content = bytes(range(200)).replace(b"\0", b"!")
    data = Text(write(tmp_path / "a.txt", content), seq_len=9, eval_fraction=0)
    assert len(data) == 199 // 9
    inputs, labels = data[2]
    assert bytes(inputs.tolist()) == content[18:27]
    assert bytes(labels.tolist()) == content[19:28]
    assert inputs.dtype == labels.dtype == torch.int64
    assert (data.vocab_size, data.tokens_per_sample) == (256, 9)
    with pytest.raises(IndexError):
        data[len(data)]


def test_held_out_part_is_the_end_and_shares_no_token(tmp_path):
    content = bytes(1 + i % 255 for i in range(1000))
    path = write(tmp_path / "a.txt", content)
    train = Text(path, seq_len=7, eval_fraction=0.1)
    held_out = Text(path, seq_len=7, eval_fraction=0.1, split="eval")
    train_tokens, held_tokens = bytes(used_tokens(train)), bytes(used_tokens(held_out))
    assert content[: len(train_tokens)] == train_tokens
    assert content[900 : 900 + len(held_tokens)] == held_tokens
    assert 900 - 7 < len(train_tokens) <= 900
    assert 100 - 7 < len(held_tokens) <= 100


def test_windows_cross_file_boundaries(tmp_path):
    for number in range(10):
        write(tmp_path / f"{number}.txt", f"<{number}>")
    data = Text(tmp_path, seq_len=4, eval_fraction=0)
    assert bytes(used_tokens(data)) == b"<0><1><2><3><4><5><6><7><8><9>"[:29]


def test_folder_is_searched_sorted_without_hidden_binary_and_empty_files(tmp_path):
    wanted = [write(tmp_path / name, "text") for name in ("a/z.txt", "a-b.md", "b.txt", "c/d/e.py")]
    for name in (".git/config", ".hidden", "__pycache__/m.py"):
        write(tmp_path / name, "text")
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / "empty.txt", "")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert text_files(tmp_path) == sorted(wanted)


def test_several_paths_keep_their_order_and_count_once(tmp_path):
    a, b = write(tmp_path / "a.txt", "aaaa"), write(tmp_path / "sub/b.txt", "bbbb")
    (tmp_path / "sub/link.txt").symlink_to(a)
    assert text_files([str(tmp_path / "sub"), str(a), tmp_path]) == [b, tmp_path / "sub/link.txt"]


def test_default_is_the_standard_library_without_tests_and_packages():
    files = stdlib_files()
    assert files == sorted(files)
    names = {os.path.relpath(file, os.path.dirname(os.__file__)) for file in files}
    assert {"os.py", "json/decoder.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages", "dist-packages"} & set(name.split("/"))]


def test_default_starts_fast_and_is_large_enough():
    began = time.perf_counter()
    train, held_out = Text(), Text(split="eval")
    assert time.perf_counter() - began < 2
    assert len(train) > 10_000
    assert len(held_out) > 300
    assert "import " in "".join(chr(token) for i in range(50) for token in train[i][0].tolist())


def test_file_that_shrinks_during_the_run_is_reported(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 100)
    tokens = FileTokens([path])
    write(path, "x" * 50)
    with pytest.raises(RuntimeError, match=r"a\.txt has become shorter"):
        tokens[40:60]


def test_data_reaches_spawned_workers(tmp_path, tokenizer_file):
    data = Text(write(tmp_path / "a.txt", "alpha beta " * 50), seq_len=4, tokenizer=tokenizer_file)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[3][0], data[3][0])


def test_tokenizer_file_gives_all_its_tokens(tmp_path, tokenizer_file):
    path = write(tmp_path / "a.txt", "alpha beta gamma nothing <end> " * 20)
    data = Text(path, seq_len=3, tokenizer=str(tokenizer_file), eval_fraction=0)
    assert used_tokens(data) == ([1, 2, 3, 0, 400] * 20)[: len(data) * 3 + 1]
    assert data.vocab_size == 401
    assert len(data) == 99 // 3


def test_transformers_tokenizer_is_taken_by_name(tmp_path, tokenizer_file):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file)).save_pretrained(tmp_path / "named")
    path = write(tmp_path / "a.txt", "gamma beta " * 20)
    data = Text(path, seq_len=3, tokenizer=str(tmp_path / "named"), eval_fraction=0)
    assert used_tokens(data)[:4] == [3, 2, 3, 2]


def test_text_is_tokenized_once_until_it_changes(tmp_path, tokenizer_file, cache, monkeypatch):
    path = write(tmp_path / "a.txt", "alpha beta " * 50)
    calls = []
    original = token_cache._write
    monkeypatch.setattr(token_cache, "_write", lambda *args: (calls.append(1), original(*args)))

    def first():
        return Text(path, seq_len=4, tokenizer=tokenizer_file)[0][0].tolist()

    assert first() == first() == [1, 2, 1, 2]
    assert len(calls) == 1
    write(path, "gamma beta " * 50)  # as long as before
    os.utime(path, ns=(1, 1))
    assert first() == [3, 2, 3, 2]
    assert len(calls) == 2
    assert not list(cache.glob("*.partial"))


def test_failed_tokenization_leaves_nothing_behind(tmp_path, tokenizer_file, cache, monkeypatch):
    path = write(tmp_path / "a.txt", "alpha beta " * 50)

    def fail(self, texts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "encode_all", fail)
        with pytest.raises(KeyboardInterrupt):
            Text(path, seq_len=4, tokenizer=tokenizer_file)
    assert not list(cache.glob("*.partial"))
    assert Text(path, seq_len=4, tokenizer=tokenizer_file)[0][0].tolist() == [1, 2, 1, 2]


def test_long_text_is_cut_between_words_and_loses_nothing(tokenizer_file, monkeypatch):
    monkeypatch.setattr(encoder_module, "_PIECE_CHARS", 13)
    text = "alpha beta\ngamma " * 7 + "alpha" * 5 + " beta"
    assert "".join(encoder_module._pieces(text)) == text
    assert max(map(len, encoder_module._pieces(text))) <= 13
    encoder = encoder_module.load_encoder(tokenizer_file)
    words = "alpha beta\ngamma " * 30
    assert list(encoder.encode(words)) == encoder.tensor([words]).tolist() == [1, 2, 3] * 30


@pytest.mark.parametrize(("ids", "dtype"), [(256, torch.uint8), (257, torch.uint16), (65537, torch.int32)])
def test_tokens_are_kept_in_the_smallest_type_that_holds_them(ids, dtype):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"first": 0, "last": ids - 1}, unk_token="first"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = Encoder(tokenizer).tensor(["last first", "last"])
    assert tokens.dtype == dtype
    assert tokens.tolist() == [ids - 1, 0, ids - 1]


def test_bad_settings_are_named(tmp_path, tokenizer_file):
    good = write(tmp_path / "good.txt", "x" * 1000)
    broken = write(tmp_path / "broken.json", "{}")
    (tmp_path / "folder").mkdir()
    binary = write(tmp_path / "binary.txt", b"a\0b")
    empty = write(tmp_path / "empty.txt", "")
    cases = [
        ({"path": tmp_path / "missing"}, r"data\.path=.*missing does not exist; give a file"),
        ({"path": [good, tmp_path / "missing"]}, r"data\.path=.*missing does not exist"),
        ({"path": tmp_path / "folder"}, r"data\.path=.*folder holds no text"),
        ({"path": []}, r"data\.path=\[\] holds no text"),
        ({"path": empty}, r"data\.path=.*empty\.txt holds no text"),
        ({"path": binary}, r"data\.path=.*binary\.txt is not a text file"),
        ({"path": good, "seq_len": 0}, r"data\.seq_len=0 is not possible"),
        ({"path": good, "seq_len": 950}, r"data\.seq_len=950 is too long: the train part .* holds 950 tokens .* 951"),
        ({"path": good, "seq_len": 50, "split": "eval"}, r"data\.seq_len=50 is too long: the eval part .* holds 50 "),
        ({"path": good, "eval_fraction": 1.0}, r"data\.eval_fraction=1\.0 is not possible"),
        ({"path": good, "eval_fraction": -0.1}, r"data\.eval_fraction=-0\.1 is not possible"),
        ({"path": good, "eval_fraction": 0, "split": "eval"}, r"data\.eval_fraction=0 holds nothing out"),
        ({"path": good, "tokenizer": "no/such/tokenizer.json"}, r"data\.tokenizer=no/such/tokenizer\.json does not"),
        ({"path": good, "tokenizer": broken}, r"data\.tokenizer=.*broken\.json is no valid tokenizer file"),
        ({"path": good, "tokenizer": str(tmp_path / "folder")}, r"data\.tokenizer=.*folder could not be loaded"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message) as raised:
            Text(**settings)
        assert len(str(raised.value).splitlines()) == 1


def test_longest_possible_sequence_is_accepted(tmp_path):
    path = write(tmp_path / "good.txt", "x" * 1000)
    assert len(Text(path, seq_len=949)) == 1
    assert len(Text(path, seq_len=49, split="eval")) == 1


@pytest.mark.parametrize(("tokenizer", "package"), [("a.json", "tokenizers"), ("gpt2", "transformers")])
def test_missing_package_is_named_with_its_command(monkeypatch, tokenizer, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^data\.tokenizer={tokenizer} needs a package: pip install {package}$"):
        Text(tokenizer=tokenizer)
