use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::data::{Documents, SourceOptions, Tokenizer, prepare};

/// Documents of very different lengths. Small enough that a few batches cross an epoch.
pub(in crate::data) fn dataset(documents: usize) -> Arc<TokenDataset> {
    let folder = tempfile::tempdir().unwrap();
    let text: Vec<_> = (0..documents).map(|i| "word ".repeat(1 + i * i % 17) + &i.to_string()).collect();
    let source: PathBuf = folder.path().join("a.txt");
    std::fs::write(&source, text.join("\n")).unwrap();
    let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap();
    let options = SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() };
    Arc::new(prepare(&[source], &options, &tokenizer, folder.path()).unwrap())
}

fn loader(dataset: &Arc<TokenDataset>, split: Split, state: LoaderState, shard: Shard) -> BatchLoader {
    BatchLoader::new(dataset.clone(), split, 16, state, shard).unwrap()
}

/// The documents of `split` in training order, for two epochs, straight from the definition.
fn stream(dataset: &TokenDataset, split: &Split, seed: u64) -> Vec<i32> {
    let epoch = |epoch| {
        let order = Permutation::new(split.train_len(), seed, epoch);
        (0..split.train_len()).flat_map(move |i| dataset.document(split.train(order.get(i))).unwrap())
    };
    (0..3).flat_map(epoch).map(|id| id as i32).collect()
}

#[test]
fn rows_cut_the_stream_so_that_each_token_is_a_target_once() {
    let dataset = dataset(40);
    let split = Split::new(40, 5.0).unwrap();
    let expected = stream(&dataset, &split, 9);
    let epoch_tokens = train_tokens(&dataset, &split) as usize;
    let mut loader = loader(&dataset, split, LoaderState::start(9), Shard::WHOLE);
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    while inputs.len() < epoch_tokens * 2 {
        let batch = loader.next_batch(3).unwrap();
        assert_eq!((batch.inputs.len(), batch.targets.len(), batch.rows, batch.seq_len), (48, 48, 3, 16));
        inputs.extend(batch.inputs);
        targets.extend(batch.targets);
    }
    assert_eq!(inputs, expected[..inputs.len()]);
    assert_eq!(targets, expected[1..=targets.len()]);
    assert_eq!(loader.state().epoch, 2);
    assert_ne!(expected[..epoch_tokens], expected[epoch_tokens..2 * epoch_tokens], "epochs are in different orders");
}

#[test]
fn resuming_after_any_batch_gives_the_same_batches() {
    let dataset = dataset(20);
    let split = Split::new(20, 0.1).unwrap();
    for shard in [Shard::WHOLE, Shard { rank: 1, world: 3 }] {
        let mut unbroken = loader(&dataset, split, LoaderState::start(4), shard);
        let mut batches = Vec::new();
        let mut states = Vec::new();
        while unbroken.state().epoch < 3 {
            states.push(unbroken.state());
            batches.push(unbroken.next_batch(2).unwrap());
        }
        assert!(batches.len() > 5);
        for (k, state) in states.iter().enumerate() {
            let saved = serde_json::to_string(state).unwrap();
            let mut resumed = loader(&dataset, split, serde_json::from_str(&saved).unwrap(), shard);
            for batch in &batches[k..] {
                assert_eq!(&resumed.next_batch(2).unwrap(), batch, "resumed after {k} batches");
            }
            assert_eq!(resumed.state(), unbroken.state());
        }
    }
}

#[test]
fn ranks_share_the_rows_of_one_process() {
    let dataset = dataset(30);
    let split = Split::new(30, 3.0).unwrap();
    for world in [2, 3, 5] {
        let mut alone = loader(&dataset, split, LoaderState::start(1), Shard::WHOLE);
        let mut ranks: Vec<_> =
            (0..world).map(|rank| loader(&dataset, split, LoaderState::start(1), Shard { rank, world })).collect();
        for _ in 0..20 {
            let whole = alone.next_batch(2 * world).unwrap();
            for (rank, loader) in ranks.iter_mut().enumerate() {
                let batch = loader.next_batch(2).unwrap();
                for row in 0..2 {
                    let at = (row * world + rank) * 16;
                    assert_eq!(batch.inputs[row * 16..(row + 1) * 16], whole.inputs[at..at + 16]);
                    assert_eq!(batch.targets[row * 16..(row + 1) * 16], whole.targets[at..at + 16]);
                }
                assert_eq!(loader.state(), alone.state(), "the place saved is the same on every rank");
            }
        }
    }
}

#[test]
fn a_place_that_does_not_exist_is_an_error() {
    let dataset = dataset(10);
    let split = Split::new(10, 2.0).unwrap();
    for (document, offset) in [(8, 0), (u64::MAX, 0), (0, 1000), (0, u64::MAX)] {
        let state = LoaderState { seed: 1, epoch: 0, document, offset };
        let error = BatchLoader::new(dataset.clone(), split, 16, state, Shard::WHOLE).err().unwrap();
        assert!(matches!(&error, Error::Checkpoint(text) if text.contains("does not exist among 8 documents")));
    }
}
