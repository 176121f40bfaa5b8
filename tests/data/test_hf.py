"""Hugging Face datasets, from local files: the stream's order, its parts and its failures."""

import json
import pickle
import sys

import pytest
import torch

from shardlab.data import batches
from shardlab.data.encoder import Encoder
from shardlab.data.hf import StreamedText, hf_text
from shardlab.errors import ConfigError

# From Python 3.12 on, a fork of a process with threads warns; DataLoader workers are such forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

DOCUMENTS = [f"document {number}" for number in range(60)]


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """No test may reach the network, or the home of whoever runs it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def files(tmp_path):
    """60 documents in three files."""
    paths = []
    for part in range(3):
        path = tmp_path / f"{part}.jsonl"
        lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS[part * 20 : part * 20 + 20]]
        path.write_text("\n".join(lines))
        paths.append(str(path))
    return paths


def make(files, **kwargs):
    return hf_text(**{"name": "json", "data_files": files, "seq_len": 8, "seed": 0, "eval_documents": 10} | kwargs)


def text_of(data, samples):
    """The text of windows 0..samples-1, joined where they overlap."""
    windows = [data[i] for i in range(samples)]
    return bytes([windows[0][0][0].item(), *(token for _, labels in windows for token in labels.tolist())]).decode()


def joined(documents):
    return "".join(document + "\n" for document in documents)


def windows_in(text, seq_len=8):
    return (len(text) - 1) // seq_len


def test_stream_gives_the_documents_in_order_epoch_after_epoch(files):
    data = make(files, shuffle_buffer=0)
    text = joined(DOCUMENTS[10:])
    per_epoch = windows_in(text)
    assert text_of(data, per_epoch) == text[: per_epoch * 8 + 1]
    assert not hasattr(data, "__len__")
    for index in (0, 5, per_epoch - 1):
        assert torch.equal(data[index][0], data[index + per_epoch][0])
    assert (data.vocab_size, data.tokens_per_sample) == (256, 8)


def test_stream_reads_forward_and_reopens_to_go_back(files):
    data, reference = make(files), make(files)
    windows = [reference[i] for i in range(120)]
    for index in (7, 3, 3, 119, 0):
        assert torch.equal(data[index][0], windows[index][0])
        assert torch.equal(data[index][1], windows[index][1])


def test_shuffling_depends_on_seed_and_epoch_and_keeps_every_document(files):
    per_epoch = windows_in(joined(DOCUMENTS[10:]))

    def epoch(data, number):
        first = number * per_epoch
        return bytes(t for i in range(first, first + per_epoch) for t in data[i][0].tolist()).decode()

    data = make(files)
    assert epoch(data, 0) == epoch(make(files), 0)
    assert epoch(data, 0) != epoch(data, 1)
    assert epoch(data, 0) != epoch(make(files, seed=1), 0)
    # All but the document that the end of the epoch cuts off.
    found = [line for line in epoch(data, 0).split("\n") if line in DOCUMENTS]
    assert len(found) == len(set(found)) >= 49


def test_held_out_documents_are_the_first_and_are_never_trained_on(files):
    held_out = make(files, split="eval")
    text = joined(DOCUMENTS[:10])
    assert len(held_out) == windows_in(text)
    assert text_of(held_out, len(held_out)) == text[: len(held_out) * 8 + 1]
    train = make(files)
    seen = bytes(t for i in range(3 * windows_in(joined(DOCUMENTS[10:]))) for t in train[i][0].tolist()).decode()
    assert not set(seen.split("\n")) & set(DOCUMENTS[:10])


def test_named_split_is_held_out_and_training_keeps_all_documents(files):
    parts = {"train": files[:2], "validation": files[2:]}
    held_out = make(parts, eval_split="validation", split="eval", eval_documents=5)
    assert text_of(held_out, 5) == joined(DOCUMENTS[40:45])[:41]
    assert text_of(make(parts, eval_split="validation", shuffle_buffer=0), 5) == joined(DOCUMENTS)[:41]


def test_workers_and_ranks_see_one_stream(files):
    def first_steps(rank, world_size, num_workers=0):
        shape = {"micro_batch": 4 // world_size, "micro_batches": 1, "rank": rank, "world_size": world_size}
        stream = batches(make(files), seed=0, steps=40, num_workers=num_workers, **shape)
        return torch.stack([batch.inputs for (batch,) in stream])

    alone = first_steps(0, 1)
    assert torch.equal(alone, first_steps(0, 1, num_workers=2))
    assert torch.equal(alone, torch.cat([first_steps(0, 2), first_steps(1, 2)], dim=1))


def test_forked_worker_opens_the_stream_anew(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(joined(DOCUMENTS))

    class Chunks:
        """Reads as it goes, so processes that share the open file would take from each other."""

        def shuffled(self, epoch):
            with open(path, "rb", buffering=0) as file:
                while chunk := file.read(5):
                    yield chunk.decode()

    data, reference = (StreamedText(Chunks(), Encoder(), seq_len=8) for _ in range(2))
    data[3]
    shape = {"micro_batch": 1, "micro_batches": 1, "rank": 0, "world_size": 1}
    stream = batches(data, seed=0, start_step=4, steps=40, num_workers=2, **shape)
    for position, (batch,) in enumerate(stream, start=4):
        assert torch.equal(batch.inputs[0], reference[position][0])
    del data, reference  # closes the files


def test_stream_reaches_spawned_workers(files):
    data = make(files)
    data[9]
    assert torch.equal(pickle.loads(pickle.dumps(data))[4][0], data[4][0])


def test_downloaded_data_is_finite_and_holds_the_same_parts(files):
    train, held_out = make(files, streaming=False), make(files, streaming=False, split="eval")
    assert text_of(train, len(train)) == joined(DOCUMENTS[10:])[: len(train) * 8 + 1]
    assert len(train) == windows_in(joined(DOCUMENTS[10:]))
    assert text_of(held_out, len(held_out)) == joined(DOCUMENTS[:10])[: len(held_out) * 8 + 1]


@pytest.mark.parametrize("streaming", [True, False])
def test_tokenizer_and_separator_token(tmp_path, tokenizer_file, streaming):
    (tmp_path / "a.txt").write_text("alpha beta\n\ngamma\n" * 20)  # the text format: a document per line
    data = hf_text(
        "text",
        seq_len=4,
        seed=0,
        data_files=str(tmp_path / "a.txt"),
        tokenizer=tokenizer_file,
        separator=" <end> ",
        shuffle_buffer=0,
        eval_documents=0,
        streaming=streaming,
    )
    assert data.vocab_size == 401
    assert [data[i][0].tolist() for i in range(3)] == [[1, 2, 400, 3], [400, 1, 2, 400], [3, 400, 1, 2]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": "/no/such/file.jsonl"}, r"^data\.name=json could not be loaded \(.*no/such/file"),
        ({"train_split": "nosuch"}, r"^data\.name=json could not be loaded \(.*nosuch"),
        ({"text_column": "body"}, r"^data\.text_column=body is not in json; its columns are text, id$"),
        ({"text_column": "id"}, r"^data\.text_column=id of json holds no text"),
        ({"eval_documents": 60}, r"^data\.name=json: the train part .* shorter than one sequence of data\.seq_len=8"),
        ({"seq_len": 10_000}, r"shorter than one sequence of data\.seq_len=10000; lower"),
        ({"seq_len": 10_000, "split": "eval"}, r"the eval part .* shorter than one sequence"),
        ({"seq_len": 10_000, "streaming": False}, r"the train part .* shorter than one sequence"),
        ({"eval_documents": 0, "split": "eval"}, r"^data\.eval_documents=0 holds nothing out"),
        ({"shuffle_buffer": -1}, r"^data\.shuffle_buffer=-1 is not possible"),
    ],
)
def test_bad_settings_are_named_on_one_line(files, settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make(**{"files": files} | settings)
    assert len(str(raised.value).splitlines()) == 1


def test_empty_dataset_is_a_config_error(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError):
        hf_text("text", seq_len=4, seed=0, data_files=str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("streaming", [True, False])
def test_unreachable_hub_is_one_line_and_soon(monkeypatch, streaming):
    import datasets
    import huggingface_hub

    def no_network(*args, **kwargs):
        raise ConnectionError("Name or service not known\nsecond line")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_network)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        ConfigError, match=r"^data\.name=no/such could not be loaded \(.*\); check data\.name"
    ) as raised:
        hf_text("no/such", seq_len=4, seed=0, streaming=streaming)
    assert len(str(raised.value).splitlines()) == 1


def test_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^data\.name=some/name needs a package: pip install datasets$"):
        hf_text("some/name", seq_len=4, seed=0)
