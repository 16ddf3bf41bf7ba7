#!/bin/sh
# Writes a small model folder without weights, and word problems about sums and differences, for docs/tutorial-reasoning.md:
#   scripts/make-problems.sh FOLDER
# FOLDER/model has a config.json and a tokenizer of 44 words. FOLDER/demonstrations.jsonl has problems with solutions that calculate correctly, but in six of
# ten add instead of subtracting, or the other way round. FOLDER/problems.jsonl has other problems with their right answers, and FOLDER/held-out.jsonl problems
# for evaluations. The files are the same on every machine.
set -eu
folder=${1:?usage: scripts/make-problems.sh FOLDER}
mkdir -p "$folder/model"
awk -v folder="$folder" '
function below(n) {  # A generator of Park and Miller, whose products are exact in doubles.
    state = (state * 16807) % 2147483647
    return int(state / 2147483647 * n)
}
function problem() {
    first = 1 + below(9); second = 1 + below(first)
    is_sum = below(2)
    answer = is_sum ? first + second : first - second
    verb = is_sum ? "gets" : "gives"
    prompt = names[1 + below(6)] " has " first " " things[1 + below(6)] " and " verb " " second " . How many ?"
    adds = below(10) < 6 ? !is_sum : is_sum
    solution = " " first (adds ? " + " : " - ") second " = " (adds ? first + second : first - second)
}
BEGIN {
    state = 20251128
    split("Ann Ben Eva Leo Mia Tom", names)
    split("apples books coins nuts shells stones", things)
    count = split("<end> <unk> has and gets gives . How many ? + - = 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 Ann Ben Eva Leo Mia Tom apples books coins nuts shells stones", words)
    vocabulary = ""
    for (i = 1; i <= count; i++) vocabulary = vocabulary (i > 1 ? ", " : "") "\"" words[i] "\": " (i - 1)
    special = "\"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}"
    print "{\"version\": \"1.0\", \"pre_tokenizer\": {\"type\": \"WhitespaceSplit\"}," \
        " \"added_tokens\": [{\"id\": 0, \"content\": \"<end>\", " special ", {\"id\": 1, \"content\": \"<unk>\", " special "]," \
        " \"model\": {\"type\": \"WordLevel\", \"unk_token\": \"<unk>\", \"vocab\": {" vocabulary "}}}" > (folder "/model/tokenizer.json")
    print "{\"eos_token\": \"<end>\"}" > (folder "/model/tokenizer_config.json")
    print "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 128," \
        " \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, \"vocab_size\": 44," \
        " \"max_position_embeddings\": 32, \"rms_norm_eps\": 1e-5, \"bos_token_id\": null, \"eos_token_id\": 0}" > (folder "/model/config.json")
    for (i = 0; i < 2000; i++) {
        problem()
        file = i < 1000 ? "demonstrations" : i < 1900 ? "problems" : "held-out"
        target = i < 1000 ? "\"completion\": \"" solution "\"" : "\"answer\": \"" answer "\""
        print "{\"prompt\": \"" prompt "\", " target "}" > (folder "/" file ".jsonl")
    }
}'
