//! Heat maps over the steps of a run, each page in one file without scripts. `casts.html` shows how many elements casts have lost. `sentinel.html`
//! shows the results of comparisons with BF16.

use super::cast_table::{CastTable, Cell, growth};
use super::plot::{escape, push, series_svg};
use super::sentinel_table::{SentinelTable, Whole};
use ottava_recipe::scaling::Quantity;

/// The maximum number of columns. If there are more lines, several lines share a column.
const MAX_COLUMNS: usize = 100;
/// The width of the names next to a map. `WIDTH` is the width of a map, and `ROW` the height of a row.
const NAMES: f64 = 260.0;
const WIDTH: f64 = 800.0;
const ROW: f64 = 11.0;
/// The space above a map for the step numbers.
const TOP: f64 = 20.0;

/// The colour of cells from `from` up to the next level.
struct Level {
    from: f64,
    colour: &'static str,
    label: &'static str,
}

const fn level(from: f64, colour: &'static str, label: &'static str) -> Level {
    Level { from, colour, label }
}

/// The colour of cells without losses, hardly visible on white pages and on dark pages.
const CALM: &str = "#7d848e30";

const SHARES: [Level; 8] = [
    level(f64::NEG_INFINITY, CALM, "none"),
    level(f64::MIN_POSITIVE, "#fef3c7", "some"),
    level(1e-6, "#fde68a", "1e-6"),
    level(1e-5, "#fbbf24", "1e-5"),
    level(1e-4, "#f59e0b", "1e-4"),
    level(1e-3, "#ea580c", "1e-3"),
    level(1e-2, "#b91c1c", "1e-2"),
    level(1e-1, "#581c1c", "0.1 and more"),
];

const HEADROOM: [Level; 7] = [
    level(f64::NEG_INFINITY, "#b91c1c", "saturates by 1 bit and more"),
    level(-1.0, "#f59e0b", "saturates"),
    level(0.0, "#22c55e", "0 bits"),
    level(1.0, "#86efac", "1"),
    level(2.0, "#d9f99d", "2"),
    level(4.0, "#93c5fd", "4"),
    level(8.0, "#2563eb", "8 and more: range is wasted"),
];

const GROWTH: [Level; 8] = [
    level(f64::NEG_INFINITY, "#2563eb", "shrank by 2 bits and more"),
    level(-2.0, "#93c5fd", "-2"),
    level(-0.5, CALM, "about the same"),
    level(0.5, "#fde68a", "0.5"),
    level(1.0, "#fbbf24", "1"),
    level(2.0, "#ea580c", "2"),
    level(4.0, "#b91c1c", "4"),
    level(8.0, "#581c1c", "grew by 8 bits and more"),
];

const COSTS: [Level; 8] = [
    level(f64::NEG_INFINITY, CALM, "less"),
    level(1e-6, "#fef3c7", "1e-6"),
    level(1e-5, "#fde68a", "1e-5"),
    level(3e-5, "#fbbf24", "3e-5"),
    level(1e-4, "#f59e0b", "1e-4"),
    level(3e-4, "#ea580c", "3e-4"),
    level(1e-3, "#b91c1c", "1e-3"),
    level(1e-2, "#581c1c", "0.01 and more"),
];

const ERRORS: [Level; 8] = [
    level(f64::NEG_INFINITY, CALM, "less"),
    level(0.01, "#fef3c7", "0.01"),
    level(0.02, "#fde68a", "0.02"),
    level(0.05, "#fbbf24", "0.05"),
    level(0.1, "#f59e0b", "0.1"),
    level(0.2, "#ea580c", "0.2"),
    level(0.5, "#b91c1c", "0.5"),
    level(1.0, "#581c1c", "1 and more"),
];

/// A heat map: its title, its meaning and its colours.
struct Map {
    title: &'static str,
    meaning: &'static str,
    levels: &'static [Level],
    /// Chooses the worse of two values that share a column.
    worse: fn(f64, f64) -> f64,
}

/// A map of casts. `value` returns the value of a cell, from this cell and from the first cell of the cast.
struct CastMap {
    map: Map,
    value: fn(&Cell, &Cell) -> Option<f64>,
}

const CASTS: [CastMap; 4] = [
    CastMap {
        map: Map {
            title: "Saturated",
            meaning: "share of elements beyond the largest finite value after scaling",
            levels: &SHARES,
            worse: f64::max,
        },
        value: |cell, _| Some(cell.saturated_share()),
    },
    CastMap {
        map: Map {
            title: "Underflowed",
            meaning: "share of elements that are not zero but became zero",
            levels: &SHARES,
            worse: f64::max,
        },
        value: |cell, _| Some(cell.underflowed_share()),
    },
    CastMap {
        map: Map {
            title: "Headroom",
            meaning: "powers of two between the amax and saturation, with the current scale",
            levels: &HEADROOM,
            worse: f64::min,
        },
        value: |cell, _| cell.headroom(),
    },
    CastMap {
        map: Map {
            title: "Growth",
            meaning: "powers of two by which the amax grew since the first line",
            levels: &GROWTH,
            worse: f64::max,
        },
        value: |cell, first| growth(first, cell),
    },
];

/// The maps of comparisons between the recipe and BF16.
const COMPARISONS: [(Quantity, Map); 5] = [
    (
        Quantity::LossCost,
        Map {
            title: "Loss cost",
            meaning: "nats per token that the casts of a linear's forward cost, as estimated",
            levels: &COSTS,
            worse: f64::max,
        },
    ),
    (
        Quantity::Output,
        Map {
            title: "Output",
            meaning: "relative error of the output of a block after forward by the recipe",
            levels: &ERRORS,
            worse: f64::max,
        },
    ),
    (
        Quantity::GradInput,
        Map {
            title: "Gradient by the input",
            meaning: "relative error of the gradient by the input of a block after backward by the recipe",
            levels: &ERRORS,
            worse: f64::max,
        },
    ),
    (
        Quantity::Gradient,
        Map {
            title: "Gradient",
            meaning: "relative error of the gradient of a weight",
            levels: &ERRORS,
            worse: f64::max,
        },
    ),
    (Quantity::Cast, Map { title: "Casts", meaning: "relative error of a cast", levels: &ERRORS, worse: f64::max }),
];

/// Draws a page with maps of saturation, underflow, headroom and growth of the amax. A map has a row per cast, and steps run from left to right.
pub fn cast_maps(title: &str, table: &CastTable) -> String {
    let maps = CASTS.iter().map(|CastMap { map, value }| {
        let rows = table.names.iter().zip(&table.cells).map(|(name, cells)| {
            let first = cells.iter().flatten().next();
            (name.as_str(), cells.iter().map(|cell| value(cell.as_ref()?, first?)).collect())
        });
        map.section(&table.steps, rows.collect(), "every cast took its scale from its own tensor")
    });
    page(title, &maps.collect::<String>())
}

/// Draws a page with plots of the differences between recipe and BF16 over steps, and a map of each number that is compared by tensor. A map has a
/// row per tensor, and steps run from left to right.
pub fn sentinel_maps(title: &str, table: &SentinelTable) -> String {
    let series = |value: fn(&Whole) -> f64| -> Vec<(u64, f64)> {
        table.steps.iter().copied().zip(table.whole.iter().map(value)).collect()
    };
    let plots = [
        series_svg("Loss by the recipe minus loss in BF16", "nats", &series(|whole| whole.loss_gap)),
        series_svg("Cosine of the gradients", "cosine", &series(|whole| whole.gradient_cosine)),
    ];
    let maps = COMPARISONS.iter().map(|(quantity, map)| {
        let rows = table.rows(*quantity).map(|(name, values)| (name, values.to_vec()));
        map.section(&table.steps, rows.collect(), "no comparison has this number")
    });
    page(title, &(plots.concat() + &maps.collect::<String>()))
}

fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<style>\n\
         :root {{ color-scheme: light dark; }}\nbody {{ font: 14px system-ui, sans-serif; margin: 24px; }}\n\
         .map text {{ font: 9px system-ui, sans-serif; fill: currentColor; }}\n\
         .key {{ display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 12px; }}\n</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
}

/// The names of the rows of a map, each with a value per line.
type Rows<'a> = Vec<(&'a str, Vec<Option<f64>>)>;

impl Map {
    /// Draws the map with its title and its colour key. If no cell has a value, shows `nothing` instead.
    fn section(&self, steps: &[u64], rows: Rows, nothing: &str) -> String {
        let mut section = String::new();
        push(&mut section, format_args!("<h2>{}</h2>\n<p>{}.", self.title, self.meaning));
        let picture = self.draw(steps, &rows);
        if picture.is_empty() {
            push(&mut section, format_args!("Nothing to show: {nothing}.</p>"));
            return section;
        }
        for Level { colour, label, .. } in self.levels {
            push(&mut section, format_args!("<span class=\"key\" style=\"background:{colour}\"></span>{label}"));
        }
        section + &format!("</p>\n{picture}")
    }

    /// Draws the picture. Returns an empty string if no cell has a value.
    fn draw(&self, steps: &[u64], table: &Rows) -> String {
        let per_column = steps.len().div_ceil(MAX_COLUMNS).max(1);
        let columns: Vec<&[u64]> = steps.chunks(per_column).collect();
        let width = WIDTH / columns.len().max(1) as f64;
        let mut rows = String::new();
        let mut any = false;
        for (row, (name, cells)) in table.iter().enumerate() {
            let y = TOP + row as f64 * ROW;
            let short = escape(name.strip_prefix("model.layers.").unwrap_or(name));
            push(
                &mut rows,
                format_args!("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{short}</text>", NAMES - 6.0, y + 8.5),
            );
            let shown = cells.chunks(per_column).map(|cells| cells.iter().flatten().copied().reduce(self.worse));
            let shown: Vec<Option<f64>> = shown.collect();
            any |= shown.iter().any(Option::is_some);
            // Neighbouring cells of one colour are drawn as one rectangle, which keeps pages of large models small.
            let mut start = 0;
            while start < shown.len() {
                let level = shown[start].map(|value| self.level(value));
                let same = shown[start..].iter().take_while(|value| value.map(|value| self.level(value)) == level);
                let run = same.count();
                if let Some(level) = level {
                    let value =
                        shown[start..start + run].iter().flatten().copied().reduce(self.worse).unwrap_or_default();
                    let (from, to) = (columns[start][0], columns[start + run - 1].last().copied().unwrap_or_default());
                    let (x, w, colour) = (NAMES + start as f64 * width, run as f64 * width, self.levels[level].colour);
                    push(
                        &mut rows,
                        format_args!(
                            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{w:.1}\" height=\"{}\" fill=\"{colour}\"><title>{short}, steps {from} to {to}: {}</title></rect>",
                            ROW - 1.0,
                            words(value)
                        ),
                    );
                }
                start += run;
            }
        }
        if !any {
            return String::new();
        }
        let (full, height) = (NAMES + WIDTH + 20.0, TOP + table.len() as f64 * ROW + 4.0);
        let mut svg =
            format!("<svg class=\"map\" viewBox=\"0 0 {full} {height}\" width=\"{full}\" height=\"{height}\">\n");
        // About ten step numbers are drawn along the top.
        for (i, column) in columns.iter().enumerate().step_by(columns.len().div_ceil(10).max(1)) {
            let x = NAMES + i as f64 * width;
            push(&mut svg, format_args!("<text x=\"{x:.1}\" y=\"12\">{}</text>", column[0]));
        }
        svg + &rows + "</svg>\n"
    }

    fn level(&self, value: f64) -> usize {
        self.levels.iter().rposition(|level| value >= level.from).unwrap_or(0)
    }
}

fn words(value: f64) -> String {
    match value {
        f64::INFINITY => "without bound".to_string(),
        f64::NEG_INFINITY => "an infinity".to_string(),
        0.0 => "0".to_string(),
        value if value.abs() < 0.01 => format!("{value:.1e}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(amax: f64, scale: Option<f64>, saturated: u64) -> Option<Cell> {
        Some(Cell { amax, scale, largest: 448.0, elements: 1000, saturated, underflowed: 0, non_finite: 0 })
    }

    fn table(cells: Vec<Vec<Option<Cell>>>) -> CastTable {
        CastTable {
            names: (0..cells.len()).map(|i| format!("model.layers.{i}.<proj>.input")).collect(),
            steps: (1..=cells[0].len() as u64).map(|i| 10 * i).collect(),
            cells,
        }
    }

    #[test]
    fn neighbours_of_one_colour_are_one_rectangle() {
        let page = cast_maps(
            "a <b>",
            &table(vec![vec![cell(1.0, Some(448.0), 0), cell(1.0, Some(448.0), 0), cell(4.0, Some(448.0), 20)]]),
        );
        assert_eq!(page.matches("<svg").count(), 4);
        let [saturated, underflowed, headroom, growth] = [0, 1, 2, 3].map(|i| page.split("<h2>").nth(i + 1).unwrap());
        for (map, rectangles) in [(saturated, 2), (underflowed, 1), (headroom, 2), (growth, 2)] {
            assert_eq!(map.matches("<rect").count(), rectangles, "{map}");
        }
        assert!(saturated.contains("0.&lt;proj>.input, steps 30 to 30: 0.02"), "{saturated}");
        assert!(headroom.contains("steps 10 to 20: 0<") && headroom.contains("steps 30 to 30: -2.00<"), "{headroom}");
        assert!(growth.contains("#ea580c") && growth.contains("2.00"), "{growth}");
        assert!(page.contains("<h1>a &lt;b></h1>"));
    }

    #[test]
    fn many_lines_share_columns_and_no_spike_is_lost() {
        let mut cells = vec![cell(1.0, None, 0); 950];
        cells[501] = cell(1.0, None, 500);
        let page = cast_maps("", &table(vec![cells]));
        let saturated = page.split("<h2>").nth(1).unwrap();
        assert_eq!(saturated.matches("<rect").count(), 3, "{saturated}");
        assert!(saturated.contains("steps 5010 to 5100: 0.50"), "{saturated}");
        assert!(page.contains("every cast took its scale from its own tensor"));
    }

    #[test]
    fn infinities_gaps_and_zeros_give_finite_pictures() {
        let rows = vec![
            vec![None, cell(f64::INFINITY, Some(1.0), 0), cell(f64::INFINITY, Some(1.0), 0)],
            vec![cell(0.0, Some(1.0), 0), None, cell(1.0, Some(0.5), 0)],
        ];
        let page = cast_maps("", &table(rows));
        for word in ["NaN", "inf\"", ">inf"] {
            assert!(!page.contains(word), "{word} in {page}");
        }
        assert!(page.contains("an infinity"));
        assert!(cast_maps("", &CastTable::default()).ends_with("</html>\n"));
    }
}
