use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::{BatchLoader, DataSet, DataState, Documents, ExcessLength, SourceOptions, Statistics, Tokenizer, prepare};

/// Returns documents of very different lengths. They are so few that a few batches exceed an epoch.
pub(crate) fn dataset(documents: usize) -> Arc<TokenDataset> {
    let folder = tempfile::tempdir().unwrap();
    let text: Vec<_> = (0..documents).map(|i| "word ".repeat(1 + i * i % 17) + &i.to_string()).collect();
    let source: PathBuf = folder.path().join("a.txt");
    std::fs::write(&source, text.join("\n")).unwrap();
    let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap();
    let options = SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() };
    Arc::new(prepare(&[source], &options, &tokenizer, folder.path()).unwrap())
}

fn statistics(dataset: &TokenDataset, split: &Split, layout: &RowLayout) -> Statistics {
    Statistics::of(dataset, split, layout, 9).unwrap()
}

/// A loader of a single data set.
struct Loader(BatchLoader);

impl Loader {
    fn new(
        dataset: &Arc<TokenDataset>,
        split: Split,
        layout: RowLayout,
        state: LoaderState,
        shard: RowShare,
    ) -> Result<Loader> {
        let set = DataSet::only(dataset.clone(), split, &layout, 9)?;
        BatchLoader::new(&[set], layout, &DataState::One(state), shard).map(Loader)
    }

    fn next_batch(&mut self, rows: usize) -> Result<Batch> {
        self.0.next_batch(rows)
    }

    fn state(&self) -> LoaderState {
        match self.0.state() {
            DataState::One(state) => state,
            DataState::Mixture(states) => panic!("{states:?}"),
        }
    }
}

fn loader(dataset: &Arc<TokenDataset>, split: Split, state: LoaderState, shard: RowShare) -> Loader {
    Loader::new(dataset, split, RowLayout::wrapped(16), state, shard).unwrap()
}

/// Returns the tokens of two epochs of `split`, from the definition of the order.
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
    let epoch_tokens = (statistics(&dataset, &split, &RowLayout::wrapped(16)).rows * 16.0) as usize;
    let mut loader = loader(&dataset, split, LoaderState::start(9), RowShare::ALL);
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
    let shards = [RowShare::ALL, RowShare { rank: 1, world: 3 }];
    for (layout, shard) in LAYOUTS.into_iter().flat_map(|layout| shards.map(|shard| (layout, shard))) {
        let loader = |state| Loader::new(&dataset, split, layout, state, shard).unwrap();
        let mut unbroken = loader(LoaderState::start(4));
        let mut batches = Vec::new();
        let mut states = Vec::new();
        while unbroken.state().epoch < 3 {
            states.push(unbroken.state());
            batches.push(unbroken.next_batch(2).unwrap());
        }
        assert!(batches.len() > 5);
        for (k, state) in states.iter().enumerate() {
            let saved = serde_json::to_string(state).unwrap();
            let mut resumed = loader(serde_json::from_str(&saved).unwrap());
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
    for (layout, world) in LAYOUTS.into_iter().flat_map(|layout| [2, 3, 5].map(|world| (layout, world))) {
        let loader = |shard| Loader::new(&dataset, split, layout, LoaderState::start(1), shard).unwrap();
        let mut alone = loader(RowShare::ALL);
        let mut ranks: Vec<_> = (0..world).map(|rank| loader(RowShare { rank, world })).collect();
        for _ in 0..20 {
            let whole = alone.next_batch(2 * world).unwrap();
            for (rank, loader) in ranks.iter_mut().enumerate() {
                let batch = loader.next_batch(2).unwrap();
                for row in 0..2 {
                    let at = (row * world + rank) * 16;
                    assert_eq!(batch.inputs[row * 16..(row + 1) * 16], whole.inputs[at..at + 16]);
                    assert_eq!(batch.targets[row * 16..(row + 1) * 16], whole.targets[at..at + 16]);
                    assert_eq!(lengths(&batch, row), lengths(&whole, row * world + rank));
                }
                assert_eq!(loader.state(), alone.state(), "the place saved is the same on every rank");
            }
        }
    }
}

/// All ways to form rows, with and without edges of documents.
const LAYOUTS: [RowLayout; 4] = [
    RowLayout { seq_len: 16, packing: Packing::Wrapped, document_mask: false, max_documents: None },
    RowLayout { seq_len: 16, packing: Packing::Wrapped, document_mask: true, max_documents: None },
    RowLayout { seq_len: 16, packing: Packing::Bfd, document_mask: true, max_documents: None },
    RowLayout { seq_len: 16, packing: Packing::None, document_mask: false, max_documents: None },
];

/// Returns the lengths of the documents in one row of 16 tokens.
fn lengths(batch: &Batch, row: usize) -> Vec<usize> {
    let mut end = 0;
    let within = |length: &usize| {
        end += length;
        (row * 16..(row + 1) * 16).contains(&(end - 1)).then_some(*length)
    };
    batch.documents.iter().flatten().filter_map(within).collect()
}

#[test]
fn packed_rows_hold_every_document_whole_once_an_epoch() {
    let dataset = dataset(40);
    let split = Split::new(40, 5.0).unwrap();
    for packing in [Packing::Bfd, Packing::None] {
        let layout = RowLayout { seq_len: 16, packing, document_mask: true, max_documents: None };
        let counted = statistics(&dataset, &split, &layout);
        let rows = counted.rows as usize;
        let mut loader = Loader::new(&dataset, split, layout, LoaderState::start(9), RowShare::ALL).unwrap();
        let mut epochs = Vec::new();
        for epoch in 0..2 {
            let mut seen = Vec::new();
            for _ in 0..rows {
                let batch = loader.next_batch(1).unwrap();
                let (mut at, documents) = (0, batch.documents.unwrap());
                assert!(documents.len() <= counted.max_documents.unwrap(), "{documents:?}");
                for length in documents {
                    let (inputs, targets) = (&batch.inputs[at..at + length], &batch.targets[at..at + length]);
                    at += length;
                    if targets[0] == IGNORE_INDEX {
                        assert!(at == 16 && targets.iter().all(|&target| target == IGNORE_INDEX), "padding is last");
                        continue;
                    }
                    assert_eq!(inputs[1..], targets[..length - 1], "targets stay within their document");
                    seen.push([&inputs[..1], targets].concat());
                }
                assert_eq!(at, 16);
            }
            assert_eq!(
                loader.state(),
                LoaderState { epoch: epoch + 1, ..LoaderState::start(9) },
                "an epoch ends with its last row"
            );
            epochs.push(seen);
        }
        assert_ne!(epochs[0], epochs[1], "epochs are in different orders");
        let of_training = (0..split.train_len()).map(|i| dataset.document(split.train(i)).unwrap());
        let mut expected: Vec<Vec<i32>> =
            of_training.map(|ids| ids.into_iter().take(17).map(|id| id as i32).collect()).collect();
        expected.sort();
        for mut seen in epochs {
            seen.sort();
            assert_eq!(seen, expected);
        }
        assert!(packing == Packing::None || rows < 35, "{rows} rows of 35 documents");
    }
    let stream = RowLayout { document_mask: true, ..RowLayout::wrapped(16) };
    let most = statistics(&dataset, &split, &stream).max_documents.unwrap();
    let mut loader = Loader::new(&dataset, split, stream, LoaderState::start(9), RowShare::ALL).unwrap();
    for _ in 0..100 {
        let documents = loader.next_batch(1).unwrap().documents.unwrap();
        assert!(documents.len() <= most && documents.iter().sum::<usize>() == 16, "{documents:?}, {most}");
    }
}

#[test]
fn long_documents_are_counted_or_refused() {
    let dataset = dataset(40);
    let split = Split::new(40, 5.0).unwrap();
    let layout = RowLayout { packing: Packing::Bfd, ..RowLayout::wrapped(12) };
    let long = (0..35).filter(|&i| dataset.document_len(split.train(i)).unwrap() > 13).count() as u64;
    assert!(long > 0);
    let counted = statistics(&dataset, &split, &layout);
    assert_eq!(counted.fit.truncated, long);
    counted.check(&dataset, &layout, ExcessLength::Truncate).unwrap();
    let error = counted.check(&dataset, &layout, ExcessLength::Raise).unwrap_err().to_string();
    assert!(error.contains("`data.max_length` is 12"), "{error}");
    let layout = RowLayout { seq_len: 100, ..layout };
    let counted = statistics(&dataset, &split, &layout);
    counted.check(&dataset, &layout, ExcessLength::Raise).unwrap();
    assert_eq!(counted.fit.truncated, 0);
}

#[test]
fn packed_validation_predicts_every_token_once() {
    let dataset = dataset(40);
    let split = Split::new(40, 12.0).unwrap();
    let layout = RowLayout { seq_len: 32, packing: Packing::Bfd, document_mask: true, max_documents: None };
    let batches: Vec<Batch> =
        whole_validation(dataset.clone(), split, layout, 3).unwrap().map(Result::unwrap).collect();
    let mut targets: Vec<i32> = batches.iter().flat_map(|batch| batch.targets.clone()).collect();
    targets.retain(|&target| target != IGNORE_INDEX);
    let documents = (0..12).map(|i| dataset.document(split.validation(i)).unwrap());
    let mut expected: Vec<i32> = documents.flat_map(|ids| ids.into_iter().skip(1)).map(|id| id as i32).collect();
    targets.sort_unstable();
    expected.sort_unstable();
    assert_eq!(targets, expected);
    let (last, full) = batches.split_last().unwrap();
    assert!(full.iter().all(|batch| batch.rows == 3) && last.padding_tokens() < last.inputs.len());
    for batch in batches {
        let tokens = batch.rows * 32;
        assert_eq!((batch.inputs.len(), batch.documents.unwrap().iter().sum::<usize>()), (tokens, tokens));
    }
}

#[test]
fn a_place_that_does_not_exist_is_an_error() {
    let dataset = dataset(10);
    let split = Split::new(10, 2.0).unwrap();
    for (document, offset) in [(8, 0), (u64::MAX, 0), (0, 1000), (0, u64::MAX)] {
        let state = LoaderState { seed: 1, epoch: 0, document, offset };
        let error = Loader::new(&dataset, split, RowLayout::wrapped(16), state, RowShare::ALL).err().unwrap();
        assert!(matches!(&error, Error::Checkpoint(text) if text.contains("does not exist among 8 documents")));
    }
}
