//! A checkpoint that is written while training continues holds the state at the time of the save, or does not appear.

use crate::runs::resume::{config, metrics, write_inputs};
use ottava_checkpoint::{Verify, latest_complete};
use ottava_common::fs::{Fs, FsFile, RealFs};
use ottava_common::{Error, Result};
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, threads};
use ottava_train::trainer::{Start, StepReport, Trainer};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The real file system, except that files whose paths contain some text are created late or never.
#[derive(Default)]
struct TestFs {
    held: Mutex<Option<&'static str>>,
    released: Condvar,
    full: Option<&'static str>,
    /// The folders that were made and renamed.
    folders: Mutex<Vec<String>>,
}

impl TestFs {
    fn new(held: Option<&'static str>, full: Option<&'static str>) -> &'static TestFs {
        Box::leak(Box::new(TestFs { held: Mutex::new(held), full, ..TestFs::default() }))
    }

    fn release(&self) {
        *self.held.lock().unwrap() = None;
        self.released.notify_all();
    }

    fn note(&self, what: &str, path: &Path) {
        let name = path.file_name().unwrap().to_string_lossy();
        if name.contains("checkpoint-") {
            self.folders.lock().unwrap().push(format!("{what} {name}"));
        }
    }
}

impl Fs for TestFs {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let is = |text: &str| path.to_str().unwrap().contains(text);
        let held = self.held.lock().unwrap();
        drop(self.released.wait_while(held, |held| held.is_some_and(is)).unwrap());
        match self.full.is_some_and(is) {
            true => Err(io::Error::from_raw_os_error(28)),
            false => RealFs.create(path),
        }
    }
    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>> {
        RealFs.append(path, length)
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.note("make", path);
        RealFs.create_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.note("rename to", to);
        RealFs.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealFs.remove(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealFs.sync_dir(path)
    }
}

/// Returns a run of six steps in FP8 with a checkpoint after every `save_steps` steps, into the folder `name`.
fn run_of(inputs: &Path, name: &str, save_steps: u64, async_save: bool) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), RecipeName::Fp8Delayed);
    (config.checkpoint.save_steps, config.checkpoint.async_save) = (Interval::Every(save_steps), Some(async_save));
    config
}

/// Trains a rank of a run from its start or from its newest checkpoint. Checkpoints are written through `fs`.
fn train(
    config: &RunConfig,
    start: &Start,
    fs: &'static TestFs,
    comm: Group,
    report: &mut dyn FnMut(&StepReport),
) -> Result<()> {
    let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, start, comm, None)?;
    trainer.set_fs(fs);
    let outcome = trainer.run(&AtomicBool::new(false), report);
    // The thread that writes may be blocked.
    fs.release();
    outcome
}

/// Trains two ranks in threads, which share the rows of each step.
fn train_two(
    config: &RunConfig,
    start: &Start,
    fs: &'static TestFs,
    report: impl Fn(usize, &StepReport) + Clone + Send + 'static,
) -> Vec<std::thread::Result<Result<()>>> {
    let mut config = config.clone();
    config.training.gradient_accumulation_steps = 1;
    let ranks = threads::group(2).into_iter().enumerate().map(|(rank, comm)| {
        let (config, start, report) = (config.clone(), start.clone(), report.clone());
        std::thread::spawn(move || train(&config, &start, fs, comm, &mut |done| report(rank, done)))
    });
    ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join()).collect()
}

/// Returns all files of the checkpoints in a run's folder, except manifests, which hold the run's settings. Checks their names.
fn saved(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![run.join("checkpoints")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(run).unwrap().display().to_string();
            assert!(!name.contains(".tmp-"), "{name} is left");
            match (path.is_dir(), name.ends_with("manifest.json")) {
                (true, _) => folders.push(path),
                (false, true) => drop(files.insert(name, Vec::new())),
                (false, false) if name.ends_with("metrics.jsonl") => {
                    // Times are left out.
                    let lines = metrics(path.parent().unwrap());
                    files.insert(name, format!("{lines:?}").into_bytes());
                }
                (false, false) => drop(files.insert(name, std::fs::read(path).unwrap())),
            }
        }
    }
    files
}

fn newest(run: &Path) -> u64 {
    let latest = latest_complete(&run.join("checkpoints"), Verify::Hashes).unwrap();
    assert!(latest.damaged.is_empty());
    latest.complete.map_or(0, |(_, manifest)| manifest.step)
}

/// The thread that writes the checkpoint of step 3 is blocked until step 5 is done.
#[test]
fn training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let (now, behind) = (run_of(inputs.path(), "now", 3, false), run_of(inputs.path(), "behind", 3, true));
    let steps = |config, fs: &'static TestFs| {
        let mut steps = Vec::new();
        let mut report = |done: &StepReport| {
            steps.extend(done.saved.iter().map(|saved| (done.step, saved.step)));
            if done.step == 5 {
                fs.release();
            }
        };
        train(config, &Start::New, fs, Group::solo(), &mut report).unwrap();
        steps
    };
    assert_eq!(steps(&now, TestFs::new(None, None)), [(3, 3), (6, 6)]);
    assert_eq!(steps(&behind, TestFs::new(Some("checkpoint-3/training/metrics"), None)), [(6, 3), (6, 6)]);
    let expected = saved(&now.output_dir);
    assert!(expected.len() > 2 * 8, "{:?}", expected.keys());
    assert!(saved(&behind.output_dir) == expected, "{:?}", saved(&behind.output_dir).keys());
    assert_eq!(metrics(&behind.output_dir), metrics(&now.output_dir));
}

#[test]
fn one_checkpoint_is_written_at_a_time() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let (config, fs) = (run_of(inputs.path(), "run", 1, true), TestFs::new(None, None));
    train(&config, &Start::New, fs, Group::solo(), &mut |_| {}).unwrap();
    let folders = (1..=6).flat_map(|i| [format!("make .tmp-checkpoint-{i}"), format!("rename to checkpoint-{i}")]);
    assert_eq!(*fs.folders.lock().unwrap(), folders.collect::<Vec<_>>());
}

#[test]
fn ranks_write_the_same_files_while_they_train_and_resume_from_them() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for zero in [Zero::Nothing, Zero::Weights] {
        let [now, behind] = [false, true].map(|async_save| {
            let mut config = run_of(inputs.path(), &format!("{zero:?} {async_save}"), 2, async_save);
            config.parallel.zero = zero;
            let all = train_two(&config, &Start::New, TestFs::new(None, None), |_, _| {});
            assert!(all.iter().all(|rank| matches!(rank, Ok(Ok(())))), "{all:?}");
            config
        });
        let expected = saved(&now.output_dir);
        let divided = expected.keys().any(|name| name.ends_with("optimizer-00002-of-00002.safetensors"));
        assert_eq!(divided, zero != Zero::Nothing);
        assert!(saved(&behind.output_dir) == expected, "{zero:?}");
        let from = Start::ResumeFrom(behind.output_dir.join("checkpoints/checkpoint-2"));
        let all = train_two(&behind, &from, TestFs::new(None, None), |_, _| {});
        assert!(all.iter().all(|rank| matches!(rank, Ok(Ok(())))), "{all:?}");
        let again = saved(&behind.output_dir);
        let changed: Vec<_> =
            expected.iter().filter(|(name, bytes)| again[*name] != **bytes).map(|(name, _)| name).collect();
        assert!(changed.is_empty(), "{zero:?}: resumed from checkpoint-2, {changed:?} differ");
    }
}

#[test]
fn a_full_disk_ends_the_run_with_the_file_and_no_checkpoint() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for async_save in [false, true] {
        let config = run_of(inputs.path(), &format!("run {async_save}"), 2, async_save);
        let fs = TestFs::new(None, Some("checkpoint-4/model"));
        let error = train(&config, &Start::New, fs, Group::solo(), &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("/.tmp-checkpoint-4/model.safetensors: No space left on device"), "{error}");
        assert_eq!(newest(&config.output_dir), 2);
        assert!(saved(&config.output_dir).keys().all(|name| name.contains("checkpoint-2/")));
    }
}

#[test]
fn a_rank_that_cannot_write_ends_all_with_its_words() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for async_save in [false, true] {
        let mut config = run_of(inputs.path(), &format!("run {async_save}"), 2, async_save);
        config.parallel.zero = Zero::OptimizerStates;
        // Rank 0 is still writing when it learns that rank 1 has failed, and stops.
        let fs = TestFs::new(async_save.then_some("checkpoint-4/model"), Some("checkpoint-4/training/optimizer-00002"));
        let words = "optimizer-00002-of-00002.safetensors: No space left on device";
        let release_later = move |_, done: &StepReport| {
            if done.step == 4 {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(500));
                    fs.release();
                });
            }
        };
        let all = train_two(&config, &Start::New, fs, release_later);
        let [Ok(Err(Error::Rank { rank: 1, words: first })), Ok(Err(second @ Error::Io { .. }))] = &all[..] else {
            panic!("{all:?}")
        };
        assert!(first.contains(words) && second.to_string().contains(words), "{first}, {second}");
        assert_eq!(newest(&config.output_dir), 2);
        assert!(saved(&config.output_dir).keys().all(|name| name.contains("checkpoint-2/")));
    }
}

/// A rank is lost after step 5, while rank 0 still writes the checkpoint of step 4.
#[test]
fn a_rank_that_is_lost_while_others_write_leaves_the_checkpoint_before() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let config = run_of(inputs.path(), "run", 2, true);
    let lost = |rank, done: &StepReport| assert!(rank == 0 || done.step < 5, "this rank is lost");
    let all = train_two(&config, &Start::New, TestFs::new(Some("checkpoint-4/model"), None), lost);
    assert!(matches!(&all[..], [Ok(Err(Error::Tensor(_))), Err(_)]), "{all:?}");
    assert_eq!(newest(&config.output_dir), 2);
    assert!(saved(&config.output_dir).keys().all(|name| name.contains("checkpoint-2/")));
    let all = train_two(&config, &Start::Resume, TestFs::new(None, None), |_, _| {});
    assert!(all.iter().all(|rank| matches!(rank, Ok(Ok(())))), "{all:?}");
    assert_eq!(newest(&config.output_dir), 6);
}
