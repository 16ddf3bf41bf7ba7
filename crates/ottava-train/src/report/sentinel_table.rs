//! Reads a run's `sentinel.jsonl` as a table of tensors by comparisons.

use super::metrics::MAX_METRICS_BYTES;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_recipe::scaling::Quantity;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// The results of a comparison for the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Whole {
    /// The loss by the recipe minus the loss in BF16, in nats per token. It is NaN if the file has null, since JSON cannot represent NaN.
    #[serde(deserialize_with = "or_nan")]
    pub loss_gap: f64,
    /// The cosine between the gradients by the recipe and in BF16, over all weights of the blocks.
    #[serde(deserialize_with = "or_nan")]
    pub gradient_cosine: f64,
    /// The norm of these gradients by the recipe, divided by their norm in BF16.
    #[serde(deserialize_with = "or_nan")]
    pub gradient_norm_ratio: f64,
}

fn or_nan<'de, D: serde::Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or(f64::NAN))
}

#[derive(Deserialize)]
struct Line {
    step: u64,
    findings: Vec<Value>,
    #[serde(flatten)]
    whole: Whole,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A table of tensors by comparisons.
#[derive(Clone, Debug, Default)]
pub struct SentinelTable {
    /// The step of each comparison.
    pub steps: Vec<u64>,
    /// The results of each comparison for the whole model.
    pub whole: Vec<Whole>,
    /// The number of findings of each comparison.
    pub findings: Vec<usize>,
    names: Vec<(Quantity, String)>,
    /// The values of each tensor, one per comparison: the cost in nats for [`Quantity::LossCost`], and the relative error for other quantities.
    values: Vec<Vec<Option<f64>>>,
}

impl SentinelTable {
    /// Reads a `sentinel.jsonl`. An incomplete last line is ignored.
    pub fn read(path: &Path) -> Result<SentinelTable> {
        let text = input::read_text(path, MAX_METRICS_BYTES).map_err(Error::io(path))?;
        let mut table = SentinelTable::default();
        let mut rows: HashMap<(Quantity, String), usize> = HashMap::new();
        for (number, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
            let line: Line = serde_json::from_str(line).map_err(|error| {
                let place = format!("{}:{}", path.display(), number + 1);
                Error::Data(format!(
                    "{place}: not a comparison of a sentinel ({error}); is the file another program's?"
                ))
            })?;
            table.steps.push(line.step);
            table.whole.push(line.whole);
            table.findings.push(line.findings.len());
            for quantity in Quantity::ALL {
                let of_quantity = line.rest.get(quantity.as_str()).and_then(Value::as_object);
                for (name, value) in of_quantity.into_iter().flatten() {
                    let row = *rows.entry((quantity, name.clone())).or_insert_with_key(|key| {
                        table.names.push(key.clone());
                        table.values.push(Vec::new());
                        table.names.len() - 1
                    });
                    table.values[row].resize(number, None);
                    // A number that is not finite is written as null.
                    let value = value.get("error").unwrap_or(value).as_f64().unwrap_or(f64::INFINITY);
                    table.values[row].push(Some(value));
                }
            }
        }
        table.values.iter_mut().for_each(|row| row.resize(table.steps.len(), None));
        Ok(table)
    }

    /// Returns whether the table has no comparison.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the tensors of `quantity`, with a value per comparison.
    pub fn rows(&self, quantity: Quantity) -> impl Iterator<Item = (&str, &[Option<f64>])> {
        let of_quantity = self.names.iter().zip(&self.values).filter(move |((of, _), _)| *of == quantity);
        of_quantity.map(|((_, name), values)| (name.as_str(), values.as_slice()))
    }

    /// Returns the tensors of `quantity` with the means of their values. The largest mean is first.
    pub fn means(&self, quantity: Quantity) -> Vec<(String, f64)> {
        let mean = |values: &[Option<f64>]| {
            let known = values.iter().flatten();
            known.clone().sum::<f64>() / known.count().max(1) as f64
        };
        let mut means: Vec<_> = self.rows(quantity).map(|(name, values)| (name.to_string(), mean(values))).collect();
        means.sort_by(|a, b| b.1.total_cmp(&a.1));
        means
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sentinel_maps;

    fn read(text: &str) -> Result<SentinelTable> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("sentinel.jsonl"), text).unwrap();
        SentinelTable::read(&folder.path().join("sentinel.jsonl"))
    }

    const LINES: [&str; 2] = [
        r#"{"step":1,"loss_gap":0.01,"gradient_cosine":0.99,"gradient_norm_ratio":1.0,"findings":[],"loss_cost":{"a":0.002,"b":0.004},"output":{"model.layers.0":{"error":0.03}}}"#,
        r#"{"step":101,"loss_gap":null,"gradient_cosine":0.98,"gradient_norm_ratio":1.0,"findings":[{}],"loss_cost":{"a":0.01},"output":{"model.layers.0":{"error":null}}}"#,
    ];

    #[test]
    fn a_table_has_a_row_per_tensor_and_a_column_per_comparison() {
        let table = read(&(LINES.join("\n") + "\n{\"step\":2")).unwrap();
        assert_eq!((&table.steps[..], &table.findings[..]), (&[1, 101][..], &[0, 1][..]));
        assert!(table.whole[1].loss_gap.is_nan() && table.whole[1].gradient_cosine == 0.98);
        let costs: Vec<_> = table.rows(Quantity::LossCost).collect();
        assert_eq!(costs, [("a", &[Some(0.002), Some(0.01)][..]), ("b", &[Some(0.004), None][..])]);
        let means = table.means(Quantity::LossCost);
        assert_eq!((means[0].0.as_str(), means[1].0.as_str()), ("a", "b"));
        // The mean of two decimals in F64 has some roundings of 2⁻⁵³.
        assert!((means[0].1 - 0.006).abs() < 1e-12 && means[1].1 == 0.004);
        assert_eq!(table.means(Quantity::Output)[0].1, f64::INFINITY);
        let page = sentinel_maps("a <b>", &table);
        assert_eq!((page.matches("<svg").count(), page.matches("Nothing to show").count()), (4, 3));
        assert!(page.contains("steps 1 to 1: 0.03<") && page.contains("steps 101 to 101: without bound<"), "{page}");
        assert!(!page.contains("NaN"));
    }

    #[test]
    fn files_that_are_no_comparisons_are_errors() {
        for text in ["{\"step\":1}\n", "hello\n"] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("sentinel.jsonl:1: not a comparison of a sentinel"), "{error}");
        }
        assert!(read("").unwrap().is_empty());
    }
}
