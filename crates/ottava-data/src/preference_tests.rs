use super::*;
use crate::{SourceOptions, Tokenizer, prepare};
use std::path::Path;

fn records(target: RowTarget, seq_len: usize) -> (Records, Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.jsonl");
    let pairs = [
        serde_json::json!({"prompt": "one", "chosen": " two", "rejected": " three four", "margin": 0.5}),
        serde_json::json!({"prompt": "one", "chosen": " two".repeat(40), "rejected": " four"}),
        serde_json::json!({"prompt": "six", "chosen": " two", "rejected": " five"}),
    ];
    std::fs::write(&path, pairs.map(|pair| pair.to_string()).join("\n")).unwrap();
    let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap();
    let dataset = prepare(&[path], &SourceOptions::default(), &tokenizer, folder.path()).unwrap();
    let layout = RowLayout { seq_len, packing: crate::Packing::None, document_mask: false, max_documents: None };
    let split = Split::all_validation(dataset.records()).of_groups(2);
    (Records::validation(Arc::new(dataset), &split, layout, target).unwrap(), tokenizer)
}

/// Tests that all tokens are inputs, and that the only target is the last token that is not padding.
#[test]
fn rows_of_rewards_have_one_target() {
    let end = |tokenizer: &Tokenizer| i64::from(tokenizer.padding_id().unwrap());
    for with_padding in [false, true] {
        let (_, tokenizer) = records(RowTarget::Completion, 24);
        let padding = with_padding.then(|| end(&tokenizer));
        let (records, _) = records(RowTarget::Reward { padding }, 24);
        assert_eq!((records.len(), records.left_out()), (2, 1), "the longer pair is left out, and not cut");
        let PreferenceBatch { batch, documents, chosen, .. } = records.batch(&[0, 1]).unwrap();
        assert_eq!((documents, chosen), (vec![0, 1, 4, 5], vec![true, false, true, false]));
        for (row, text) in ["one two", "one three four", "six two", "six five"].into_iter().enumerate() {
            let place = row * 24..(row + 1) * 24;
            let (inputs, targets) = (&batch.inputs[place.clone()], &batch.targets[place]);
            let ids: Vec<i32> = tokenizer.encode_document(text).unwrap().into_iter().map(|id| id as i32).collect();
            assert_eq!(inputs[..ids.len()], ids);
            let rewarded = ids.len() - if with_padding { 2 } else { 1 };
            let targets: Vec<usize> = (0..24).filter(|&t| targets[t] != IGNORE_INDEX).collect();
            assert_eq!(targets, [rewarded], "{text}");
        }
        let tokens = records.tokens(0).unwrap() + records.tokens(1).unwrap();
        assert_eq!(tokens + batch.padding_tokens(), 4 * 24);
    }
}

#[test]
fn margins_are_those_of_the_chosen_documents() {
    let (records, _) = records(RowTarget::Completion, 24);
    assert_eq!([0, 1, 2, 5].map(|document| records.margin(document).unwrap()), [0.5, 0.0, 0.0, 0.0]);
}
