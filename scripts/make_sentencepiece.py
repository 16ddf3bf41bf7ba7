#!/usr/bin/env python3
"""Records crates/ottava-train/tests/data/sentencepiece.json: two small BPE models of SentencePiece with bytes for unknown characters, as the
`tokenizer.json` that transformers makes of them, with the scores of their pieces and the ids of texts. `llama` begins texts with a space and
has it in its normalizer, `gemma` does neither, and has user-defined pieces, spaces among them. `ottava export` has to write the scores.

usage: make_sentencepiece.py

Development only; `pip install sentencepiece==0.2.3`. The same bytes every time.
"""

import gzip
import io
import json
from pathlib import Path

import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
SPACE = "\u2581"
TEXTS = ["The otter, a furry mammal, swims 12 km.", "two  spaces and\na line", "ça va? 你好 🦦", " leading", "an animal of the sea"]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def train(prefix, symbols):
    lines = gzip.decompress((ROOT / "data/wordnet-glosses.txt.gz").read_bytes()).decode().splitlines()[:4000]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True, add_dummy_prefix=prefix,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, user_defined_symbols=symbols, num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def merges(scores):
    """All pairs of pieces that make a piece, those of high scores first."""
    pairs = [
        (-score, -at, -(len(piece) - at), piece[:at], piece[at:])
        for piece, score in scores.items()
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    return [[left, right] for *_, left, right in sorted(pairs)]


def record(prefix, symbols):
    model = train(prefix, symbols)
    ids = range(model.vocab_size())
    pieces = [model.id_to_piece(i) for i in ids]
    scores = dict(zip(pieces, map(model.get_score, ids)))
    special = pieces[:3]
    added = [
        {"id": i, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": piece in special}
        for i, piece in enumerate(pieces) if piece in special + symbols
    ]
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE]}
    cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": prepend if prefix else REPLACE, "pre_tokenizer": None if prefix else cut,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}] + strip},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": merges(scores),
        },
    }
    return {"tokenizer": tokenizer, "scores": list(scores.values()), "ids": [[1] + model.encode(text) for text in TEXTS]}


models = {"llama": record(True, []), "gemma": record(False, ["<turn>", 2 * SPACE, 3 * SPACE])}
path = ROOT / "crates/ottava-train/tests/data/sentencepiece.json"
path.write_text(json.dumps({"texts": TEXTS, **models}, ensure_ascii=False, separators=(",", ":")) + "\n")
print(f"{path}: {path.stat().st_size} bytes")
