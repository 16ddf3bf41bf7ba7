//! Tokenizers of SentencePiece in files of llama.cpp are written and read again.

use crate::folders::export_gguf::{exported, keys, model};
use ottava_common::Result;
use ottava_convert::convert;
use ottava_convert::export::gguf::{FILE, GgufType};
use ottava_convert::gguf::{Gguf, Value as Entry};
use ottava_data::Tokenizer;
use ottava_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

/// Reads the recorded tokenizers, scores, texts and ids. `tests/data/README.md` says where they come from.
fn recorded() -> Value {
    serde_json::from_str(include_str!("../../data/sentencepiece.json")).unwrap()
}

/// Writes a model with the tokenizer `name` after `change`, and its GGUF file.
fn export(folder: &Path, name: &str, change: impl Fn(&mut Value)) -> Result<Gguf> {
    let tokenizer = recorded()[name]["tokenizer"].clone();
    let model_folder = folder.join("model");
    model(&model_folder, &keys("LlamaForCausalLM", json!({"vocab_size": 602})), |file| {
        *file = tokenizer.clone();
        change(file);
    });
    let names = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"});
    std::fs::write(model_folder.join("tokenizer_config.json"), names.to_string()).unwrap();
    exported(&model_folder, GgufType::Bfloat16, &folder.join("gguf"))?;
    Gguf::open(&folder.join("gguf").join(FILE))
}

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

/// All pieces that merges make have SentencePiece's scores. Texts have SentencePiece's ids, also after a round trip.
#[test]
fn scores_and_tokens_are_those_of_sentencepiece() {
    let recorded = recorded();
    for (name, adds_space) in [("llama", true), ("gemma", false)] {
        let folder = tempfile::tempdir().unwrap();
        let gguf = export(folder.path(), name, |_| {}).unwrap();
        let text = |key: &str| gguf.text(&format!("tokenizer.ggml.{key}")).unwrap().unwrap();
        assert_eq!((text("model"), text("pre")), ("llama", "default"));
        assert_eq!(gguf.value("tokenizer.ggml.add_space_prefix"), Some(&Entry::Bool(adds_space)));
        assert_eq!(gguf.value("tokenizer.ggml.add_bos_token"), Some(&Entry::Bool(true)));
        let tokens = gguf.texts("tokenizer.ggml.tokens").unwrap().unwrap();
        let kinds = gguf.integers("tokenizer.ggml.token_type").unwrap().unwrap();
        let kind = |token: &str| kinds[tokens.iter().position(|other| other == token).unwrap()];
        assert_eq!([kind("<unk>"), kind("<s>"), kind("<0x0A>"), kind("an"), kind("[PAD601]")], [2, 3, 6, 1, 5]);
        if name == "gemma" {
            // These tokens also occur in texts.
            assert_eq!([kind("<turn>"), kind("  "), kind("   ")], [4; 3]);
        }
        let scores = gguf.floats("tokenizer.ggml.scores").unwrap().unwrap();
        let expected: Vec<f32> = serde_json::from_value(recorded[name]["scores"].clone()).unwrap();
        let differs = |id: &usize| kinds[*id] == 1 && scores[*id] != expected[*id];
        assert_eq!(
            (0..expected.len()).filter(differs).map(|id| &tokens[id]).collect::<Vec<_>>(),
            Vec::<&String>::new()
        );
        assert!(kinds.iter().zip(scores).all(|(kind, score)| ![3, 4].contains(kind) || *score == -1000.0));

        let back = folder.path().join("back");
        convert(&folder.path().join("gguf").join(FILE), None, &back, DType::BF16).unwrap();
        let ids: Vec<Vec<u32>> = serde_json::from_value(recorded[name]["ids"].clone()).unwrap();
        for path in [folder.path().join("model"), back] {
            let tokenizer = Tokenizer::load(&path).unwrap();
            for (text, ids) in strings(&recorded["texts"]).iter().zip(&ids) {
                let found = tokenizer.encode_document(text).unwrap();
                assert_eq!(found[..ids.len()], ids[..], "{name}: {text:?}");
                assert_eq!(tokenizer.decode(&ids[1..]).unwrap(), *text, "{name}");
            }
        }
    }
}

#[test]
fn tokenizers_that_scores_cannot_express_are_refused() {
    let merges = |file: &mut Value, change: &dyn Fn(&mut Vec<Value>)| {
        change(file["model"]["merges"].as_array_mut().unwrap());
    };
    let whole = |merge: &Value| format!("{}{}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let rotate: &dyn Fn(&mut Value) = &|file| {
        merges(file, &|merges| {
            let at = (40..merges.len()).find(|&at| whole(&merges[at]) != whole(&merges[at - 1])).unwrap();
            merges.rotate_left(at);
        });
    };
    let swap: &dyn Fn(&mut Value) = &|file| {
        merges(file, &|merges| {
            // A token with several pairs is chosen, and its first pair moves to the front.
            let at = (1..merges.len()).rfind(|&at| whole(&merges[at]) == whole(&merges[at - 1])).unwrap();
            let merge = merges.remove(at);
            merges.insert(0, merge);
        });
    };
    let shorten: &dyn Fn(&mut Value) = &|file| merges(file, &|merges| drop(merges.pop()));
    let bytes: &dyn Fn(&mut Value) = &|file| drop(file["model"]["vocab"].as_object_mut().unwrap().remove("<0x0A>"));
    let lower: &dyn Fn(&mut Value) = &|file| file["normalizer"]["normalizers"][0] = json!({"type": "Lowercase"});
    let whole_words: &dyn Fn(&mut Value) = &|file| file["model"]["ignore_merges"] = json!(true);
    for (change, words) in [
        (swap, "the merge list is not contiguous for token"),
        (shorten, "the merge list lacks some pairs that form token"),
        (bytes, "the vocabulary lacks 1 of the 256 byte tokens"),
        (lower, "does more than replace spaces by ▁ and prepend one"),
        (whole_words, "its model is not SentencePiece BPE"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let error = export(folder.path(), "llama", change).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
    }
    // Any order of whole groups can come from some scores.
    export(tempfile::tempdir().unwrap().path(), "llama", rotate).unwrap();
}
