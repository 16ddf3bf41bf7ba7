//! From which sizes on a linear is faster in FP8 than in BF16.

/// A rule on tokens `T` of a micro-batch, outputs `N` and inputs `K` of a linear, for forward and backward together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Pays {
    /// `T · N · K` must reach this: below, launches cost more than the products save.
    pub product: u128,
    /// `T · N² · K` must reach this: the fewer outputs share a cast of the input, the larger the product has to be.
    pub product_by_outputs: u128,
}

/// On one H200, recipe `fp8-delayed`: the smallest rule that has every cell of the sweeps in docs/benchmarks.md right.
pub const FP8_PAYS: Fp8Pays = Fp8Pays { product: 1 << 33, product_by_outputs: 1 << 44 };

impl Fp8Pays {
    /// Whether FP8 is faster.
    pub fn holds(&self, tokens: usize, outputs: usize, inputs: usize) -> bool {
        let [t, n, k] = [tokens, outputs, inputs].map(|size| size as u128);
        t * n * k >= self.product && t * n * n * k >= self.product_by_outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];

    /// Time in FP8 over time in BF16, outputs down, inputs across, as docs/benchmarks.md has it.
    const MEASURED: [(usize, [[f64; 6]; 6]); 2] = [
        (
            1024,
            [
                [1.43, 1.39, 1.33, 1.14, 1.11, 1.09],
                [1.01, 1.34, 1.12, 1.07, 1.03, 0.86],
                [1.24, 1.13, 1.06, 0.92, 0.84, 0.81],
                [1.14, 1.11, 0.94, 0.78, 0.70, 0.68],
                [1.01, 0.98, 0.78, 0.74, 0.72, 0.66],
                [0.98, 0.89, 0.74, 0.69, 0.66, 0.60],
            ],
        ),
        (
            8192,
            [
                [1.10, 1.21, 1.11, 1.05, 0.89, 0.91],
                [1.13, 1.06, 0.91, 0.80, 0.76, 0.76],
                [0.98, 0.87, 0.75, 0.69, 0.67, 0.63],
                [0.86, 0.75, 0.66, 0.62, 0.60, 0.59],
                [0.84, 0.72, 0.63, 0.58, 0.58, 0.56],
                [0.85, 0.69, 0.60, 0.59, 0.58, 0.56],
            ],
        ),
    ];

    #[test]
    fn the_rule_has_every_measurement_right() {
        for (tokens, table) in MEASURED {
            for (outputs, row) in SIZES.iter().zip(table) {
                for (inputs, ratio) in SIZES.iter().zip(row) {
                    let what = format!("{tokens} tokens, {outputs} x {inputs}: {ratio}");
                    assert_eq!(FP8_PAYS.holds(tokens, *outputs, *inputs), ratio < 1.0, "{what}");
                }
            }
        }
        // The corners of the tables that are not printed.
        for (tokens, size, pays) in [(4096, 512, false), (4096, 16384, true), (32768, 512, false), (32768, 16384, true)]
        {
            assert_eq!(FP8_PAYS.holds(tokens, size, size), pays, "{tokens} tokens, {size} x {size}");
        }
    }

    #[test]
    fn the_tables_are_those_of_the_docs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
        let text = std::fs::read_to_string(path).unwrap();
        for (tokens, table) in MEASURED {
            let head = format!("| {tokens} tokens, outputs down, inputs across |");
            let alone = format!("| {tokens} tokens |");
            let lines = text.lines().skip_while(|line| !line.starts_with(&head) && !line.starts_with(&alone)).skip(2);
            for ((line, outputs), row) in lines.zip(SIZES).zip(table) {
                let cells = row.map(|ratio| format!("{ratio:.2}")).join(" | ");
                assert_eq!(line, format!("| {outputs} | {cells} |"));
            }
            assert!(text.contains(&head) || text.contains(&alone), "{tokens} tokens are in the docs");
        }
    }

    #[test]
    fn more_of_anything_never_stops_paying() {
        for t in SIZES {
            for (n, k) in SIZES.into_iter().flat_map(|n| SIZES.map(|k| (n, k))) {
                if FP8_PAYS.holds(t, n, k) {
                    assert!(FP8_PAYS.holds(2 * t, n, k) && FP8_PAYS.holds(t, 2 * n, k) && FP8_PAYS.holds(t, n, 2 * k));
                }
            }
        }
    }
}
