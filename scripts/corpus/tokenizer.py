#!/usr/bin/env python3
"""Trains the tokenizer of a corpus: a byte-level BPE of 32,768 entries on every fourth training document of each source.

usage: scripts/corpus/tokenizer.py FOLDER      FOLDER is scripts/corpus/build.py's; writes FOLDER/tokenizer

`pip install tokenizers==0.23.3` first; tokens of a corpus need only the program afterwards.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def texts(folder):
    for path in sorted((folder / "train").glob("*.jsonl")):
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number % 4 == 0:
                    yield json.loads(line)["text"]


def main():
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer(models.BPE())
    # No space is put before the first word: a document must decode to exactly the text it was made from.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32768,
        special_tokens=[END],  # the first special token gets id 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(folder), trainer)
    place = folder / "tokenizer"
    place.mkdir(exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
