"""An attention mask of ones is left out of a traced step if it is left out of the real one, and only then."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.simulation.attention_masks import HostValues, masks_by_their_values
from lightning_memtools.simulation.fakes import TensorExchange, fake_mode
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes
from tests.checkpointing.foreign_models import made, measured_peak

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
ONES = torch.ones(2, 5, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("name", "padding"), [("bert", 0), ("bert", 8), ("pegasus", 0)])
def test_the_predicted_peak_is_the_measured_one_with_and_without_padding(name, padding):
    model, batch = made(name)
    if padding:
        batch["attention_mask"][0, -padding:] = 0
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    assert plan.refused is None
    assert measured_peak(model, batch, plan) == plan.peak_bytes


@pytest.mark.parametrize(
    ("mask", "left_out"),
    [
        (ONES, True),
        (ONES.bool(), True),
        (PADDED, False),
        (PADDED.bool(), False),
        (PADDED.repeat(2, 1)[2:], False),  # a part of a larger tensor
        (PADDED[:, :3], True),
        (PADDED.float(), True),  # only whole numbers and flags are known
        (PADDED.to("meta"), True),  # no values
    ],
)
def test_a_mask_is_left_out_if_it_is_ones_or_not_known(mask, left_out):
    embedded = torch.empty(*mask.shape, 8)
    config = transformers.BertConfig(attn_implementation="sdpa")
    plain = masking.is_tracing
    with fake_mode(), masks_by_their_values():
        made = masking.create_bidirectional_mask(config, TensorExchange()(embedded), TensorExchange()(mask))
        assert (made is None) is left_out
    assert masking.is_tracing is plain


def test_values_are_those_of_views_and_forgotten_with_the_tensor():
    with fake_mode() as mode:
        mask = mode.from_tensor(PADDED)
        parts = mask.view(5, 2)[1:, 0], mask.bool(), mask[:1]
    values = HostValues()
    values.note(mask, PADDED)
    assert torch.equal(values.of(parts[0]), PADDED.view(5, 2)[1:, 0])
    assert values.of(parts[1]) is None
    assert torch.equal(values.of(parts[2]), PADDED[:1])
    same_memory = mask.detach()
    assert torch.equal(values.of(same_memory), PADDED)
    del mask, parts
    assert values.of(same_memory) is None


def test_values_of_a_part_are_not_those_of_the_rest():
    with fake_mode() as mode:
        whole = mode.from_tensor(torch.zeros(4, 5, dtype=torch.long))
    values = HostValues()
    part = whole[2:]
    values.note(part, PADDED)
    assert torch.equal(values.of(whole[3]), PADDED[1])
    assert values.of(whole) is values.of(whole[:2]) is values.of(whole[1:3]) is None


@pytest.mark.parametrize(
    ("positions", "packed"),
    [(torch.arange(4).repeat(2, 1), False), (torch.arange(2).repeat(2, 2), True), (torch.zeros(2, 4), False)],
)
def test_sequences_are_packed_if_their_positions_begin_again(positions, packed):
    with fake_mode(), masks_by_their_values():
        found = masking.find_packed_sequence_indices(TensorExchange()(positions))
    assert (found is not None) is packed


def test_all_modules_that_ask_are_as_before():
    names = ("_preprocess_mask_arguments", "find_packed_sequence_indices", "create_recurrent_attention_mask")
    before = [getattr(masking, name) for name in names]
    with masks_by_their_values():
        assert all(getattr(masking, name) is not one for name, one in zip(names, before, strict=True))
        with masks_by_their_values():
            pass
        assert masking.find_packed_sequence_indices is not before[1]
    assert [getattr(masking, name) for name in names] == before


def test_masks_on_the_host_are_read_as_ever_and_functions_kept_by_others_answer_no_more_afterwards():
    def is_left_out():
        return masking._ignore_causal_mask_sdpa(PADDED[1:].bool(), 5, 5, 0, 0)

    with masks_by_their_values():
        kept = masking._ignore_causal_mask_sdpa
        assert not is_left_out()
    assert kept is not masking._ignore_causal_mask_sdpa
    assert not kept(PADDED[1:].bool(), 5, 5, 0, 0)
    assert not is_left_out()


def test_threads_that_overlap_leave_all_as_before_and_each_answers_from_its_own_values():
    """The first thread leaves while the second is still within, and a third never was."""
    before = {name: vars(masking)[name] for name in ("is_tracing", "find_packed_sequence_indices")}
    positions = torch.arange(4).repeat(2, 1)
    second_is_within, first_has_left = threading.Event(), threading.Event()

    def knows_that_nothing_is_packed():
        with fake_mode():
            return masking.find_packed_sequence_indices(TensorExchange()(positions)) is None

    def first():
        with masks_by_their_values():
            second_is_within.wait(60)
            return knows_that_nothing_is_packed()

    def second():
        with masks_by_their_values():
            second_is_within.set()
            first_has_left.wait(60)
            return knows_that_nothing_is_packed()

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(one) for one in (first, second)]
        assert results[0].result(60)
        assert masking.is_tracing is not before["is_tracing"]
        assert not knows_that_nothing_is_packed()  # this thread is not within
        first_has_left.set()
        assert results[1].result(60)
    assert {name: vars(masking)[name] for name in before} == before


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        (lambda mask: mask.fill_(1), True),
        (lambda mask: mask[:, -2:].fill_(1), True),
        (lambda mask: mask.__setitem__((slice(None), slice(-2, None)), 1), True),
        (lambda mask: mask.masked_fill_(mask == 0, 1), True),
        (lambda mask: mask.copy_(torch.tensor(1)), True),
        (lambda mask: mask[:1].fill_(1), False),
        (lambda mask: mask.add_(0), False),
    ],
)
def test_a_mask_that_a_step_changes_has_the_new_values(change, left_out):
    given = PADDED.clone()
    config = transformers.BertConfig(attn_implementation="sdpa")
    for _ in range(2):  # the second time with what is known of the operators
        with fake_mode() as mode, RepeatedFakes(mode), masks_by_their_values():
            exchange = TensorExchange()
            change(mask := exchange(given))
            made = masking.create_bidirectional_mask(config, exchange(torch.empty(*given.shape, 8)), mask)
            assert (made is None) is left_out
    assert torch.equal(given, PADDED)


def test_words_that_a_step_leaves_out_are_not_attended_to():
    config = transformers.BertConfig(attn_implementation="sdpa")
    with fake_mode() as mode, RepeatedFakes(mode), masks_by_their_values():
        mask = TensorExchange()(ONES)
        mask[:, -2:] = 0
        assert masking.create_bidirectional_mask(config, torch.ones(2, 5, 8), mask) is not None


def test_a_mask_that_is_changed_by_what_is_not_known_is_not_known():
    with fake_mode() as mode, RepeatedFakes(mode), masks_by_their_values():
        mask = TensorExchange()(PADDED)
        mask.copy_(torch.ones(2, 5, dtype=torch.long))
        config = transformers.BertConfig(attn_implementation="sdpa")
        assert masking.create_bidirectional_mask(config, torch.ones(2, 5, 8), mask) is None
