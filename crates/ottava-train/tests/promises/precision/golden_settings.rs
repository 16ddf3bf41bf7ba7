//! The results of other settings than the recipe: five steps of two micro-batches, bit for bit on the CPU. Also the calls of a step to a GPU, from a
//! dry run.
//!  If a change is meant to change these results, record them again with `OTTAVA_GOLDEN=record`, and give the reason in the commit.

use crate::models::families::families;
use crate::setup::{Seeded, batch, precision, recipe, recipes_on, tiny_llama};
use crate::step::steps;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::scaling::OneRank;
use ottava_recipe::storage::{Formats, Masters, Share, Storage};
use ottava_recipe::{Delayed, FirstStep, Fp8Format, Precision, Recipe, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use ottava_train::step::TrainStep;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{Read, Write};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden_settings.json");
const LAUNCHES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/launches.txt.gz");
/// The prefix of the first line of a trace, in the file of all traces.
const HEADING: &str = "== ";

/// A run of a few steps.
struct Setting {
    name: String,
    recipe: Recipe,
    kept: MemoryPolicy,
    /// The steps whose products read 16-bit operands.
    high_precision: std::ops::Range<usize>,
}

fn named(name: RecipeName) -> Recipe {
    recipe(name, Fp8Format::Auto)
}

fn settings() -> Vec<Setting> {
    use RecipeName::{Bf16, Fp8Block, Fp8Current, Fp8Delayed, Fp8Row};
    let mut all = Vec::new();
    let mut add = |name: String, recipe: Recipe, kept: MemoryPolicy, high_precision| {
        all.push(Setting { name, recipe, kept, high_precision });
    };
    for recipe in [Bf16, Fp8Delayed, Fp8Current] {
        for storage in Storage::ALL {
            let kept =
                MemoryPolicy { formats: storage.formats(), weight_codes: storage.weight_codes(), ..MemoryPolicy::FULL };
            add(format!("{}, storage {}", recipe.as_str(), storage.as_str()), named(recipe), kept, 0..0);
        }
    }
    for recipe in [Fp8Row, Fp8Block] {
        let kept = MemoryPolicy { formats: Storage::Bfloat16.formats(), ..MemoryPolicy::FULL };
        add(format!("{}, storage bfloat16", recipe.as_str()), named(recipe), kept, 0..0);
    }
    for recipe in [Bf16, Fp8Delayed, Fp8Current, Fp8Row, Fp8Block] {
        for recompute in Recompute::ALL {
            let kept = MemoryPolicy { recompute, ..MemoryPolicy::FULL };
            add(format!("{}, recompute {}", recipe.as_str(), recompute.as_str()), named(recipe), kept, 0..0);
        }
        for recompute in [Recompute::None, Recompute::NormSwiglu] {
            let kept = MemoryPolicy { recompute, saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL };
            let name = format!("{}, saved activations float8, recompute {}", recipe.as_str(), recompute.as_str());
            add(name, named(recipe), kept, 0..0);
        }
    }
    for recipe in [Fp8Delayed, Fp8Current, Fp8Block] {
        add(format!("{}, steps 1 and 2 in high precision", recipe.as_str()), named(recipe), MemoryPolicy::FULL, 1..3);
    }
    for recipe in [Fp8Delayed, Fp8Current] {
        let smooth = Precision {
            recipe,
            smooth_swiglu: true,
            delayed: Delayed { amax_history_len: 4, ..Delayed::default() },
            ..Precision::default()
        }
        .recipe();
        let full = MemoryPolicy { recompute: Recompute::Full, ..MemoryPolicy::FULL };
        add(format!("{}, smooth", recipe.as_str()), smooth.clone(), MemoryPolicy::FULL, 0..0);
        add(format!("{}, smooth, recompute full", recipe.as_str()), smooth.clone(), full, 0..0);
        add(format!("{}, smooth, steps 1 and 2 in high precision", recipe.as_str()), smooth, MemoryPolicy::FULL, 1..3);
    }
    for first_step in [FirstStep::Unscaled, FirstStep::Current] {
        let precision = Precision {
            recipe: Fp8Delayed,
            delayed: Delayed { first_step, amax_history_len: 4, ..Delayed::default() },
            ..Precision::default()
        };
        add(format!("fp8-delayed, first step {first_step:?}"), precision.recipe(), MemoryPolicy::FULL, 0..0);
    }
    let remainder = MemoryPolicy {
        formats: Formats { masters: Masters::Remainder, ..MemoryPolicy::FULL.formats },
        ..MemoryPolicy::FULL
    };
    add("fp8-delayed, masters in the remainder".into(), named(Fp8Delayed), remainder, 0..0);
    all
}

/// The results of a setting on the CPU.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Golden {
    losses: Vec<f32>,
    /// The SHA-256 over norms, amaxes, scales, counts of casts, weights, moments and histories.
    all: String,
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn golden(setting: &Setting) -> Golden {
    let high = setting.high_precision.clone();
    let mut counts = Vec::new();
    let seen = steps::run(&setting.recipe, &Device::Cpu, setting.kept, false, |model, step| {
        counts.extend(model.scaling().measured(&OneRank).unwrap().into_iter().map(|cast| (cast.name, cast.counts)));
        precision(high.contains(&step))
    });
    let losses = seen.iter().filter(|(name, _)| name.starts_with("loss and norm")).map(|(_, v)| v[0] as f32).collect();
    let mut all = Sha256::new();
    for (name, values) in &seen {
        all.update(name.as_bytes());
        values.iter().for_each(|value| all.update(value.to_bits().to_le_bytes()));
    }
    for (name, counts) in counts {
        all.update(format!("{name} {} {} {}", counts.elements, counts.saturated, counts.underflowed));
    }
    Golden { losses, all: hex(&all.finalize()) }
}

fn recording() -> bool {
    std::env::var("OTTAVA_GOLDEN").is_ok_and(|value| value == "record")
}

#[test]
fn every_setting_leaves_the_recorded_bits() {
    let seen: BTreeMap<String, Golden> =
        settings().iter().map(|setting| (setting.name.clone(), golden(setting))).collect();
    if recording() {
        let line = |(name, golden): (&String, &Golden)| {
            format!("  {}: {}", serde_json::json!(name), serde_json::json!(golden))
        };
        let lines: Vec<_> = seen.iter().map(line).collect();
        std::fs::write(FILE, format!("{{\n{}\n}}\n", lines.join(",\n"))).expect("the file is written");
    }
    let text = std::fs::read_to_string(FILE).expect("golden_settings.json is there; OTTAVA_GOLDEN=record makes it");
    let recorded: BTreeMap<String, Golden> = serde_json::from_str(&text).expect("one object per setting");
    assert_eq!(seen.keys().collect::<Vec<_>>(), recorded.keys().collect::<Vec<_>>(), "settings");
    let moved: Vec<_> = seen.iter().filter(|(name, golden)| recorded[*name] != **golden).collect();
    assert!(moved.is_empty(), "not the recorded bits: {moved:#?}");
    for recipe in ["bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block"] {
        let kept_all = &seen[&format!("{recipe}, recompute none")];
        for policy in Recompute::ALL {
            let what = format!("{recipe}, recompute {}", policy.as_str());
            assert_eq!(&seen[&what], kept_all, "{what}: a policy changes nothing, and measures nothing twice");
        }
    }
}

/// Renders traces by setting, in the form of the file.
fn render(traces: &BTreeMap<String, String>) -> String {
    traces.iter().map(|(name, trace)| format!("{HEADING}{name}\n{trace}")).collect()
}

fn recorded_traces() -> BTreeMap<String, String> {
    let file = std::fs::File::open(LAUNCHES).expect("launches.txt.gz is there; OTTAVA_GOLDEN=record makes it");
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).expect("it is whole");
    let trace = |part: &str| part.split_once('\n').map(|(name, trace)| (name.to_string(), trace.to_string()));
    text.split(HEADING).skip(1).map(|part| trace(part).expect("a name on a line of its own")).collect()
}

/// Returns the calls of the first two steps on a GPU in a dry run: a digest of the first step, all calls of the second step, and the memory.
fn launches(recipe: &Recipe, kept: MemoryPolicy, precision: StepPrecision) -> String {
    launches_of(&tiny_llama(), recipe, kept, precision)
}

/// Returns the calls of a model of `sizes`.
fn launches_of(sizes: &DecoderConfig, recipe: &Recipe, kept: MemoryPolicy, precision: StepPrecision) -> String {
    let device = Device::dry_gpu(GpuModel::h200());
    let Device::Cuda(gpu) = &device else { unreachable!("a GPU in a dry run") };
    let (rows, tokens) = (2, 24);
    let mut model = Decoder::new(sizes, recipe, &device, Purpose::Train(kept), 32, &mut Seeded { std: 0.1 }).unwrap();
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let mut work = TrainStep::new(&model, 2, rows, tokens).unwrap();
    let mut text = String::new();
    gpu.start_trace();
    model.quantize_weights().unwrap();
    let mut step = |model: &mut Decoder, optimizer: &mut AdamWOptimizer| {
        for micro_batch in 0..2 {
            let [inputs, targets] =
                batch("launches", rows, tokens, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
            work.load(micro_batch, &Batch::whole(inputs, targets, rows)).unwrap();
        }
        work.run(model, optimizer, 1e-3, precision).unwrap();
    };
    step(&mut model, &mut optimizer);
    let first = gpu.take_trace();
    text += &format!("first step: {} calls, {}\n", first.len(), hex(&Sha256::digest(first.join("\n"))));
    gpu.start_trace();
    step(&mut model, &mut optimizer);
    gpu.take_trace().iter().for_each(|line| text += &format!("{line}\n"));
    let peak = device.tracker().unwrap().take_peak();
    text += &format!("peak {} during {}: {:?}\n", peak.bytes, peak.during, peak.by_scope);
    text
}

#[test]
fn every_setting_launches_the_recorded_work() {
    let mut seen: BTreeMap<String, String> = settings()
        .into_iter()
        .map(|setting| {
            (setting.name, launches(&setting.recipe, setting.kept, precision(!setting.high_precision.is_empty())))
        })
        .collect();
    let h200 = Device::dry_gpu(GpuModel::h200());
    seen.extend(
        recipes_on(&h200)
            .into_iter()
            .map(|(name, recipe)| (name, launches(&recipe, MemoryPolicy::FULL, StepPrecision::Recipe))),
    );
    let offloaded =
        MemoryPolicy { offload_optimizer: Share::new(1.0), offload_parameters: Share::new(0.5), ..MemoryPolicy::FULL };
    seen.insert("offloaded".into(), launches(&named(RecipeName::Fp8Delayed), offloaded, StepPrecision::Recipe));
    let residuals = MemoryPolicy { recompute: Recompute::Full, offload_residuals: true, ..MemoryPolicy::FULL };
    seen.insert(
        "residuals offloaded".into(),
        launches(&named(RecipeName::Fp8Delayed), residuals, StepPrecision::Recipe),
    );
    seen.extend(families().into_iter().map(|(family, sizes)| {
        let recipe = named(RecipeName::Fp8Delayed);
        (family.to_string(), launches_of(&sizes, &recipe, MemoryPolicy::FULL, StepPrecision::Recipe))
    }));
    if recording() {
        let file = std::fs::File::create(LAUNCHES).expect("the file is made");
        let mut file = GzEncoder::new(file, Compression::best());
        file.write_all(render(&seen).as_bytes()).and_then(|()| file.finish().map(drop)).expect("the file is written");
    }
    let recorded = recorded_traces();
    assert_eq!(seen.keys().collect::<Vec<_>>(), recorded.keys().collect::<Vec<_>>(), "settings");
    for (name, trace) in &seen {
        let (recorded, now): (Vec<_>, Vec<_>) = (recorded[name].lines().collect(), trace.lines().collect());
        if let Some(line) = (0..recorded.len().max(now.len())).find(|&line| recorded.get(line) != now.get(line)) {
            panic!("{name}, line {line}: recorded {:?}, now {:?}", recorded.get(line), now.get(line));
        }
    }
}
