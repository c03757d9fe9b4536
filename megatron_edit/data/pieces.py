r"""Where a long text can be cut so that its pieces give the same token ids as the whole.

A tokenizer of the tokenizers library needs some 150 bytes for each byte of a text, so long ones
are given to it in pieces. A cut is exact where no word of the pre-tokenizer, which the model sees
one at a time, and no added token reaches across it, and where neither looks across it. For
byte-level tokenizers whose words come from the usual regular expressions that is between a letter
and white space or a sign other than the apostrophe:

* None of their alternatives goes on behind a letter with anything but letters, marks and, from an
  apostrophe on, a contraction. So a word ends at the cut.
* A match depends on what stands behind its beginning only, and ``(?!\S)`` alone looks beyond its
  end, from white space. So the words before the cut do not depend on the text behind it, nor those
  behind it on the text before.
* No canonical composition goes on with one of these signs, and the letter is one that composition
  leaves alone, so that the same holds behind an NFC normalizer.

Any other tokenizer has no such place, as far as is known here, and gets its texts whole.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

# Takes a text and a position; gives the first place from there on to cut at, or the text's length.
Cut = Callable[[str, int], int]

# A piece goes on to the first cut behind so many characters.
PIECE_CHARACTERS = 1 << 16
# What is tokenised at once; several pieces, as the library tokenises them in parallel.
GROUP_CHARACTERS = 1 << 18

# ASCII, and the punctuation of typography and of Chinese and Japanese texts.
_RANGES = ((0x2010, 0x2028), (0x3001, 0x3004), (0x3008, 0x3012), (0xFF01, 0xFF10), (0xFF1A, 0xFF21))
_SIGNS = " \t\r\n" + string.punctuation.replace("'", "")
_SIGNS += "".join(chr(code) for bounds in _RANGES for code in range(*bounds))

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
# Alternatives that find every letter, and those that may stand beside one of them.
_LETTERS = (
    r" ?\p{L}+",
    rf"{_BEFORE}\p{{L}}+",
    rf"{_BEFORE}+\p{{L}}+",
    rf"{_BEFORE}[\p{{L}}\p{{M}}]+",
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*",
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
)
_OTHERS = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
)
_ONE_OF_OTHERS = f"(?:{'|'.join(map(re.escape, _OTHERS))})"
_WORDS = re.compile(
    rf"(?:{_ONE_OF_OTHERS}\|)*(?:{'|'.join(map(re.escape, _LETTERS))})(?:\|{_ONE_OF_OTHERS})*"
)


def nowhere(text: str, begin: int) -> int:
    """Cuts no text."""
    return len(text)


def at_white_space(text: str, begin: int) -> int:
    """Cuts at any white space."""
    match = re.compile(r"\s").search(text, begin)
    return match.start() if match else len(text)


class BeforeSign:
    """Cuts between a letter and one of some signs.

    Args:
        signs: The signs.
    """

    def __init__(self, signs: str) -> None:
        self._pattern = re.compile(rf"(?<=[^\W\d_])[{re.escape(signs)}]")

    def __call__(self, text: str, begin: int) -> int:
        """The first such place from ``begin`` on, or the length of the text."""
        places = (match.start() for match in self._pattern.finditer(text, begin))
        return next((place for place in places if _is_composed_letter(text[place - 1])), len(text))


def _is_composed_letter(character: str) -> bool:
    return character.isalpha() and unicodedata.is_normalized("NFC", character)


def cut_for(backend: Any) -> Cut:
    """Where texts for a tokenizer can be cut: ``nowhere`` if no such place is known.

    Args:
        backend: ``tokenizers.Tokenizer``, or None for a tokenizer of another library.
    """
    try:
        normalizer, words = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    except Exception:
        # The library raises plain exceptions for parts that are written in Python.
        return nowhere
    added = backend.get_added_tokens_decoder().values()
    composed = normalizer in (None, {"type": "NFC"})
    if not composed or any(token.single_word or token.rstrip for token in added):
        return nowhere
    # In both forms, as some are looked for behind the normalizer.
    contents = [f for t in added for f in (t.content, unicodedata.normalize("NFC", t.content))]
    inside = {b for text in contents for a, b in pairwise(text) if a.isalpha()}
    signs = "".join(sign for sign in _SIGNS if sign not in inside)
    return BeforeSign(signs) if signs and _ends_words_at_letters(words) else nowhere


def _settings(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _ends_words_at_letters(words: Any) -> bool:
    parts = words["pretokenizers"] if words and words["type"] == "Sequence" else [words]
    *splits, last = parts or [None]
    if not last or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    # Runs of digits may be set apart before, which lets all else go on to the next part.
    found = [_finds_words(part) for part in splits if part["type"] != "Digits"]
    return all(found) and (bool(found) or last["use_regex"])


def _finds_words(part: Any) -> bool:
    if part["type"] != "Split" or part["behavior"] != "Isolated" or part["invert"]:
        return False
    return bool(_WORDS.fullmatch(part["pattern"].get("Regex", "")))


def pieces(text: str, cut: Cut) -> Iterator[str]:
    """Cuts a long text into pieces; together they are the text."""
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS:
        end = cut(text, begin + PIECE_CHARACTERS)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def groups(texts: Sequence[str], cut: Cut) -> Iterator[list[tuple[int, str]]]:
    """Yields the pieces of texts, each with the number of its text, a bounded lot at a time."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        for piece in pieces(text, cut):
            group.append((number, piece))
            size += len(piece)
            if size >= GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group
