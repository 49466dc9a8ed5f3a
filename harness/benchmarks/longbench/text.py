"""Words of a text, as LongBench's metrics see them.

Source: THUDM/LongBench at 2e00731f (metrics.py), as behaviour; Chinese words come from jieba 0.42.1.
"""

import functools
import logging
import re
import string
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jieba

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

# First and last code point of each run. U+300A, U+3008, U+3009, U+3000, U+FF0E and the middle dots are missing from
# the official list, so they stay in the words.
_CHINESE_PUNCTUATION_RUNS = (
    (0x2013, 0x2014),
    (0x2018, 0x2019),
    (0x201B, 0x201F),
    (0x2026, 0x2027),
    (0x3001, 0x3003),
    (0x300B, 0x3011),
    (0x3014, 0x301F),
    (0x3030, 0x3030),
    (0x303E, 0x303F),
    (0xFE4F, 0xFE4F),
    (0xFF01, 0xFF0D),
    (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF64),
)
_DROP_ASCII: dict[int, None] = dict.fromkeys(map(ord, string.punctuation))
_DROP_CHINESE: dict[int, None] = _DROP_ASCII | {
    code: None for first, last in _CHINESE_PUNCTUATION_RUNS for code in range(first, last + 1)
}


def is_blank(text: str) -> bool:
    """Return whether `text` holds nothing but white space and full stops, which ROUGE cannot score."""
    return not text.replace(".", " ").strip()


def english_words(text: str) -> list[str]:
    """Return the words of `text` in lower case, without ASCII punctuation and without a, an, the (as SQuAD does)."""
    return _ARTICLES.sub(" ", text.lower().translate(_DROP_ASCII)).split()


def chinese_words(text: str) -> list[str]:
    """Return jieba's words of `text` in lower case, without punctuation and white space; emptied words are left out."""
    cleaned = ("".join(word.lower().translate(_DROP_CHINESE).split()) for word in cut_chinese(text))
    return [word for word in cleaned if word]


@functools.lru_cache(maxsize=32)
def cut_chinese(text: str) -> tuple[str, ...]:
    """Return jieba's words of `text` in order, punctuation and white space among them (accurate mode, HMM on)."""
    return tuple(_segmenter().cut(text))


@functools.cache
def _segmenter() -> "jieba.Tokenizer":
    """Return a segmenter of our own, so that words added to jieba elsewhere in the process change no score.

    jieba trusts any `jieba.cache` in the temporary folder, of whatever version; the version in our file name prevents
    that. It is imported here because that takes 0.4 s, which scores without Chinese need not wait for.
    """
    import jieba

    jieba.setLogLevel(logging.WARNING)
    segmenter = jieba.Tokenizer()
    segmenter.cache_file = f"jieba-{version('jieba')}-default.cache"
    segmenter.initialize()
    return segmenter
