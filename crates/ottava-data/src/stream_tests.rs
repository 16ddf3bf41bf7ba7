use super::*;
use crate::packing::{Packing, max_unknown_documents};
use crate::{BatchLoader, DataSet, DataState, Documents, RowShare, SourceOptions, Tokenizer, prepare};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard};

const SEED: u64 = 9;

/// Files of lines that a server has, and copies of them.
struct Elsewhere {
    files: Vec<String>,
    copies: PathBuf,
    /// Attempts that fail, for each file.
    faults: Mutex<BTreeMap<usize, usize>>,
    /// While this is true, only files of the first window are sent.
    is_slow: AtomicBool,
    first: Vec<usize>,
    fetched: Mutex<Vec<usize>>,
}

impl Elsewhere {
    fn new(count: usize, folder: &Path) -> Elsewhere {
        let lines = |file: usize| {
            (0..3 + file % 3).map(move |line| format!("file {file} {}", "word ".repeat(1 + (7 * file + line) % 9)))
        };
        let copies = folder.join("copies");
        std::fs::create_dir_all(&copies).unwrap();
        Elsewhere {
            files: (0..count).map(|file| lines(file).collect::<Vec<_>>().join("\n")).collect(),
            copies,
            faults: Mutex::default(),
            is_slow: AtomicBool::new(false),
            first: Vec::new(),
            fetched: Mutex::default(),
        }
    }

    fn copy(&self, file: usize) -> PathBuf {
        self.copies.join(format!("{file}.txt"))
    }

    fn fetched(&self) -> MutexGuard<'_, Vec<usize>> {
        self.fetched.lock().unwrap()
    }
}

impl ShardSource for Arc<Elsewhere> {
    fn count(&self) -> usize {
        self.files.len()
    }

    fn name(&self, shard: usize) -> String {
        format!("s3://bucket/{shard}.txt")
    }

    fn version(&self, _: usize) -> String {
        "1".into()
    }

    fn fetch(&self, shard: usize) -> Result<PathBuf> {
        let end = Instant::now() + Duration::from_secs(30);
        while self.is_slow.load(Ordering::Relaxed) && !self.first.contains(&shard) {
            assert!(Instant::now() < end, "a later file is waited for");
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(left) = self.faults.lock().unwrap().get_mut(&shard).filter(|left| **left > 0) {
            *left -= 1;
            return Err(Error::External("the connection was lost".into()));
        }
        self.fetched().push(shard);
        let copy = self.copy(shard);
        // Another thread may read the copy.
        let _turn = self.faults.lock().unwrap();
        if !copy.exists() {
            std::fs::write(&copy, &self.files[shard]).unwrap();
        }
        Ok(copy)
    }

    fn remove(&self, shard: usize) {
        // The reader of a loader that has ended may remove the same copy.
        let removed = std::fs::remove_file(self.copy(shard));
        assert!(removed.is_ok() || !self.copy(shard).exists(), "shard {shard}");
    }
}

fn options() -> SourceOptions {
    SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() }
}

fn tokens(files: &[PathBuf], cache: &Path) -> Result<Arc<TokenDataset>> {
    static TOKENIZER: LazyLock<Tokenizer> =
        LazyLock::new(|| Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap());
    prepare(files, &options(), &TOKENIZER, cache).map(Arc::new)
}

fn layout(packing: Packing) -> RowLayout {
    let document_mask = packing != Packing::Wrapped;
    RowLayout { seq_len: 16, packing, document_mask, max_documents: Some(max_unknown_documents(16)) }
}

/// The stream of `source`, with its files and tokens in `folder`.
fn stream(source: &Arc<Elsewhere>, sizes: StreamSizes, folder: &Path) -> Arc<ShardStream> {
    let cache = folder.join("tokens");
    let of_window = cache.clone();
    let stream = ShardStream::new(Shards::new(source.clone()), sizes, &cache, move |files| tokens(files, &of_window));
    Arc::new(ShardStream { pause: Duration::from_millis(1), ..stream })
}

/// A loader of a stream at `state`.
fn loader(stream: &Arc<ShardStream>, layout: RowLayout, state: LoaderState, share: RowShare) -> Result<BatchLoader> {
    let sample = stream.open(SEED, 0)?;
    let split = Split::new(sample.len(), 0.0)?;
    let set = DataSet { stream: Some(stream.clone()), ..DataSet::only(sample, split, &layout, SEED)? };
    BatchLoader::new(&[set], layout, &DataState::One(state), share)
}

fn state(loader: &BatchLoader) -> LoaderState {
    match loader.state() {
        DataState::One(state) => state,
        DataState::Mixture(states) => panic!("{states:?}"),
    }
}

const TWO: StreamSizes = StreamSizes { window: 2, kept: 0 };

#[test]
fn an_epoch_reads_each_document_once_a_window_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let source = Arc::new(Elsewhere::new(5, folder.path()));
    let stream = stream(&source, TWO, folder.path());
    let mut loader = loader(&stream, layout(Packing::None), LoaderState::start(SEED), RowShare::ALL).unwrap();
    let mut orders = Vec::new();
    for epoch in 0..2 {
        let mut files = Vec::new();
        for window in 3 * epoch..3 * (epoch + 1) {
            let shards = stream.window(SEED, window);
            let mut expected: Vec<Vec<u32>> = Vec::new();
            for shard in &shards {
                let dataset = tokens(&[source.copy(*shard)], &folder.path().join("single"))
                    .or_else(|_| source.fetch(*shard).and_then(|file| tokens(&[file], &folder.path().join("single"))));
                let dataset = dataset.unwrap();
                expected.extend((0..dataset.len()).map(|i| dataset.document(i).unwrap()));
            }
            let mut found = Vec::new();
            for _ in 0..expected.len() {
                assert_eq!(state(&loader).epoch, window);
                let batch = loader.next_batch(1).unwrap();
                let length = batch.inputs.len() - batch.padding[0];
                found.push(batch.inputs[..length].iter().map(|id| *id as u32).collect::<Vec<_>>());
            }
            // The last token of a document is a target alone; a document longer than a row is cut.
            expected.iter_mut().for_each(|document| document.truncate((document.len() - 1).min(16)));
            found.sort();
            expected.sort();
            assert!(found == expected, "window {window} has the documents of the files {shards:?}");
            files.extend(shards);
        }
        let mut sorted = files.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4]);
        orders.push(files);
    }
    assert_ne!(orders[0], orders[1], "each epoch has another order");
}

#[test]
fn a_wrapped_window_is_one_stream_of_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let source = Arc::new(Elsewhere::new(4, folder.path()));
    let stream = stream(&source, TWO, folder.path());
    let mut loader = loader(&stream, layout(Packing::Wrapped), LoaderState::start(SEED), RowShare::ALL).unwrap();
    for window in 0..3 {
        let dataset = stream.open(SEED, window).unwrap();
        let split = Split::new(dataset.len(), 0.0).unwrap();
        let pass = |epoch| {
            let order = Permutation::new(dataset.len() as u64, SEED, epoch);
            (0..order.len()).flat_map(|i| dataset.document(split.train(order.get(i))).unwrap()).collect::<Vec<u32>>()
        };
        let expected = [pass(window), pass(window + 1)].concat();
        let rows = (dataset.total_tokens() as usize).div_ceil(16);
        for row in 0..rows {
            assert_eq!(state(&loader).epoch, window, "row {row} of {rows}");
            let batch = loader.next_batch(1).unwrap();
            let [inputs, targets] =
                [batch.inputs, batch.targets].map(|ids| ids.iter().map(|id| *id as u32).collect::<Vec<_>>());
            assert_eq!(inputs, expected[16 * row..16 * (row + 1)], "row {row} of window {window}");
            assert_eq!(targets, expected[16 * row + 1..16 * (row + 1) + 1]);
        }
    }
}

#[test]
fn resumed_rows_and_rows_of_ranks_are_the_rows_of_one_process() {
    for packing in [Packing::Wrapped, Packing::Bfd, Packing::None] {
        let folder = tempfile::tempdir().unwrap();
        let source = Arc::new(Elsewhere::new(5, folder.path()));
        let stream = stream(&source, TWO, folder.path());
        let at = |state, share| loader(&stream, layout(packing), state, share).unwrap();
        let mut whole = at(LoaderState::start(SEED), RowShare::ALL);
        let [mut first, mut second] = [0, 1].map(|rank| at(LoaderState::start(SEED), RowShare { rank, world: 2 }));
        for _ in 0..12 {
            let place = state(&whole);
            let batch = whole.next_batch(4).unwrap();
            assert_eq!(at(place, RowShare::ALL).next_batch(4).unwrap(), batch, "{packing:?} at {place:?}");
            let of_ranks = [first.next_batch(2).unwrap(), second.next_batch(2).unwrap()];
            let row = |batch: &Batch, i: usize| batch.inputs[16 * i..16 * (i + 1)].to_vec();
            for i in 0..4 {
                assert_eq!(row(&batch, i), row(&of_ranks[i % 2], i / 2), "{packing:?} row {i} at {place:?}");
            }
            assert_eq!([state(&first), state(&second)], [state(&whole); 2]);
        }
        assert!(state(&whole).epoch > 3, "{packing:?}: more than an epoch was read");
    }
}

#[test]
fn rows_begin_when_the_first_files_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = Elsewhere::new(6, folder.path());
    let first = stream(&Arc::new(Elsewhere::new(6, folder.path())), TWO, folder.path()).window(SEED, 0);
    (source.first, source.is_slow) = (first.clone(), AtomicBool::new(true));
    let source = Arc::new(source);
    let slow = stream(&source, TWO, folder.path());
    let mut rows = loader(&slow, layout(Packing::None), LoaderState::start(SEED), RowShare::ALL).unwrap();
    let mut found = Vec::new();
    while state(&rows).epoch == 0 {
        found.push(rows.next_batch(1).unwrap());
    }
    let mut fetched = source.fetched().clone();
    fetched.sort_unstable();
    fetched.dedup();
    let mut expected = first;
    expected.sort_unstable();
    assert_eq!(fetched, expected, "no later file was sent, and all rows of the first window were read");
    source.is_slow.store(false, Ordering::Relaxed);
    found.extend((0..20).map(|_| rows.next_batch(1).unwrap()));
    let other = tempfile::tempdir().unwrap();
    let fast = stream(&Arc::new(Elsewhere::new(6, other.path())), TWO, other.path());
    let mut rows = loader(&fast, layout(Packing::None), LoaderState::start(SEED), RowShare::ALL).unwrap();
    assert!(found.iter().all(|batch| *batch == rows.next_batch(1).unwrap()), "slow files change no row");
}

#[test]
fn a_lost_connection_is_tried_again_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let source = Arc::new(Elsewhere::new(4, folder.path()));
    let all = |faults: usize| (0..4).map(|file| (file, faults)).collect();
    *source.faults.lock().unwrap() = all(ATTEMPTS as usize - 1);
    let stream = stream(&source, TWO, folder.path());
    let mut rows = loader(&stream, layout(Packing::Bfd), LoaderState::start(SEED), RowShare::ALL).unwrap();
    (0..20).for_each(|_| drop(rows.next_batch(1).unwrap()));
    *source.faults.lock().unwrap() = all(1000);
    let failed = (0..20).find_map(|_| rows.next_batch(1).err()).expect("the files cannot be fetched any more");
    let shown = failed.to_string();
    assert!(
        matches!(failed, Error::External(_)) && shown.contains("s3://bucket/") && shown.contains("was lost"),
        "{shown}"
    );
}

#[test]
fn a_file_that_is_removed_meanwhile_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let source = Arc::new(Elsewhere::new(4, folder.path()));
    let (cache, is_first) = (folder.path().join("tokens"), AtomicBool::new(true));
    let of_window = cache.clone();
    let stream = ShardStream::new(Shards::new(source.clone()), TWO, &cache, move |files| {
        if is_first.swap(false, Ordering::Relaxed) {
            std::fs::remove_file(&files[0]).unwrap();
        }
        tokens(files, &of_window)
    });
    let dataset = stream.open(SEED, 0).unwrap();
    let removed = stream.window(SEED, 0)[0];
    assert_eq!(source.fetched().iter().filter(|shard| **shard == removed).count(), 2);
    assert!(dataset.len() > 3);
    let broken = ShardStream::new(Shards::new(source), TWO, &cache, |_| Err(Error::Data("broken".into())));
    assert!(matches!(broken.open(SEED, 0), Err(Error::Data(_))), "an error of a file that is there stays");
}

#[test]
fn files_on_disk_stay_within_their_bound() {
    let folder = tempfile::tempdir().unwrap();
    let source = Arc::new(Elsewhere::new(9, folder.path()));
    let bounded = stream(&source, StreamSizes { window: 2, kept: 4 }, folder.path());
    let other = tempfile::tempdir().unwrap();
    let all = stream(&Arc::new(Elsewhere::new(9, other.path())), TWO, other.path());
    let start = |stream, state| loader(stream, layout(Packing::Bfd), state, RowShare::ALL).unwrap();
    let mut expected = start(&all, LoaderState::start(SEED));
    let mut rows = start(&bounded, LoaderState::start(SEED));
    let count = |folder: &str, beginning: &str| {
        let entries = std::fs::read_dir(bounded.records.parent().unwrap().join(folder)).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(beginning)).count()
    };
    for step in 0..40 {
        if step % 13 == 12 {
            // A run that resumes finds what an earlier process has left.
            rows = start(&bounded, state(&rows));
        }
        assert_eq!(rows.next_batch(1).unwrap(), expected.next_batch(1).unwrap(), "row {step}");
        let copies = std::fs::read_dir(&source.copies).unwrap().count();
        // The loader of this test also opens the first window, as a sample.
        assert!(
            copies <= 4 + 2 && count(".", "tokens-") <= 2 + 1,
            "row {step}: {copies} files, {} windows",
            count(".", "tokens-")
        );
    }
    assert!(state(&rows).epoch > 5, "more than an epoch was read");
}
