"""Word-level tokenizers in the two formats that the stock loaders read.

Both know the words of the captions as single tokens and spell any other word in letters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from string import ascii_lowercase

from transformers import CLIPTokenizer, T5TokenizerFast

from workflow_rl.embedded.world import all_captions, placed_captions

MAX_LENGTH = 16
"""Tokens per prompt; a caption has five words, or eight."""


def caption_words() -> list[str]:
    """The words of all captions, sorted."""
    captions = all_captions() + placed_captions()
    return sorted({word for caption in captions for word in str(caption).split()})


def byte_pair_merges(words: list[str]) -> list[tuple[str, str]]:
    """Merge rules under which each word becomes one token.

    Byte-pair encoding (Sennrich et al., 2016): merge the commonest pair, ties by spelling, until
    no word has two parts. The last letter carries the end-of-word mark of CLIP's vocabulary.
    """
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(p for parts in spelled for p in itertools.pairwise(parts)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_merge(parts, best) for parts in spelled]
    return merges


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's format: byte-pair encoding, padded with the end-of-text token."""
    merges = byte_pair_merges(caption_words())
    letters = list(ascii_lowercase)
    tokens = letters + [letter + "</w>" for letter in letters]
    tokens += list(dict.fromkeys(left + right for left, right in merges))
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_LENGTH)


def t5_tokenizer() -> T5TokenizerFast:
    """T5's format: unigram pieces with a word-start mark; letters cost more than whole words."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -2.0) for word in caption_words()]
    known = {piece for piece, _ in pieces}
    letters = ["▁", *ascii_lowercase]
    pieces += [(letter, -20.0) for letter in letters if letter not in known]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=MAX_LENGTH)
