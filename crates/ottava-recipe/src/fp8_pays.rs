//! The sizes above which a linear is faster in FP8 than in BF16.

use crate::{LinearCasts, Scaling};

/// A rule that decides whether forward and backward together are faster in FP8. Its inputs are the tokens `T` of a micro-batch, and the outputs `N`
/// and inputs `K` of a linear. The bounds are powers of two. For delayed scaling, they agree with all cells of the sweeps in `fp8_pays.csv` (one
/// H200). For the other recipes, they agree with all cells except some whose time is within 8 % of BF16's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Pays {
    /// The minimum of `T · N · K`. Below it, launches cost more than the products save.
    product: u128,
    /// The minimum of `T · N² · K`. The fewer outputs share a cast of the input, the larger the product must be.
    product_by_outputs: u128,
}

impl Fp8Pays {
    /// Returns the rule for these casts. The more passes the casts make, the larger a linear must be.
    pub fn for_casts(casts: &LinearCasts) -> Fp8Pays {
        let powers =
            |product: u32, by_outputs: u32| Fp8Pays { product: 1 << product, product_by_outputs: 1 << by_outputs };
        match casts.input.scaling {
            _ if casts.input.granularity.is_blocks() => powers(34, 45),
            Scaling::Delayed { .. } => powers(33, 44),
            Scaling::Current(_) => powers(35, 46),
        }
    }

    /// Returns whether FP8 is faster.
    pub fn holds(&self, tokens: usize, outputs: usize, inputs: usize) -> bool {
        let [t, n, k] = [tokens, outputs, inputs].map(|size| size as u128);
        t * n * k >= self.product && t * n * n * k >= self.product_by_outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Precision, RecipeName};

    const SIZES: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
    const RECIPES: [RecipeName; 4] =
        [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block];

    fn rule(recipe: RecipeName) -> Fp8Pays {
        let casts = Precision { recipe, ..Precision::default() }.recipe().casts;
        Fp8Pays::for_casts(&casts.expect("an FP8 recipe"))
    }

    /// Returns the measured ratios of FP8 time to BF16 time, with recipe, tokens, outputs and inputs.
    fn measured() -> Vec<(RecipeName, [usize; 3], f64)> {
        let mut cells = Vec::new();
        for line in include_str!("fp8_pays.csv").lines().skip(1) {
            let fields: Vec<_> = line.split(',').collect();
            let recipe = RECIPES.into_iter().find(|recipe| recipe.as_str() == fields[0]).expect("a recipe");
            let [tokens, outputs] = [1, 2].map(|i| fields[i].parse().expect("a size"));
            for (inputs, ratio) in SIZES.into_iter().zip(&fields[3..]) {
                cells.push((recipe, [tokens, outputs, inputs], ratio.parse().expect("a ratio")));
            }
        }
        cells
    }

    #[test]
    fn the_rules_have_the_measurements_right() {
        let cells = measured();
        assert_eq!(cells.len(), 4 * 2 * 36);
        for (recipe, [tokens, outputs, inputs], ratio) in cells {
            let close = if recipe == RecipeName::Fp8Delayed { 0.0 } else { 0.08 };
            let what = format!("{}, {tokens} tokens, {outputs} x {inputs}: {ratio}", recipe.as_str());
            let right = rule(recipe).holds(tokens, outputs, inputs) == (ratio < 1.0);
            assert!(right || (ratio - 1.0).abs() <= close + 1e-9, "{what}");
        }
        // The corners of two sweeps that are not in the file.
        for (tokens, size, pays) in [(4096, 512, false), (4096, 16384, true), (32768, 512, false), (32768, 16384, true)]
        {
            assert_eq!(
                rule(RecipeName::Fp8Delayed).holds(tokens, size, size),
                pays,
                "{tokens} tokens, {size} x {size}"
            );
        }
    }

    #[test]
    fn more_of_anything_never_stops_paying() {
        for (rule, t) in RECIPES.into_iter().flat_map(|recipe| SIZES.map(|t| (rule(recipe), t))) {
            for (n, k) in SIZES.into_iter().flat_map(|n| SIZES.map(|k| (n, k))) {
                if rule.holds(t, n, k) {
                    assert!(rule.holds(2 * t, n, k) && rule.holds(t, 2 * n, k) && rule.holds(t, n, 2 * k));
                }
            }
        }
    }
}
