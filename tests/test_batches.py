"""The rules of batches.py, held against a plainly written version of them."""

import itertools
import json
import os
import re
import time
import tracemalloc

import numpy as np
import pytest
import torch

from batches import (
    Permutation,
    TrainingBatches,
    check_lengths,
    evaluation_batches,
    load_dataset,
)
from settings import UserError
from tokenizer import CharTokenizer

# block_size, lengths of the paragraphs
SIZES = [
    (1, [1, 4, 2]),
    (2, [5, 1, 3]),
    (5, [3, 2, 4, 1, 1, 6, 2, 9]),  # nearly all shorter than a window
    (7, [20, 31, 8]),
    (8, [50]),
    (8, [4, 5]),  # a single window
    (16, [40, 3, 0, 80, 17, 25, 33]),  # an empty paragraph
]


def text_of(lengths):
    """Tokens that are all different, so that each says where it came from; and the paragraphs."""
    return np.arange(sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths])


def flatten_and_slide(tokens, paragraphs, block_size, seed, epoch):
    """The windows of an epoch in their order, written as one would explain it."""
    random = np.random.default_rng([seed, epoch])
    text = []
    for paragraph in random.permutation(len(paragraphs) - 1):
        text.extend(tokens[paragraphs[paragraph] : paragraphs[paragraph + 1]])
    windows = []
    for start in range(0, len(text) - block_size, max(1, block_size // 2)):
        windows.append(text[start : start + block_size + 1])
    order = Permutation(len(windows), random)
    return [windows[i] for i in order[np.arange(len(windows))]]


def take(batches, count):
    """The next windows, from whole batches, each as a list of block_size + 1 ids."""
    windows = []
    for inputs, targets in itertools.islice(batches, count // batches.batch_size):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        windows += torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    return windows


@pytest.mark.parametrize(("block_size", "lengths"), SIZES)
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batches_equal_the_plain_version(block_size, lengths, batch_size):
    """Id for id, over several epochs, with batches that go on into the next epoch or several."""
    tokens, paragraphs = text_of(lengths)
    batches = TrainingBatches(tokens, paragraphs, block_size, batch_size, seed=5)
    count = 3 * max(batches.windows_per_epoch, batch_size) // batch_size * batch_size
    epochs = range(count // batches.windows_per_epoch + 1)
    plain = [flatten_and_slide(tokens, paragraphs, block_size, 5, epoch) for epoch in epochs]
    assert len(plain[0]) == batches.windows_per_epoch
    assert take(batches, count) == list(itertools.chain(*plain))[:count]
    assert batches.served == count


def test_batches_equal_the_plain_version_on_a_real_text(texts):
    """Paragraphs of real lengths, and the size of the tutorial."""
    text = (texts / "pg27200_andersen.txt").read_text("utf-8")
    lengths = [len(piece) for piece in re.findall(r".+?(?:\n\n|\Z)", text[:200_000], re.DOTALL)]
    tokens = np.frombuffer(text[: sum(lengths)].encode("ascii"), dtype=np.uint8)
    paragraphs = np.cumsum([0, *lengths])
    batches = TrainingBatches(tokens, paragraphs, 128, 64, seed=1337)
    plain = flatten_and_slide(tokens, paragraphs, 128, 1337, epoch=0)
    count = len(plain) // 64 * 64
    assert take(batches, count) == plain[:count]


def test_a_batch_costs_no_pass_over_the_text():
    """Flattening 2.5 million tokens anew for a batch took 20 ms at best; looking them up, 0.13."""
    tokens, paragraphs = np.zeros(2_500_000, np.uint8), np.arange(0, 2_500_001, 250)
    batches = TrainingBatches(tokens, paragraphs, 128, 64, seed=0)
    times = []
    for _ in range(20):
        before = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - before)
    assert min(times) < 0.005


def test_each_window_is_served_once_an_epoch():
    """A repeated or skipped window would weigh some of the text more than the rest."""
    tokens, paragraphs = text_of([13, 7, 29, 5, 11])
    batches = TrainingBatches(tokens, paragraphs, 4, 1, seed=0)
    for epoch in range(3):
        served = take(batches, batches.windows_per_epoch)
        plain = flatten_and_slide(tokens, paragraphs, 4, 0, epoch)
        assert sorted(served) == sorted(plain)
        assert set(itertools.chain(*served)) == set(tokens.tolist())


def test_a_batch_is_full_contiguous_and_int64():
    """What an embedding wants and `view` can flatten, whatever the ids are kept as."""
    tokens, paragraphs = text_of([30, 40])
    for batch in next(TrainingBatches(tokens, paragraphs, 6, 50, seed=0)):
        assert batch.shape == (50, 6)
        assert batch.dtype == torch.int64
        assert batch.is_contiguous()


def test_served_is_the_whole_state():
    """A resumed run must get the very next batch, in the middle of an epoch and at its end."""
    tokens, paragraphs = text_of([30, 20, 25])
    straight = TrainingBatches(tokens, paragraphs, 6, 4, seed=2)
    for _ in range(3 * straight.windows_per_epoch):
        resumed = TrainingBatches(tokens, paragraphs, 6, 4, seed=2, served=straight.served)
        assert all(map(torch.equal, next(resumed), next(straight)))
        assert resumed.served == straight.served


def test_seeds_and_epochs_differ():
    """Paragraphs and windows are shuffled anew for each."""
    tokens, paragraphs = text_of([10] * 20)
    first, second = (TrainingBatches(tokens, paragraphs, 8, 1, seed=seed) for seed in (1, 2))
    orders = [take(first, first.windows_per_epoch) for _ in range(2)]
    orders.append(take(second, second.windows_per_epoch))
    for one, other in itertools.combinations(orders, 2):
        assert one != other
        assert sorted(one) != sorted(other)  # other paragraphs meet: not the same windows either


def test_training_does_not_touch_the_global_random_streams():
    """Dropout and sampling would depend on how many batches were made."""
    tokens, paragraphs = text_of([30, 20])
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    take(TrainingBatches(tokens, paragraphs, 6, 4, seed=2), 40)
    assert np.random.get_state()[1].tolist() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(("block_size", "lengths"), SIZES)
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_shares_of_all_processes_make_the_batch(block_size, lengths, world_size):
    """Id for id and row for row: as many processes as one likes train the same model."""
    tokens, paragraphs = text_of(lengths)
    alone = TrainingBatches(tokens, paragraphs, block_size, 12, seed=5)
    shares = [
        TrainingBatches(tokens, paragraphs, block_size, 12, 5, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(3 * alone.windows_per_epoch // 12 + 3):  # over the ends of epochs
        whole, parts = next(alone), [next(share) for share in shares]
        assert all(len(inputs) == 12 // world_size for inputs, _ in parts)
        for one, others in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(others))
        assert {share.served for share in shares} == {alone.served}


def test_a_run_goes_on_with_another_number_of_processes():
    """Two processes, then four, then one: the same global batches as of one alone."""
    tokens, paragraphs = text_of([30, 20, 25])
    alone, served = TrainingBatches(tokens, paragraphs, 6, 8, seed=2), 0
    for world_size in (2, 4, 1):
        shares = [
            TrainingBatches(tokens, paragraphs, 6, 8, 2, served, rank, world_size)
            for rank in range(world_size)
        ]
        for _ in range(5):
            inputs = torch.cat([next(share)[0] for share in shares])
            assert torch.equal(inputs, next(alone)[0])
        served = shares[0].served
        assert served == alone.served


def test_a_process_looks_up_only_its_share():
    """Otherwise eight processes would each do the work, and read the file, for all of them."""
    tokens, paragraphs = text_of([30, 20, 25])
    looked_up = []

    class Watched(np.ndarray):
        def __getitem__(self, places):
            looked_up.append(np.shape(places))
            return np.asarray(self)[places]

    batches = TrainingBatches(tokens, paragraphs, 6, 8, seed=2, rank=1, world_size=4)
    batches.tokens = tokens.view(Watched)
    next(batches)
    assert looked_up == [(2, 7)]
    looked_up.clear()
    assert len(list(evaluation_batches(tokens.view(Watched), 6, 4, 11, 1, world_size=2))) == 1
    assert looked_up == [(4, 7)]


@pytest.mark.parametrize("length", [2, 6, 7, 20, 21, 22, 100])
@pytest.mark.parametrize("windows", [None, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_share_out_an_evaluation(length, windows, world_size):
    """Every batch goes to just one of them, the shorter one at the end too."""
    whole = list(evaluation_batches(np.arange(length), 5, 2, windows))
    for rank in range(world_size):
        share = evaluation_batches(np.arange(length), 5, 2, windows, rank, world_size)
        for batch, other in zip(share, whole[rank::world_size], strict=True):
            assert all(map(torch.equal, batch, other))


@pytest.mark.parametrize("count", [*range(1, 12), 99, 100, 101, 1023, 1024, 1025, 9999])
def test_a_permutation_has_each_number_once(count):
    """In whatever pieces it is asked for."""
    for seed in range(20):
        order = Permutation(count, np.random.default_rng(seed))
        numbers = order[np.arange(count)]
        assert np.sort(numbers).tolist() == list(range(count))
        assert [order[np.array([place])].item() for place in range(min(count, 9))] == list(
            numbers[:9]
        )


def test_a_permutation_looks_like_one_that_was_shuffled():
    """Neighbours end up anywhere, and not together, by standards that numpy's own meets."""
    count, permutations = 5000, 100
    together, products, moved = [], [], np.zeros(50)
    for seed in range(permutations):
        numbers = Permutation(count, np.random.default_rng(seed))[np.arange(count)]
        together.append((np.abs(np.diff(numbers)) == 1).sum())  # 2 on average
        products.append(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])
        moved += np.histogram((numbers - np.arange(count)) % count, 50, (0, count))[0]
    assert abs(np.mean(together) - 2) < 0.6
    assert abs(np.mean(products)) * (count * permutations) ** 0.5 < 4
    assert 0.8 < np.std(products) * count**0.5 < 1.2
    expected = count * permutations / 50
    assert ((moved - expected) ** 2 / expected).sum() < 100  # chi-squared, 49 degrees of freedom


def test_permutations_of_a_few_come_equally_often():
    """A seed must not favour an order: 24 of four things, in 4,800 tries."""
    tries = [Permutation(4, np.random.default_rng(seed))[np.arange(4)] for seed in range(4800)]
    _, often = np.unique(tries, axis=0, return_counts=True)
    assert len(often) == 24
    assert 120 < often.min() <= often.max() < 280


def test_what_batches_keep_does_not_grow_with_the_windows():
    """An order of all windows of 4 GB of text took a gigabyte."""
    tokens = np.broadcast_to(np.uint8(0), 10**12)
    paragraphs = np.arange(0, 10**12 + 1, 10**10)
    batches = TrainingBatches(tokens, paragraphs, 128, 64, seed=0)
    tracemalloc.start()
    next(batches)
    next(evaluation_batches(tokens, 128, 64))
    assert tracemalloc.get_traced_memory()[1] < 20e6  # the tables: 6 * 8 * 125,000
    tracemalloc.stop()


@pytest.mark.parametrize("length", [2, 6, 7, 20, 21, 22, 100])
@pytest.mark.parametrize("block_size", [1, 5, 20])
@pytest.mark.parametrize("windows", [None, 100])
def test_a_whole_evaluation_predicts_each_token_once(length, block_size, windows):
    """The loss of a split must weigh every token alike, also those after the last whole window."""
    tokens = np.arange(length, dtype=np.uint8)
    batches = list(evaluation_batches(tokens, block_size, 3, windows))
    for inputs, targets in batches:
        assert torch.equal(inputs + 1, targets)
        assert targets.dtype == inputs.dtype == torch.int64
        assert targets.shape[0] <= 3 and targets.shape[1] <= block_size
    predicted = torch.cat([targets.flatten() for _, targets in batches])
    assert predicted.tolist() == list(range(1, length))


@pytest.mark.parametrize("windows", range(1, 20))
def test_some_evaluation_windows_are_apart_and_evenly_spaced(windows):
    """A few windows must stand for the whole split, not for its beginning; the same every time."""
    tokens = np.arange(104)
    batches = list(evaluation_batches(tokens, 5, 4, windows))
    assert [len(inputs) for inputs, _ in batches[:-1]] == [4] * (len(batches) - 1)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert len(starts) == windows
    gaps = torch.diff(torch.cat([starts, torch.tensor([100])]))
    assert gaps.min() >= 5
    assert gaps.max() - gaps.min() <= 5
    again = evaluation_batches(tokens, 5, 4, windows)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, again, strict=True))


# ------------------------------------------------------------------------------- the folder


@pytest.fixture
def folder(tmp_path):
    """A prepared text as prepare.py writes it: 60 tokens to train on, 12 for validation."""
    for split, lengths in {"train": [25, 35], "val": [12]}.items():
        tokens, paragraphs = text_of(lengths)
        np.save(tmp_path / f"{split}.npy", tokens.astype(np.uint8))
        np.save(tmp_path / f"{split}_paragraphs.npy", paragraphs)
    tokenizer = CharTokenizer(map(chr, range(60))).state()
    write_meta(tmp_path, {"format": 1, "fingerprint": "ab12", "tokenizer": tokenizer})
    return tmp_path


def write_meta(folder, meta):
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")


def test_a_dataset_is_read_from_its_folder(folder):
    """All that training needs, with the tokens left on the disk."""
    dataset = load_dataset(folder)
    assert dataset.train.tolist() == list(range(60))
    assert dataset.val.tolist() == list(range(12))
    assert dataset.train_paragraphs.tolist() == [0, 25, 60]
    assert dataset.val_paragraphs.tolist() == [0, 12]
    assert isinstance(dataset.train, np.memmap)
    assert dataset.tokenizer.vocab_size == 60
    assert dataset.meta["fingerprint"] == "ab12"
    batches = TrainingBatches(dataset.train, dataset.train_paragraphs, 8, 2, seed=0)
    assert take(batches, 4) == flatten_and_slide(dataset.train, [0, 25, 60], 8, 0, 0)[:4]


DAMAGES = [  # what is done to the folder, and what the message says of it
    (lambda folder: (folder / "meta.json").unlink(), "meta.json: No such file"),
    (lambda folder: (folder / "meta.json").write_text('{"format', "utf-8"), "meta.json: damaged"),
    (
        lambda folder: write_meta(folder, {"format": 2}),
        "not of the format 1 that this version reads",
    ),
    (lambda folder: (folder / "val.npy").unlink(), "val.npy: No such file"),
    (lambda folder: (folder / "val.npy").write_bytes(b""), "val.npy: damaged"),
    (lambda folder: (folder / "val.npy").write_bytes(b"not an array"), "val.npy: damaged"),
    (lambda folder: os.truncate(folder / "train.npy", 150), "train.npy: damaged"),
    (lambda folder: np.save(folder / "train.npy", np.arange(59)), "paragraphs.npy does not fit"),
    (lambda folder: np.save(folder / "val_paragraphs.npy", []), "paragraphs.npy does not fit"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_folder_that_is_no_dataset_is_named(folder, damage, message):
    """One line with the folder, what is wrong with it and the command that mends it."""
    damage(folder)
    with pytest.raises(UserError) as raised:
        load_dataset(folder)
    text = str(raised.value)
    assert message in text
    assert str(folder) in text and "python prepare.py" in text
    assert len(text.splitlines()) == 1


def test_the_shortest_text_that_works_is_exact(folder):
    """block_size + 1 tokens are enough, block_size are not; either split may be the short one."""
    dataset = load_dataset(folder)
    check_lengths(dataset, 11)
    with pytest.raises(UserError) as raised:
        check_lengths(dataset, 12)
    assert str(raised.value) == (
        "the validation split has 12 tokens, and block_size = 12 needs at least 13: "
        "lower block_size to at most 11 or prepare a longer text"
    )
    TrainingBatches(dataset.val, dataset.val_paragraphs, 11, 3, seed=0)  # a single window
    assert len(list(evaluation_batches(dataset.val, 11, 3))) == 1


def test_both_splits_that_are_too_short_are_told_at_once(folder):
    """Who mends one should not run into the other."""
    np.save(folder / "val.npy", np.zeros(0, np.uint8))
    np.save(folder / "val_paragraphs.npy", np.zeros(1, np.int64))
    with pytest.raises(UserError) as raised:
        check_lengths(load_dataset(folder), 64)
    training, validation = str(raised.value).splitlines()
    assert "training split has 60 tokens" in training and "at least 65" in training
    assert "validation split has 0 tokens" in validation and "lower" not in validation
