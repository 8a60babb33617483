"""Layers that append in place hold what the host's layers hold."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_specdec import host
from tests.models import prompts, tiny


def new_states(width, num_rows=3, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + width)
    return tuple(torch.randn(num_rows, 2, width, 4, generator=generator) for _ in range(2))


def pair(width=5):
    """The host's cache, and one like it that appends in place."""
    theirs, mine = DynamicCache(), DynamicCache()
    for layer in range(2):
        theirs.update(*new_states(width, seed=layer), layer)
        mine.update(*new_states(width, seed=layer), layer)
    host.start_recording(mine)
    return theirs, mine


def assert_same(theirs, mine):
    for one, other in zip(theirs.layers, mine.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def step(number, caches, num_rows):
    """One of the things that happen to a cache between two passes; returns the rows that are left."""
    slots = caches[0].get_seq_length()
    for cache in caches:
        if number % 5 == 1:
            host.crop(cache, min(3, slots - 1))
        elif number % 5 == 2:
            order = torch.randperm(min(4, slots), generator=torch.Generator().manual_seed(number))
            host.reorder_newest(cache, order.repeat(num_rows, 1), slots)
        elif number % 5 == 3:
            index = torch.arange(slots).roll(number)[: slots - 1].repeat(num_rows, 1)
            host.gather_slots(cache, index, slots)
        elif number == 14:
            host.keep_rows(cache, torch.tensor([2, 0]))
    return 2 if number >= 14 else num_rows


def test_they_hold_the_same_whatever_happens_between_passes():
    caches, num_rows = pair(), 3
    for number in range(60):
        num_rows = step(number, caches, num_rows)
        for layer in range(2):
            states = new_states(1 + number % 7, num_rows, seed=number + layer)
            shown = [cache.update(*states, layer) for cache in caches]
            assert all(torch.equal(one, other) for one, other in zip(*shown, strict=True))
        assert_same(*caches)


def test_nothing_is_copied_while_there_is_room():
    _, mine = pair()
    for layer in range(2):
        mine.update(*new_states(1), layer)
    place = mine.layers[0].keys.data_ptr()
    for _ in range(40):
        for layer in range(2):
            mine.update(*new_states(3), layer)
        host.crop(mine, 2)
        assert mine.layers[0].keys.data_ptr() == place


def test_tensors_of_others_are_never_written_into():
    theirs, mine = pair()
    held = mine.layers[0].keys
    before = held.clone()
    mine.update(*new_states(2), 0)
    host.crop(mine, 2)
    mine.update(*new_states(3, seed=7), 0)
    assert torch.equal(held, before) and torch.equal(mine.layers[0].keys[:, :, :5], theirs.layers[0].keys)


def test_copies_go_their_own_ways():
    _, mine = pair()
    mine.update(*new_states(2), 0)
    other = copy.deepcopy(mine)
    mine.update(*new_states(1, seed=1), 0)
    other.update(*new_states(1, seed=2), 0)
    assert torch.equal(mine.layers[0].keys[:, :, -1:], new_states(1, seed=1)[0])
    assert torch.equal(other.layers[0].keys[:, :, -1:], new_states(1, seed=2)[0])


def test_afterwards_they_are_the_hosts_again():
    theirs, mine = pair()
    for cache in (theirs, mine):
        cache.update(*new_states(2), 0)
        cache.update(*new_states(2), 1)
    host.stop_recording(mine)
    assert {type(layer) for layer in mine.layers} == {DynamicLayer}
    assert vars(mine.layers[0]).keys() - vars(theirs.layers[0]).keys() == {"whole_keys", "whole_values"}
    assert mine.layers[0].whole_keys is None
    theirs.update(*new_states(1), 0), mine.update(*new_states(1), 0)
    assert_same(theirs, mine)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_returned_cache_has_the_hosts_layers(llama, num_rows):
    ids, mask = prompts(num_rows)
    output = llama.generate(
        ids, attention_mask=mask, max_new_tokens=12, assistant="prompt-lookup", return_dict_in_generate=True
    )
    assert {type(layer) for layer in output[host.CACHE_NAME].layers} == {DynamicLayer}


def test_offloaded_layers_stay_as_they_are():
    cache = DynamicCache(config=tiny().config)
    cache.offloading = True
    host.start_recording(cache)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
