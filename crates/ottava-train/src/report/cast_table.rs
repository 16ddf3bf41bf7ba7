//! Reads a run's `casts.jsonl` as a table of casts by lines, and finds outliers.

use super::metrics::MAX_METRICS_BYTES;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// The statistics of one cast over the steps of one line.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Cell {
    /// The largest absolute value in the last step of the line. It is infinite if the file has null, since JSON cannot represent infinities.
    #[serde(deserialize_with = "or_infinite")]
    pub amax: f64,
    /// The scale of this step; `None` if the scale was computed from the tensor.
    pub scale: Option<f64>,
    /// The largest finite value of the format.
    pub largest: f64,
    /// The number of elements cast in all steps of the line.
    pub elements: u64,
    /// The number of elements beyond the largest finite value after scaling.
    pub saturated: u64,
    /// The number of nonzero elements that became zero.
    pub underflowed: u64,
    /// The number of steps in which an element was infinite.
    pub non_finite: u64,
}

fn or_infinite<'de, D: serde::Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or(f64::INFINITY))
}

impl Cell {
    /// Returns the share of elements that saturated.
    pub fn saturated_share(&self) -> f64 {
        self.saturated as f64 / self.elements.max(1) as f64
    }

    /// Returns the share of elements that underflowed.
    pub fn underflowed_share(&self) -> f64 {
        self.underflowed as f64 / self.elements.max(1) as f64
    }

    /// Returns the powers of two between the amax and saturation. They are negative if elements saturated. Returns `None` if the scale was computed
    /// from the tensor.
    pub fn headroom(&self) -> Option<f64> {
        self.scale.map(|scale| (self.largest / (self.amax * scale)).log2())
    }
}

/// A table of casts by lines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CastTable {
    /// The casts, in the order of the lines.
    pub names: Vec<String>,
    /// The step of each line.
    pub steps: Vec<u64>,
    /// The cells of each cast, one per line; `None` if the line does not have the cast.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// A cast with an unusual value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outlier {
    /// The name of the cast.
    pub name: String,
    /// The value that ranks the cast: a share of all its elements, or powers of two.
    pub value: f64,
    /// The largest value of the cast on one line.
    pub highest: f64,
    /// The step of that line.
    pub step: u64,
}

#[derive(Deserialize)]
struct Line {
    step: u64,
    casts: Map<String, Value>,
}

impl CastTable {
    /// Reads a `casts.jsonl`. An incomplete last line is ignored.
    pub fn read(path: &Path) -> Result<CastTable> {
        let text = input::read_text(path, MAX_METRICS_BYTES).map_err(Error::io(path))?;
        let mut table = CastTable::default();
        let mut rows: HashMap<String, usize> = HashMap::new();
        for (number, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
            let unreadable = |error: serde_json::Error| {
                let place = format!("{}:{}", path.display(), number + 1);
                Error::Data(format!("{place}: not a line of cast statistics ({error}); is the file another program's?"))
            };
            let line: Line = serde_json::from_str(line).map_err(unreadable)?;
            table.steps.push(line.step);
            for (name, cell) in line.casts {
                let row = *rows.entry(name).or_insert_with_key(|name| {
                    table.names.push(name.clone());
                    table.cells.push(Vec::new());
                    table.names.len() - 1
                });
                table.cells[row].resize(number, None);
                table.cells[row].push(Some(serde_json::from_value(cell).map_err(unreadable)?));
            }
        }
        table.cells.iter_mut().for_each(|row| row.resize(table.steps.len(), None));
        Ok(table)
    }

    /// Returns whether no line has a cast.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the cells of each cast, with their steps.
    pub fn rows(&self) -> impl Iterator<Item = (&str, Vec<(u64, &Cell)>)> {
        self.names.iter().zip(&self.cells).map(|(name, cells)| {
            let cells = self.steps.iter().zip(cells).filter_map(|(&step, cell)| Some((step, cell.as_ref()?)));
            (name.as_str(), cells.collect())
        })
    }

    /// Returns up to `n` casts with the largest shares of elements that `count` counts. Casts without such elements are left out.
    pub fn most_lost(&self, n: usize, count: impl Fn(&Cell) -> u64) -> Vec<Outlier> {
        let share = |lost: u64, elements: u64| lost as f64 / elements.max(1) as f64;
        let outliers = self.rows().map(|(name, cells)| {
            let sum = |of: &dyn Fn(&Cell) -> u64| cells.iter().map(|(_, cell)| of(cell)).sum();
            let value = share(sum(&count), sum(&|cell| cell.elements));
            outlier(name, value, cells.iter().map(|(step, cell)| (*step, share(count(cell), cell.elements))))
        });
        ranked(outliers.collect(), n)
    }

    /// Returns up to `n` casts whose amax grew the most from their first line to their last, in powers of two.
    pub fn most_grown(&self, n: usize) -> Vec<Outlier> {
        let outliers = self.rows().filter_map(|(name, cells)| {
            let grown = |cell: &Cell| growth(cells.first()?.1, cell);
            let steps = cells.iter().filter_map(|(step, cell)| Some((*step, grown(cell)?)));
            Some(outlier(name, grown(cells.last()?.1)?, steps))
        });
        ranked(outliers.collect(), n)
    }

    /// Returns the casts with infinities, each with the number of steps that had infinities.
    pub fn not_finite(&self) -> Vec<(String, u64)> {
        let counts = self
            .rows()
            .map(|(name, cells)| (name.to_string(), cells.iter().map(|(_, cell)| cell.non_finite).sum::<u64>()));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// Returns the powers of two by which the amax grew from `first` to `cell`. Returns `None` if one amax is zero, or if both are infinite.
pub fn growth(first: &Cell, cell: &Cell) -> Option<f64> {
    let grown = (cell.amax / first.amax).log2();
    (first.amax > 0.0 && cell.amax > 0.0 && !grown.is_nan()).then_some(grown)
}

fn outlier(name: &str, value: f64, lines: impl Iterator<Item = (u64, f64)>) -> Outlier {
    // If several lines have the largest value, the first of them counts.
    let (step, highest) = lines.fold((0, f64::NEG_INFINITY), |best, line| if line.1 > best.1 { line } else { best });
    Outlier { name: name.to_string(), value, highest, step }
}

fn ranked(mut outliers: Vec<Outlier>, n: usize) -> Vec<Outlier> {
    outliers.retain(|outlier| outlier.value > 0.0);
    outliers.sort_by(|a, b| b.value.total_cmp(&a.value));
    outliers.truncate(n);
    outliers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(amax: &str, scale: &str, saturated: u64, underflowed: u64) -> String {
        format!(
            r#"{{"amax":{amax},"scale":{scale},"largest":448.0,"elements":100,"saturated":{saturated},"underflowed":{underflowed},"non_finite":0}}"#
        )
    }

    fn read(text: &str) -> Result<CastTable> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("casts.jsonl"), text).unwrap();
        CastTable::read(&folder.path().join("casts.jsonl"))
    }

    #[test]
    fn a_table_has_a_row_per_cast_and_a_column_per_line() {
        let lines = [
            format!(
                r#"{{"step":10,"since":0,"casts":{{"a":{},"b":{}}}}}"#,
                cast("2.0", "null", 0, 8),
                cast("1.0", "448.0", 0, 3)
            ),
            format!(
                r#"{{"step":20,"since":10,"casts":{{"a":{},"c":{}}}}}"#,
                cast("16.0", "112.0", 4, 0),
                cast("null", "1.0", 1, 0)
            ),
            r#"{"step":30,"si"#.to_string(),
        ];
        let table = read(&lines.join("\n")).unwrap();
        assert_eq!((table.names.join(""), &table.steps[..]), ("abc".to_string(), &[10, 20][..]));
        assert_eq!(table.cells.iter().map(|row| row.iter().flatten().count()).collect::<Vec<_>>(), [2, 1, 1]);
        assert!(table.cells[1][1].is_none() && table.cells[2][0].is_none());
        let headroom = |row: usize, line: usize| table.cells[row][line].unwrap().headroom();
        assert_eq!([headroom(0, 0), headroom(0, 1), headroom(1, 0)], [None, Some(-2.0), Some(0.0)]);
        assert_eq!(headroom(2, 1), Some(f64::NEG_INFINITY));

        let found =
            |outliers: Vec<Outlier>| outliers.into_iter().map(|o| (o.name, o.value, o.step)).collect::<Vec<_>>();
        let of = |name: &str, value, step| (name.to_string(), value, step);
        assert_eq!(found(table.most_lost(9, |cell| cell.underflowed)), [of("a", 0.04, 10), of("b", 0.03, 10)]);
        assert_eq!(found(table.most_lost(1, |cell| cell.saturated)), [of("a", 0.02, 20)]);
        assert_eq!(found(table.most_grown(9)), [of("a", 3.0, 20)]);
        assert_eq!(table.most_lost(1, |cell| cell.underflowed)[0].highest, 0.08);
    }

    #[test]
    fn files_that_are_no_cast_logs_are_errors() {
        for text in ["{\"step\":1}\n", "hello\n", "{\"step\":1,\"casts\":{\"a\":3}}\n"] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("casts.jsonl:1: not a line of cast statistics"), "{error}");
        }
        assert!(read("").unwrap().is_empty());
    }
}
