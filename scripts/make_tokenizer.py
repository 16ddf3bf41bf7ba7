#!/usr/bin/env python3
"""Reproduces data/tokenizer/: a byte-level BPE of 4,096 entries trained on data/wordnet-glosses.txt.gz.

Development only; the program itself needs no Python. `pip install tokenizers==0.23.3`, then run from anywhere.
"""

import gzip
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).resolve().parent.parent / "data"
END = "<|endoftext|>"

tokenizer = Tokenizer(models.BPE())
# No space is put before the first word: a document must decode to exactly the text it was made from.
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=4096,
    special_tokens=[END],  # the first special token gets id 0
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
    show_progress=False,
)
with gzip.open(DATA / "wordnet-glosses.txt.gz", "rt", encoding="utf-8") as lines:
    tokenizer.train_from_iterator((line.rstrip("\n") for line in lines), trainer)

folder = DATA / "tokenizer"
folder.mkdir(exist_ok=True)
tokenizer.save(str(folder / "tokenizer.json"))
config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "unk_token": END,
    "clean_up_tokenization_spaces": False,
}
(folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
