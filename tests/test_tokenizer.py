"""The rules of tokenizer.py."""

import json

import pytest

from tokenizer import CharTokenizer, load_tokenizer


@pytest.mark.parametrize(
    "text", ["", "a", "Once upon a time\n", "从前\tü\u0308 \ufeff\r\n🐸", "\x00\ud800"]
)
def test_round_trip(text):
    """Whatever a text is made of comes back, also combining marks and characters beyond 16 bits."""
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


def test_ids_are_in_the_order_of_code_points():
    """The same text gives the same ids whatever order its characters were found in."""
    tokenizer = CharTokenizer("cab\nbac")
    assert tokenizer.vocab_size == 4
    assert tokenizer.characters == "\nabc"
    assert tokenizer.encode("\nabc") == [0, 1, 2, 3]
    assert tokenizer.decode([3, 1]) == "ca"
    assert CharTokenizer(["b", "a", "c", "\n"]).state() == tokenizer.state()


def test_unknown_characters_are_listed():
    """Each once, in order, and as Python writes them, so that a blank can be seen."""
    tokenizer = CharTokenizer("helo wrd")
    assert tokenizer.unknown("hello world") == []
    assert tokenizer.unknown("Hello, World, Hello\t") == ["\t", ",", "H", "W"]
    with pytest.raises(ValueError) as raised:
        tokenizer.encode("Hello, World, Hello\t")
    assert str(raised.value) == r"not in the vocabulary of 8 characters: '\t', ',', 'H', 'W'"


def test_a_long_list_of_unknown_characters_is_cut():
    """A Chinese text given to an English model should not fill the screen."""
    with pytest.raises(ValueError, match=r"'a', .*'t', \.\.\.$"):
        CharTokenizer("").encode("abcdefghijklmnopqrstu")
    with pytest.raises(ValueError, match=r"'t'$"):
        CharTokenizer("").encode("abcdefghijklmnopqrst")


@pytest.mark.parametrize("ascii_only", [True, False])
def test_its_state_goes_through_json(ascii_only):
    """A checkpoint or meta.json holds all that is needed to read its ids again."""
    tokenizer = CharTokenizer('"\\\n从 🐸')
    state = json.loads(json.dumps(tokenizer.state(), ensure_ascii=ascii_only))
    again = load_tokenizer(state)
    assert again.characters == tokenizer.characters
    assert again.encode("从🐸") == tokenizer.encode("从🐸")


@pytest.mark.parametrize("state", [{"kind": "words", "characters": "ab"}, {"characters": "ab"}])
def test_another_kind_of_tokenizer_is_refused(state):
    """What a later version wrote must not be taken for characters."""
    with pytest.raises(ValueError, match=f"{state.get('kind')!r}; this version knows: characters"):
        load_tokenizer(state)
