"""Text to token ids and back: a token is a character."""

from collections.abc import Iterable


class CharTokenizer:
    """Characters <-> ids, the characters in code-point order: id 0 is the smallest.

    Any tokenizer has `encode`, `decode`, `state` and `vocab_size`; `load_tokenizer` makes it anew.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        """How many different tokens there are."""
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The id of each character. Raises ValueError that lists those it does not know."""
        if unknown := self.unknown(text):
            listed = ", ".join(map(repr, unknown[:20])) + (", ..." if len(unknown) > 20 else "")
            raise ValueError(f"not in the vocabulary of {self.vocab_size} characters: {listed}")
        return [self._ids[character] for character in text]

    def unknown(self, text: str) -> list[str]:
        """The characters of text that have no id, each once, in code-point order."""
        return sorted(set(text) - self._ids.keys())

    def decode(self, ids: Iterable[int]) -> str:
        """The text that the ids stand for."""
        return "".join(self.characters[i] for i in ids)

    def state(self) -> dict[str, str]:
        """Plain values for JSON and checkpoints, from which `load_tokenizer` makes it anew."""
        return {"kind": "characters", "characters": self.characters}


def load_tokenizer(state: dict[str, str]) -> CharTokenizer:
    """The tokenizer that `state()` told of. Raises ValueError for a kind that is not known here."""
    if state.get("kind") != "characters":
        raise ValueError(f"tokenizer of kind {state.get('kind')!r}; this version knows: characters")
    return CharTokenizer(state["characters"])
