"""One tokenizer's text in the tokens of another: nothing is lost, nothing is doubled, nothing settled changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafters.translation import Reading, Spelling, Translation, translation_between
from tests.token_pairs import SCRIPTS, SENTENCES, bytes_only, lettered, scripts
from tests.tokenizers_for_tests import trained_tokenizer

KINDS = ["english", "scripts", "pieces", "spaced"]
TOKENIZERS = {kind: scripts(kind) for kind in KINDS}
SPELLINGS = {kind: Spelling(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
TEXTS = st.one_of(
    st.text(st.sampled_from("ab cđệ漢字😀👩‍👧\n\t.12 "), max_size=60),
    st.lists(st.sampled_from(" ".join(SENTENCES + SCRIPTS).split(" ")), max_size=20).map(" ".join),
    st.text(max_size=30).filter(lambda text: "\ufffd" not in text),
).map(lambda text: text.encode("utf-8", "ignore").decode())


def reading_of(translation: Translation, tokens: list[int], cuts: list[int]) -> Reading:
    """The tokens, read in several parts; what is settled must never change."""
    reading, settled = Reading(translation), []
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        reading.extend(tokens[begin:end])
        assert reading.settled[: len(settled)] == settled
        assert reading.ids[: len(reading.settled)] == reading.settled
        settled = list(reading.settled)
    assert reading.num_read == len(tokens)
    return reading


@pytest.mark.parametrize("ours", KINDS)
@pytest.mark.parametrize("theirs", KINDS)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS, data=st.data())
def test_a_reading_spells_the_text(ours, theirs, text, data):
    """However it is cut into tokens, in the middle of characters too."""
    translation = Translation(SPELLINGS[ours], SPELLINGS[theirs])
    tokens = translation.target.encode(text.encode())
    if data.draw(st.booleans()):  # the target need not write as its tokenizer does
        tokens = [index for byte in text.encode() for index in translation.target.encode(bytes([byte]))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    reading = reading_of(translation, tokens, cuts)
    assert translation.draft.spelled(reading.ids) == text.encode()
    assert TOKENIZERS[ours].decode(tokens) == text


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("text", SENTENCES + SCRIPTS[:1] + SCRIPTS[2:3])
def test_words_are_read_as_the_draft_models_tokenizer_writes_them(theirs, text):
    translation = Translation(SPELLINGS["english"], SPELLINGS[theirs])
    tokens = translation.target.encode(text.encode())
    ids = reading_of(translation, tokens, list(range(len(tokens)))).ids
    assert ids == [*translation.draft.prefix, *translation.draft.encode(text.encode())]


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, data=st.data())
def test_written_text_continues_what_the_target_has(text, data):
    """A draft model's tokens become tokens of the target that spell the same, behind any number of earlier bytes."""
    translation = Translation(SPELLINGS["english"], SPELLINGS["scripts"])
    cut = data.draw(st.integers(0, len(text.encode())))
    context = translation.target.encode(text.encode()[:cut])
    written = translation.written(translation.draft.encode(text.encode()[cut:]), context, 10**6)
    assert translation.target.spelled([*context, *written]) == text.encode()


def test_broken_characters_are_read_byte_by_byte_until_they_are_whole():
    translation = Translation(Spelling(bytes_only()), SPELLINGS["scripts"])
    reading, emoji = Reading(translation), "😊".encode()
    sizes = []
    for byte in b"I am " + emoji:
        reading.extend(translation.target.encode(bytes([byte])))
        sizes.append(len(reading.ids))
    assert translation.draft.spelled(reading.ids) == b"I am " + emoji
    assert reading.ids == translation.draft.encode(b"I am " + emoji)
    assert max(sizes) > sizes[-1]  # the last byte made one token of several


def test_special_tokens_keep_their_roles_and_starts_are_never_doubled():
    ours, theirs = TOKENIZERS["english"], TOKENIZERS["pieces"]
    translation = translation_between(ours, theirs)
    reading = Reading(translation)
    assert reading.ids == [theirs.bos_token_id]
    start, end = ours.bos_token_id, ours.eos_token_id
    reading.extend([start, *ours.encode("the dog"), end, ours.pad_token_id, start, *ours.encode("dog")])
    wanted = [theirs.bos_token_id, *SPELLINGS["pieces"].encode(b"the dog"), theirs.eos_token_id, theirs.pad_token_id]
    assert reading.ids == [*wanted, theirs.bos_token_id, *SPELLINGS["pieces"].encode(b"dog")]


def test_special_tokens_without_an_image_are_left_out_and_part_the_text():
    ours, theirs = trained_tokenizer(), TOKENIZERS["scripts"]
    reading = Reading(translation_between(ours, theirs))
    reading.extend([*ours.encode("the do"), ours.convert_tokens_to_ids("<|user|>"), *ours.encode("g sleeps"), 10**6])
    assert reading.ids == [*theirs.encode("the do"), *theirs.encode("g sleeps")]


def test_the_text_of_a_special_token_is_not_that_token():
    ours, theirs = TOKENIZERS["scripts"], TOKENIZERS["english"]
    translation = translation_between(ours, theirs)
    reading = Reading(translation)
    reading.extend(translation.target.encode(b"a <end> b"))
    assert theirs.eos_token_id not in reading.ids
    assert translation.draft.spelled(reading.ids) == b"a <end> b"


def test_tokens_are_shared_by_what_they_spell():
    ours, theirs = TOKENIZERS["english"], TOKENIZERS["pieces"]
    images = translation_between(ours, theirs).to_target
    assert images[theirs.convert_tokens_to_ids("▁the")] == ours.convert_tokens_to_ids("Ġthe")
    assert images[theirs.eos_token_id] == ours.eos_token_id
    letter, byte = theirs.convert_tokens_to_ids("e"), theirs.convert_tokens_to_ids("<0x65>")
    assert images[letter] == images[byte] == ours.convert_tokens_to_ids("e")  # two with one image
    assert translation_between(theirs, ours).to_target[ours.convert_tokens_to_ids("e")] == letter


def test_a_token_of_the_end_is_written_last():
    ours, theirs = TOKENIZERS["english"], TOKENIZERS["scripts"]
    translation = translation_between(ours, theirs)
    tokens = [*theirs.encode(" the dog"), theirs.eos_token_id, *theirs.encode(" sleeps")]
    assert translation.written(tokens, [], 100) == [*ours.encode(" the dog"), ours.eos_token_id]
    assert translation.written(tokens, [], 1) == ours.encode(" the dog")[:1]


def test_bytes_without_a_token_are_left_out():
    translation = translation_between(bytes_only(), lettered(list("abc")))
    reading = Reading(translation)
    reading.extend(translation.target.encode(b"a?b"))
    assert translation.draft.spelled(reading.ids) == b"ab"


def test_a_long_text_without_spaces_settles_too():
    translation = translation_between(TOKENIZERS["english"], TOKENIZERS["scripts"])
    text = SCRIPTS[1].split("。")[0] * 40
    reading = reading_of(translation, translation.target.encode(text.encode()), [30, 31, 200, 400])
    assert len(reading.open) < 200 < len(reading.settled)
    assert translation.draft.spelled(reading.ids) == text.encode()
