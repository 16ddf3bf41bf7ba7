//! The shares of elements that casts have lost, by layer and step, in a bounded number of columns.

use serde::Serialize;
use std::collections::HashMap;

/// The maximum number of columns of a map.
const MOST_COLUMNS: usize = 128;

/// The maximum number of layers. The casts of further layers are added to the last row.
const MOST_LAYERS: usize = 512;

/// The maximum number of casts of the newest line that are named.
const MOST_NAMED: usize = 8;

/// The largest shares of elements that a cast of a layer has lost: saturated, then underflowed.
type Cell = [f32; 2];

/// The cells of one line of `casts.jsonl`, or of several neighbouring lines.
#[derive(Clone, Debug)]
struct Column {
    /// The step of the last line.
    step: u64,
    lines: u64,
    /// The cells of the layers. Layers after the last cell have lost nothing.
    cells: Vec<Cell>,
    revision: u64,
}

/// A map of layers by steps.
#[derive(Clone, Debug, Default)]
pub struct HeatMap {
    layers: Vec<String>,
    rows: HashMap<String, usize>,
    columns: Vec<Column>,
    /// The number of lines of a column, a power of two.
    width: u64,
    reset: u64,
    /// The casts that lost the most elements in the newest line.
    worst: Vec<(String, Cell)>,
}

/// The part of a map that a reader lacks. Its columns replace the columns of the reader from number `from` on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeatPart {
    from: usize,
    /// The names of all rows.
    layers: Vec<String>,
    /// The last step of each column.
    steps: Vec<u64>,
    /// For each column and layer, the largest share of elements that a cast saturated.
    saturated: Vec<Vec<f32>>,
    /// For each column and layer, the largest share of elements that underflowed in a cast.
    underflowed: Vec<Vec<f32>>,
    /// The casts that lost the most elements in the newest line: name, saturated share, underflowed share.
    worst: Vec<(String, f32, f32)>,
}

/// Returns the name of the row of a cast: the number of its block, or the first part of its name.
fn layer_of(cast: &str) -> String {
    match cast.split('.').find(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())) {
        Some(number) => format!("layer {number}"),
        None => cast.split('.').next().unwrap_or_default().to_string(),
    }
}

impl HeatMap {
    /// Returns a map without columns.
    pub fn new(revision: u64) -> HeatMap {
        HeatMap { width: 1, reset: revision, ..HeatMap::default() }
    }

    /// Appends the line of `step`. Each cast has its shares of elements that saturated and that underflowed.
    pub fn push(&mut self, step: u64, casts: impl Iterator<Item = (String, [f64; 2])>, revision: u64) {
        let mut cells: Vec<Cell> = Vec::new();
        self.worst.clear();
        for (name, shares) in casts {
            let shares = shares.map(|share| share as f32);
            let row = self.row(layer_of(&name));
            cells.resize(cells.len().max(row + 1), [0.0; 2]);
            cells[row] = larger(cells[row], shares);
            if shares != [0.0; 2] {
                self.worst.push((name, shares));
            }
        }
        self.worst.sort_by(|(_, a), (_, b)| (b[0] + b[1]).total_cmp(&(a[0] + a[1])));
        self.worst.truncate(MOST_NAMED);
        let next = Column { step, lines: 1, cells, revision };
        match self.columns.last_mut() {
            Some(last) if last.lines < self.width => join(last, next),
            _ => self.columns.push(next),
        }
        if self.columns.len() > MOST_COLUMNS {
            let columns = std::mem::take(&mut self.columns);
            self.width *= 2;
            for next in columns {
                match self.columns.last_mut() {
                    Some(last) if last.lines + next.lines <= self.width => join(last, next),
                    _ => self.columns.push(next),
                }
            }
            self.reset = revision;
        }
    }

    /// Removes the columns of `step` and later steps, since a resumed run trains these steps again.
    pub fn cut(&mut self, step: u64, revision: u64) {
        self.columns.retain(|column| column.step < step);
        self.reset = revision;
    }

    fn row(&mut self, layer: String) -> usize {
        if let Some(row) = self.rows.get(&layer) {
            return *row;
        }
        if self.layers.len() == MOST_LAYERS {
            return MOST_LAYERS - 1;
        }
        self.layers.push(layer.clone());
        self.rows.insert(layer, self.layers.len() - 1);
        self.layers.len() - 1
    }

    /// Returns the columns that a reader lacks that has read everything up to revision `since`. Returns `None` if it lacks nothing.
    pub fn since(&self, since: u64) -> Option<HeatPart> {
        let from = match since < self.reset {
            true => 0,
            false => self.columns.partition_point(|column| column.revision <= since),
        };
        let new = &self.columns[from..];
        if new.is_empty() && since >= self.reset {
            return None;
        }
        let shares = |which: usize| {
            let of = |column: &Column| {
                (0..self.layers.len()).map(|row| column.cells.get(row).map_or(0.0, |cell| cell[which])).collect()
            };
            new.iter().map(of).collect()
        };
        Some(HeatPart {
            from,
            layers: self.layers.clone(),
            steps: new.iter().map(|column| column.step).collect(),
            saturated: shares(0),
            underflowed: shares(1),
            worst: self.worst.iter().map(|(name, [a, b])| (name.clone(), *a, *b)).collect(),
        })
    }
}

fn larger(a: Cell, b: Cell) -> Cell {
    [a[0].max(b[0]), a[1].max(b[1])]
}

fn join(column: &mut Column, next: Column) {
    column.cells.resize(column.cells.len().max(next.cells.len()), [0.0; 2]);
    for (cell, other) in column.cells.iter_mut().zip(next.cells) {
        *cell = larger(*cell, other);
    }
    (column.step, column.revision) = (next.step, next.revision);
    column.lines += next.lines;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_worst_cast_of_its_layer_and_columns_are_bounded() {
        let mut map = HeatMap::new(1);
        let line = |step: u64| {
            [
                ("model.layers.0.q.input".to_string(), [0.25, 0.0]),
                ("model.layers.0.q.weight".to_string(), [0.125, 0.5]),
                ("model.layers.11.down.input".to_string(), [if step == 777 { 1.0 } else { 0.0 }, 0.0]),
                ("lm_head.input".to_string(), [0.0, 0.0]),
            ]
        };
        map.push(1, line(1).into_iter(), 1);
        let first = map.since(0).unwrap();
        assert_eq!(first.layers, ["layer 0", "layer 11", "lm_head"]);
        assert_eq!((&first.saturated[0], &first.underflowed[0]), (&vec![0.25, 0.0, 0.0], &vec![0.5, 0.0, 0.0]));
        assert_eq!(first.worst[0], ("model.layers.0.q.weight".to_string(), 0.125, 0.5));
        let mut steps = first.steps;
        for step in 2..=1000 {
            map.push(step, line(step).into_iter(), step);
            let part = map.since(step - 1).unwrap();
            steps.truncate(part.from);
            steps.extend(part.steps);
        }
        let whole = map.since(0).unwrap();
        assert_eq!(whole.steps, steps, "parts add up to the whole");
        assert!(steps.len() <= MOST_COLUMNS && steps.last() == Some(&1000));
        let hot: Vec<_> = (0..steps.len()).filter(|&column| whole.saturated[column][1] == 1.0).collect();
        assert!(hot.len() == 1 && steps[hot[0]] >= 777 && (hot[0] == 0 || steps[hot[0] - 1] < 777));
        assert_eq!(map.since(1000), None);
    }
}
