use super::*;
use crate::loader::tests::dataset;
use crate::loader::validation_bytes;

/// Returns the predictions of an evaluation by its definition: each token of the stream is predicted from at most `seq_len` tokens before it, in
/// windows that start at multiples of the stride.
fn expected(stream: &[i32], Windows { seq_len, stride }: Windows) -> Vec<(Vec<i32>, i32)> {
    let tokens = 1..stream.len();
    tokens
        .map(|i| {
            let window = if i <= seq_len { 0 } else { (i - seq_len).div_ceil(stride) * stride };
            (stream[window..i].to_vec(), stream[i])
        })
        .collect()
}

#[test]
fn evaluation_predicts_every_validation_token_once_after_its_context() {
    let dataset = dataset(30);
    for (documents, rows, windows) in [
        (1.0, 1, Windows::blocks(16)),
        (7.0, 4, Windows::blocks(16)),
        (29.0, 3, Windows::blocks(16)),
        (29.0, 2, Windows::blocks(11)),
        (7.0, 3, Windows { seq_len: 16, stride: 4 }),
        (29.0, 4, Windows { seq_len: 40, stride: 17 }),
        (7.0, 2, Windows { seq_len: 16, stride: 1 }),
        (1.0, 2, Windows { seq_len: 512, stride: 256 }),
    ] {
        let split = Split::new(30, documents).unwrap();
        let documents = || (0..split.validation_len()).map(|i| split.validation(i));
        let stream = documents().flat_map(|i| dataset.document(i).unwrap()).map(|id| id as i32);
        let stream: Vec<i32> = [0].into_iter().chain(stream).collect();
        assert_eq!(
            validation_bytes(&dataset, &split).unwrap(),
            documents().map(|i| u64::from(dataset.document_bytes(i).unwrap())).sum::<u64>()
        );
        let loader = EvalLoader::new(dataset.clone(), split, windows, rows).unwrap();
        assert_eq!(loader.tokens(), stream.len() as u64 - 1);
        let mut found = Vec::new();
        let batches: Vec<_> = loader.map(Result::unwrap).collect();
        for (i, batch) in batches.iter().enumerate() {
            assert_eq!((batch.inputs.len(), batch.targets.len()), (batch.rows * batch.seq_len, batch.inputs.len()));
            assert!((1..=rows).contains(&batch.rows) && batch.seq_len <= windows.seq_len, "{windows:?}");
            // Only the last batch has padding, and only up to the next multiple.
            let padding = batch.targets.iter().rev().take_while(|&&target| target == IGNORE_INDEX).count();
            assert!(padding < 16 && (padding == 0 || i + 1 == batches.len()), "{padding} in batch {i} of {windows:?}");
            for (inputs, targets) in batch.inputs.chunks(batch.seq_len).zip(batch.targets.chunks(batch.seq_len)) {
                let counted = targets.iter().enumerate().filter(|(_, target)| **target != IGNORE_INDEX);
                found.extend(counted.map(|(i, target)| (inputs[..=i].to_vec(), *target)));
            }
        }
        assert_eq!(found, expected(&stream, windows), "{windows:?}");
    }
    let none = Split::new(30, 0.0).unwrap();
    assert_eq!(EvalLoader::new(dataset, none, Windows::blocks(16), 4).unwrap().count(), 0);
}
