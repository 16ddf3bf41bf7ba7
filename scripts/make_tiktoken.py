#!/usr/bin/env python3
"""Records crates/ottava-data/tests/data/tiktoken.json: a small vocabulary of tiktoken in the form of Moonlight and Kimi K2, and the ids that tiktoken
gives to texts. Ottava converts the vocabulary on opening.

usage: make_tiktoken.py

Development only; `pip install tiktoken==0.14.0 regex`. The same bytes every time.
"""

import base64
import collections
import gzip
import json
from pathlib import Path

import regex
import tiktoken

ROOT = Path(__file__).resolve().parent.parent
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CHINESE = "水獭是半水栖的肉食性哺乳动物。水獭在水中捕鱼,海獭用石头打开贝类。汉字和かな混在一起。"
TEXTS = [
    "The otter, a furry mammal, swims 12345 km.",
    "水獭is半水栖的animal,海獭ABCdef。",
    "a/b //c\n/\n path/to/file.py\n\n",
    "It's WE'LL they'd Don't",
    "two  spaces,\ttab and   \n  a line  ",
    "ça va? Ünïcode ǅungla かな混在 🦦",
    "汉字/漢字\r\n",
    "<|im_end|>[BOS]a<|reserved_token_602|>",
    "",
]


def learned(lines, count):
    """The ranks of the bytes, then of `count` merges of the most frequent pairs within words. tiktoken learns no vocabularies."""
    split = regex.compile(PATTERN, regex.V1)
    words = collections.Counter(word for line in lines for word in split.findall(line))
    words = {tuple(bytes([byte]) for byte in word.encode()): times for word, times in words.items()}
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + count:
        pairs = collections.Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += times
        best = min((-times, pair) for pair, times in pairs.items() if pair[0] + pair[1] not in ranks)[1]
        ranks[best[0] + best[1]] = len(ranks)
        merged = collections.Counter()
        for word, times in words.items():
            out, at = [], 0
            while at < len(word):
                is_pair = word[at : at + 2] == best
                out.append(word[at] + word[at + 1] if is_pair else word[at])
                at += 1 + is_pair
            merged[tuple(out)] += times
        words = merged
    return ranks


def main():
    lines = gzip.decompress((ROOT / "data/wordnet-glosses.txt.gz").read_bytes()).decode().splitlines()[:300]
    ranks = learned(lines + 20 * [CHINESE], 344)
    names = {600: "[BOS]", 601: "[EOS]", 603: "<|im_end|>", 607: "[PAD]"}
    specials = {names.get(id, f"<|reserved_token_{id}|>"): id for id in range(600, 608)}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    ids = [encoding.encode(text, allowed_special="all") for text in TEXTS]
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    config = dict(tokenizer_class="TikTokenTokenizer", bos_token="[BOS]", eos_token="[EOS]", pad_token="[PAD]")
    config["added_tokens_decoder"] = {str(id): dict(content=name) | flags for id, name in names.items()}
    model = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path = ROOT / "crates/ottava-data/tests/data/tiktoken.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(model=model, config=config, texts=TEXTS, ids=ids), ensure_ascii=False, indent=0) + "\n")
    print(path, path.stat().st_size, "bytes")


main()
