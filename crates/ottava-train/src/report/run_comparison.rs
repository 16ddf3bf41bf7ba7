//! Compares two runs: finds the first step, layer and tensor that differ in the records of both runs, and the linears whose errors differ.

use super::metrics::MAX_METRICS_BYTES;
use super::sentinel_table::SentinelTable;
use ottava_checkpoint::ModelFiles;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_recipe::scaling::Quantity;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The common records of two runs, and the first step in which they differ.
#[derive(Debug, Serialize)]
pub struct RunComparison {
    /// The first and the last step that have metrics in both runs.
    pub steps: Option<[u64; 2]>,
    /// The first step whose records differ.
    pub parting: Option<Parting>,
    /// The checkpoints that both runs have, up to the first checkpoint that differs.
    pub checkpoints: Vec<ComparedCheckpoint>,
    /// How much the casts of each linear change the loss in both runs, in nats per token. The largest difference is first.
    pub loss_costs: Vec<ComparedCost>,
}

/// A step whose records differ.
#[derive(Debug, PartialEq, Serialize)]
pub struct Parting {
    /// The number of the step.
    pub step: u64,
    /// The records that differ: all metrics, the first tensor of each other file, and the product whose slope differs most.
    pub differences: Vec<Difference>,
}

/// A record that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The file that holds the record.
    pub file: &'static str,
    /// The name of the metric or tensor.
    pub name: String,
    /// The number of its block.
    pub layer: Option<usize>,
    /// The values in both runs.
    pub values: [Value; 2],
    /// The number of further tensors of the file that differ in this step.
    pub others: usize,
}

/// A checkpoint of both runs.
#[derive(Debug, PartialEq, Serialize)]
pub struct ComparedCheckpoint {
    /// The step of the checkpoint.
    pub step: u64,
    /// The names of the tensors whose bits differ, in the order of the file.
    pub different: Vec<String>,
    /// The number of tensors that both checkpoints have.
    pub tensors: usize,
}

/// How much the casts of a linear change the loss.
#[derive(Debug, PartialEq, Serialize)]
pub struct ComparedCost {
    /// The name of the linear.
    pub linear: String,
    /// The costs in the first run and in the second run. A cost is 0 if nothing is cast.
    pub costs: [f64; 2],
}

/// The entries of a line, in their order.
type Entries = Vec<(String, Value)>;

/// A file of records, and a function that returns the entries of a line.
struct Source {
    file: &'static str,
    entries: fn(&Value) -> Entries,
}

/// The files of records, in the order in which differences are listed.
const SOURCES: [Source; 4] = [
    Source { file: "metrics.jsonl", entries: |line| of_keys(line, &["loss", "grad_norm", "eval_loss"]) },
    Source { file: "digests.jsonl", entries: |line| of_object(&line["digests"], "") },
    Source {
        file: "casts.jsonl",
        entries: |line| {
            let casts = of_object(&line["casts"], "").into_iter();
            casts.map(|(name, cast)| (format!("amax of {name}"), cast["amax"].clone())).collect()
        },
    },
    Source {
        file: SENTINEL,
        entries: |line| {
            let products = [Quantity::Fprop, Quantity::Dgrad, Quantity::Wgrad];
            products.into_iter().flat_map(|which| of_object(&line[which.as_str()], which.as_str())).collect()
        },
    },
];

const SENTINEL: &str = "sentinel.jsonl";

fn of_keys(line: &Value, keys: &[&str]) -> Entries {
    keys.iter().filter_map(|key| Some((key.to_string(), line.get(key)?.clone()))).collect()
}

/// Returns the entries of an object. If `of` is not empty, it precedes their names.
fn of_object(object: &Value, of: &str) -> Entries {
    let name = |name: &String| if of.is_empty() { name.clone() } else { format!("{of} of {name}") };
    object.as_object().into_iter().flatten().map(|(key, value)| (name(key), value.clone())).collect()
}

/// Reads the lines of a file of records, by step. Returns no lines if the file does not exist. An incomplete last line is ignored.
fn read(path: &Path, entries: fn(&Value) -> Entries) -> Result<BTreeMap<u64, Entries>> {
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let text = input::read_text(path, MAX_METRICS_BYTES).map_err(Error::io(path))?;
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate();
    let read = lines.map(|(number, line)| {
        let value: Option<Value> = serde_json::from_str(line).ok();
        match value.as_ref().and_then(|value| Some((value["step"].as_u64()?, entries(value)))) {
            Some(line) => Ok(line),
            None => Err(Error::Data(format!(
                "{}:{}: not a line with a step; is the file another program's?",
                path.display(),
                number + 1
            ))),
        }
    });
    read.collect()
}

/// Returns the entries that both lines have with different values.
fn different(a: &Entries, b: &Entries) -> Vec<(String, [Value; 2])> {
    let b: HashMap<&str, &Value> = b.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let both = a.iter().filter_map(|(name, value)| Some((name, value, *b.get(name.as_str())?)));
    both.filter(|(_, a, b)| a != b).map(|(name, a, b)| (name.clone(), [a.clone(), b.clone()])).collect()
}

/// Returns the distance between two slopes of a product.
fn slopes_apart(values: &[Value; 2]) -> f64 {
    let [a, b] = [0, 1].map(|run| values[run]["slope"].as_f64().unwrap_or(f64::INFINITY));
    if a == b { 0.0 } else { (a - b).abs() }
}

/// Returns the number of the block of a tensor: the first part of its name that is a number.
fn layer_of(name: &str) -> Option<usize> {
    name.split(['.', ' ']).find_map(|part| part.parse().ok())
}

impl RunComparison {
    /// Compares the runs in two folders.
    pub fn read(a: &Path, b: &Path) -> Result<RunComparison> {
        let (mut parting, mut steps): (Option<Parting>, _) = (None, None);
        for Source { file, entries } in SOURCES {
            let [of_a, of_b] = [read(&a.join(file), entries)?, read(&b.join(file), entries)?];
            let common: Vec<u64> = of_a.keys().filter(|step| of_b.contains_key(step)).copied().collect();
            if steps.is_none() {
                steps = common.first().zip(common.last()).map(|(first, last)| [*first, *last]);
            }
            let found = common.into_iter().map(|step| (step, different(&of_a[&step], &of_b[&step])));
            let Some((step, mut found)) = found.into_iter().find(|(_, found)| !found.is_empty()) else { continue };
            if parting.as_ref().is_some_and(|parting| parting.step < step) {
                continue;
            }
            let first = parting.filter(|parting| parting.step == step);
            let mut differences = first.map_or(Vec::new(), |parting| parting.differences);
            if file == SENTINEL {
                // The sort is stable, so the first of several entries with equal distances stays first.
                found.sort_by(|(_, a), (_, b)| slopes_apart(b).total_cmp(&slopes_apart(a)));
            }
            let (shown, others) = if file == SOURCES[0].file { (found.len(), 0) } else { (1, found.len() - 1) };
            differences.extend(found.into_iter().take(shown).map(|(name, values)| {
                let layer = layer_of(&name);
                Difference { file, name, layer, values, others }
            }));
            parting = Some(Parting { step, differences });
        }
        Ok(RunComparison { steps, parting, checkpoints: checkpoints(a, b)?, loss_costs: loss_costs(a, b)? })
    }
}

/// Compares the weights of checkpoints of equal steps, up to the first checkpoint that differs.
fn checkpoints(a: &Path, b: &Path) -> Result<Vec<ComparedCheckpoint>> {
    let folder = |run: &Path| run.join("checkpoints");
    let names = std::fs::read_dir(folder(a)).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let step = |name: std::ffi::OsString| {
        let name = name.into_string().ok()?;
        Some((name.strip_prefix("checkpoint-")?.parse::<u64>().ok()?, name))
    };
    let mut common: Vec<_> = names.filter_map(step).filter(|(_, name)| folder(b).join(name).is_dir()).collect();
    common.sort();
    let mut compared = Vec::new();
    for (step, name) in common {
        let [of_a, of_b] = [ModelFiles::open(&folder(a).join(&name))?, ModelFiles::open(&folder(b).join(&name))?];
        let shared: Vec<&str> = of_a.names().filter(|name| of_b.names().any(|other| other == *name)).collect();
        let mut different = Vec::new();
        for name in &shared {
            if of_a.read(name)? != of_b.read(name)? {
                different.push(name.to_string());
            }
        }
        let differs = !different.is_empty();
        compared.push(ComparedCheckpoint { step, different, tensors: shared.len() });
        if differs {
            break;
        }
    }
    Ok(compared)
}

fn loss_costs(a: &Path, b: &Path) -> Result<Vec<ComparedCost>> {
    let mut costs: BTreeMap<String, [f64; 2]> = BTreeMap::new();
    for (run, folder) in [a, b].into_iter().enumerate() {
        let path = folder.join(SENTINEL);
        if path.is_file() {
            for (linear, cost) in SentinelTable::read(&path)?.means(Quantity::LossCost) {
                costs.entry(linear).or_default()[run] = cost;
            }
        }
    }
    let mut all: Vec<_> = costs.into_iter().map(|(linear, costs)| ComparedCost { linear, costs }).collect();
    all.sort_by(|x, y| (y.costs[1] - y.costs[0]).abs().total_cmp(&(x.costs[1] - x.costs[0]).abs()));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(files: &[(&str, &[Value])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (file, lines) in files {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            std::fs::write(folder.path().join(file), text).unwrap();
        }
        folder
    }

    #[test]
    fn runs_part_at_the_first_step_of_any_file_and_at_the_first_tensor_of_each() {
        let metrics =
            |loss: [f64; 3]| [1, 2, 3].map(|step| json!({"step": step, "loss": loss[step - 1], "grad_norm": 1.0}));
        let digests = |last: &str| {
            let line = |step: u64, c: &str| json!({"step": step, "digests": {"b.2.x": "1", "a.1.y": c, "a.0.z": c}});
            [line(1, "7"), line(2, last)]
        };
        let sentinel = |slope: f64| {
            [json!({
                "step": 2, "loss_gap": 0.0, "gradient_cosine": 1.0, "gradient_norm_ratio": 1.0, "findings": [],
                "fprop": {"l.0.up": {"error": slope, "slope": 1.0}}, "dgrad": {"l.1.up": {"slope": slope}}
            })]
        };
        let a = run(&[
            ("metrics.jsonl", &metrics([3.0, 2.0, 1.0])),
            ("digests.jsonl", &digests("7")),
            (SENTINEL, &sentinel(1.0)),
        ]);
        let b = run(&[
            ("metrics.jsonl", &metrics([3.0, 2.0, 1.5])),
            ("digests.jsonl", &digests("8")),
            (SENTINEL, &sentinel(1.5)),
        ]);
        let compared = RunComparison::read(a.path(), b.path()).unwrap();
        assert_eq!(compared.steps, Some([1, 3]));
        let Parting { step, differences } = compared.parting.unwrap();
        let named: Vec<_> = differences.iter().map(|d| (d.file, d.name.as_str(), d.layer, d.others)).collect();
        assert_eq!(step, 2);
        assert_eq!(named, [("digests.jsonl", "a.1.y", Some(1), 1), (SENTINEL, "dgrad of l.1.up", Some(1), 1)]);
        let same = RunComparison::read(a.path(), a.path()).unwrap();
        assert!(same.parting.is_none() && same.checkpoints.is_empty());
    }

    #[test]
    fn costs_of_two_recipes_are_ranked_by_their_difference() {
        let line = |costs: Value| {
            [
                json!({"step": 1, "loss_gap": 0.0, "gradient_cosine": 1.0, "gradient_norm_ratio": 1.0, "findings": [], "loss_cost": costs}),
            ]
        };
        let a = run(&[(SENTINEL, &line(json!({"x": 0.1, "y": 0.2})))]);
        let b = run(&[(SENTINEL, &line(json!({"x": 0.1, "y": 0.5, "z": 0.2})))]);
        let costs = RunComparison::read(a.path(), b.path()).unwrap().loss_costs;
        let costs: Vec<_> = costs.iter().map(|one| (one.linear.as_str(), one.costs)).collect();
        assert_eq!(costs, [("y", [0.2, 0.5]), ("z", [0.0, 0.2]), ("x", [0.1, 0.1])]);
    }
}
