//! Distillation from stored distributions: beside a running teacher, ranks, plans, runs that stop and resume, and folders that do not fit.

use crate::objectives::distillation::{column, student, teacher_folder};
use crate::runs::resume::{STEPS, metrics, state, train, write_inputs};
use crate::setup::on_ranks;
use ottava_checkpoint::ModelFiles;
use ottava_common::hash::{seal, unseal};
use ottava_common::{Error, Result};
use ottava_data::{Packing, Tokenizer};
use ottava_recipe::RecipeName;
use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use ottava_train::objective::distillation::{StoredLogits, store_logits};
use ottava_train::plan::MemoryPlan;
use ottava_train::trainer::{Start, Trainer};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// The vocabulary of the models.
const VOCABULARY: usize = 100;

/// The folders of a test: data, runs and a teacher.
struct Folders {
    inputs: TempDir,
    runs: TempDir,
    teacher: PathBuf,
}

impl Folders {
    fn new() -> Folders {
        let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_inputs(inputs.path());
        let teacher = teacher_folder(inputs.path(), runs.path());
        Folders { inputs, runs, teacher }
    }

    /// A run that reads `top_k` tokens of each distribution in the folder `logits`.
    fn run(&self, name: &str, top_k: usize) -> RunConfig {
        let mut run = student(self.inputs.path(), &self.runs.path().join(name), Path::new(""), RecipeName::Fp32);
        (run.distillation.logits, run.distillation.top_k) = (self.runs.path().join("logits"), top_k);
        run
    }

    /// Writes the distributions that `run` reads.
    fn store(&self, run: &RunConfig) -> Result<StoredLogits> {
        self.store_until(run, u64::MAX)
    }

    /// As [`Folders::store`], but stops after this number of tokens.
    fn store_until(&self, run: &RunConfig, most: u64) -> Result<StoredLogits> {
        let mut run = run.clone();
        run.resolve_data()?;
        let data = run.prepare_data(&Tokenizer::load(run.tokenizer_path())?)?;
        let mut progress = |tokens| match tokens < most {
            true => Ok(()),
            false => Err(Error::Cancelled("stopped".into())),
        };
        store_logits(&run, &data, &self.teacher, &Device::Cpu, &mut progress)
    }

    /// The metrics of the whole `run`.
    fn metrics(&self, run: &RunConfig) -> Vec<serde_json::Value> {
        train(run, &Device::Cpu, &Start::New, STEPS).unwrap();
        metrics(&run.output_dir)
    }
}

/// With all tokens of the vocabulary, each step is the step of a run with the teacher; with fewer tokens, the loss is smaller.
#[test]
fn stored_distributions_teach_as_their_teacher() {
    let folders = Folders::new();
    for beta in [0.0, 0.5, 1.0] {
        let of = |name: &str, top_k: usize| {
            let mut run = folders.run(&format!("{name}-{beta}"), top_k);
            run.distillation.beta = beta;
            run
        };
        let all = of("all", VOCABULARY);
        let stored = folders.store(&all).unwrap();
        assert_eq!(stored.documents, 36, "without the held-out lines");
        let mut running = of("running", VOCABULARY).with_teacher(&folders.teacher);
        running.data.packing = Packing::Bfd;
        let [all, running, few] = [all, running, of("few", 5)].map(|run| folders.metrics(&run));
        let numbers = |lines: &[_]| ["loss", "grad_norm", "eval_loss"].map(|key| column(lines, key)).concat();
        let (found, expected) = (numbers(&all), numbers(&running));
        assert!(found.len() == expected.len() && found.len() > 2 * STEPS as usize);
        // Six steps of F32, whose log-probabilities of the teacher are rounded at other places.
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b.abs().max(0.1);
        assert!(found.iter().zip(&expected).all(near), "{beta}: {found:?}, {expected:?}");
        let first = |lines: &[_]| column(lines, "loss")[0];
        assert!((0.01..first(&all)).contains(&first(&few)), "{beta}: {} and {}", first(&few), first(&all));
    }
}

/// A folder that was written in two parts teaches what a folder teaches that was written at once, and a run that resumes continues to the bit. Rows
/// of one document read what was written for packed rows.
#[test]
fn stopping_changes_neither_folders_nor_runs() {
    let folders = Folders::new();
    let run = |name: &str| folders.run(name, 8);
    let whole = run("whole");
    let stored = folders.store(&whole).unwrap();
    let seen = folders.metrics(&whole);
    let losses = column(&seen, "loss");
    assert!(losses.len() == STEPS as usize && losses.last() < losses.first(), "{losses:?}");

    let stopped = run("stopped");
    train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&stopped, &Device::Cpu, &Start::Resume, STEPS).unwrap();
    assert_eq!(metrics(&stopped.output_dir), seen);
    assert_eq!(state(&stopped.output_dir), state(&whole.output_dir));

    let in_parts = |name: &str| {
        let mut run = run(name);
        run.distillation.logits = folders.runs.path().join("parts");
        run
    };
    folders.store_until(&in_parts("parts"), 200).unwrap_err();
    let text = train(&in_parts("parts"), &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string();
    assert!(text.contains("some documents have no distributions yet; run `ottava logits` again"), "{text}");
    assert_eq!(folders.store(&in_parts("parts")).unwrap(), stored);
    // No document was scored twice.
    let documents = |shard: usize| {
        let path = folders.runs.path().join(format!("parts/shard-0000{shard}.safetensors"));
        ModelFiles::open_file(&path).unwrap().info("lengths").unwrap().elements() as u64
    };
    assert_eq!(documents(0) + documents(1), stored.documents);
    assert_eq!(folders.metrics(&in_parts("parts")), seen);
    // A complete folder is not written again, and no token is read.
    assert_eq!(folders.store_until(&in_parts("parts"), 0).unwrap(), stored);

    let mut padded = run("padded");
    padded.data.packing = Packing::None;
    assert_eq!(folders.metrics(&padded).len(), seen.len());
}

#[test]
fn ranks_read_the_distributions_of_one_rank() {
    let folders = Folders::new();
    folders.store(&folders.run("any", 8)).unwrap();
    let logged = |ranks: usize| {
        let mut run = folders.run(&format!("ranks-{ranks}"), 4);
        (run.training.max_steps, run.training.gradient_accumulation_steps) = (Some(2), 2 / ranks);
        let output = run.output_dir.clone();
        on_ranks(ranks, move |group| {
            let mut trainer = Trainer::shared(run.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        ["loss", "grad_norm"].map(|key| column(&metrics(&output), key)).concat()
    };
    let (one, two) = (logged(1), logged(2));
    assert_eq!(one.len(), 4);
    // Sums in F32 in another order.
    assert!(one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-5), "{one:?}, {two:?}");
}

/// A plan needs neither the teacher nor the folder, and counts an id and a log-probability for each known token.
#[test]
fn plans_count_the_known_tokens() {
    let folders = Folders::new();
    let plan_on = |device: &Device, run: &RunConfig| {
        let sizes = run.decoder_config().unwrap();
        MemoryPlan::new(&ResolvedConfig::fastest(run), &sizes, device).unwrap().peak_bytes
    };
    let plan = |run: &RunConfig| plan_on(&Device::Cpu, run);
    let run = |top_k| folders.run("plan", top_k);
    let tokens = 16 * 6 * 2;
    assert_eq!(plan(&run(72)) - plan(&run(8)), tokens * 64 * 8);
    assert!(plan(&run(8)) < plan(&run(8).with_teacher(&folders.teacher)));
    let gpu = Device::dry_gpu(GpuModel::h200());
    assert!(plan_on(&gpu, &run(72)) > plan_on(&gpu, &run(8)));
    let error = MemoryPlan::new(&ResolvedConfig::fastest(&run(101)), &run(8).decoder_config().unwrap(), &Device::Cpu);
    let error = error.err().unwrap().to_string();
    assert!(
        error.contains("`distillation.top_k` is 101, and the model of") && error.contains("has 100 tokens"),
        "{error}"
    );
}

#[test]
fn folders_that_do_not_fit_are_errors() {
    let folders = Folders::new();
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut run = folders.run("run", 8);
        change(&mut run);
        train(&run, &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string()
    };
    let text = error(&|_| {});
    assert!(text.contains("there is no index.json; `ottava logits RUN.toml --teacher FOLDER` writes"), "{text}");
    folders.store(&folders.run("run", 8)).unwrap();
    for (change, words) in [
        (
            &(|run: &mut RunConfig| run.distillation.temperature = 1.0) as &dyn Fn(&mut RunConfig),
            "0.9 in the folder, 1 in the run",
        ),
        (
            &|run: &mut RunConfig| run.distillation.top_k = 9,
            "8 tokens are known of each distribution, and `distillation.top_k` is 9",
        ),
        (&|run: &mut RunConfig| run.data.max_length = 20, "`data.max_length`: 16 in the folder, 20 in the run"),
        (&|run: &mut RunConfig| run.data.val_set_size = 5.0, "documents to train on: 36 in the folder, 35 in the run"),
        (
            &|run: &mut RunConfig| run.data.train_on_inputs = !run.data.train_on_inputs,
            "the distributions are of other data",
        ),
    ] {
        let text = error(change);
        assert!(text.contains(words) && text.contains("`distillation.logits`"), "{words}: {text}");
    }
    let text = folders.store(&folders.run("run", 4)).unwrap_err().to_string();
    assert!(text.contains("`distillation.top_k`: 8 in the folder, 4 in the run"), "{text}");
    let mut other = Folders { teacher: folders.runs.path().join("other"), ..folders };
    let run = RunConfig { seed: 9, output_dir: other.teacher.clone(), ..student_run(&other) };
    train(&run, &Device::Cpu, &Start::New, STEPS).unwrap();
    other.teacher.push(format!("checkpoints/checkpoint-{STEPS}"));
    let text = other.store(&other.run("run", 8)).unwrap_err().to_string();
    assert!(
        text.contains("the distributions are of another teacher; set `distillation.logits` to another folder"),
        "{text}"
    );
}

/// A run without a teacher.
fn student_run(folders: &Folders) -> RunConfig {
    student(folders.inputs.path(), Path::new(""), Path::new(""), RecipeName::Fp32)
}

/// Bytes that anybody may have written end the run with the path, and not with a panic.
#[test]
fn damaged_folders_are_errors() {
    let folders = Folders::new();
    let run = folders.run("run", 8);
    folders.store(&run).unwrap();
    let (index, shard) =
        ["index.json", "shard-00000.safetensors"].map(|name| run.distillation.logits.join(name)).into();
    let (good_index, good_shard) = (std::fs::read(&index).unwrap(), std::fs::read(&shard).unwrap());
    let error = |words: &str| {
        let text = train(&run, &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("run `ottava logits` again"), "{words}: {text}");
        std::fs::write(&index, &good_index).unwrap();
        std::fs::write(&shard, &good_shard).unwrap();
    };
    // The tensors in the file, which begins with the length of its header.
    let header = 8 + u64::from_le_bytes(good_shard[..8].try_into().unwrap()) as usize;
    let description: serde_json::Value = serde_json::from_slice(&good_shard[8..header]).unwrap();
    let overwrite = |name: &str, words: &[[u8; 4]]| {
        let start = header + description[name]["data_offsets"][0].as_u64().unwrap() as usize;
        let mut bytes = good_shard.clone();
        bytes[start..start + 4 * words.len()].copy_from_slice(words.as_flattened());
        std::fs::write(&shard, bytes).unwrap();
    };
    overwrite("ids", &[(-1i32).to_le_bytes()]);
    error("distribution 0 has an id that is not in the vocabulary");
    overwrite("ids", &[100i32.to_le_bytes()]);
    error("distribution 0 has an id that is not in the vocabulary");
    overwrite("ids", &[7i32.to_le_bytes(); 2]);
    error("distribution 0 has an id twice");
    overwrite("log_probs", &[f32::NAN.to_le_bytes()]);
    error("has numbers that are no log-probabilities in descending order");
    overwrite("log_probs", &[(-50f32).to_le_bytes()]);
    error("has numbers that are no log-probabilities in descending order");
    overwrite("rest", &[1f32.to_le_bytes()]);
    error("has numbers that are no log-probabilities in descending order");
    for length in [-1i32, i32::MAX] {
        overwrite("lengths", &[length.to_le_bytes()]);
        error("the sum of `lengths` is not the number of distributions");
    }
    overwrite("keys", &[[9; 4]]);
    error("has no distributions of a document of");
    let mut value = unseal(&good_index).unwrap();
    value["distributions"]["format"] = 2.into();
    std::fs::write(&index, seal(&value)).unwrap();
    error("it has format 2, this program reads 1");
    value["distributions"]["format"] = 1.into();
    value["distributions"]["top_k"] = 9.into();
    std::fs::write(&index, seal(&value)).unwrap();
    error("`ids` is I32 [");
    std::fs::write(&index, "{}").unwrap();
    error("index.json: it is damaged");
    std::fs::write(&shard, &good_shard[..good_shard.len() / 2]).unwrap();
    let text = train(&run, &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string();
    assert!(text.contains("shard-00000.safetensors"), "{text}");
}
