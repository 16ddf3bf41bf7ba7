//! The division of a model into stages of equal cost.
//!
//! `divide` divides the blocks by `Description::layer_costs`.

use ottava_common::error::{Error, Result};
use ottava_models::Span;
use ottava_recipe::param::LayerCosts;
use std::ops::Range;

/// Errors with [`Error::Config`] if there are more stages than blocks.
pub fn expect_blocks(blocks: usize, stages: usize) -> Result<()> {
    match stages > blocks {
        true => Err(Error::Config(format!(
            "`parallel.pipeline` times `parallel.pipeline_stages` is {stages}, and the model has {blocks} blocks; each stage takes at least one"
        ))),
        false => Ok(()),
    }
}

/// Divides the layers of a model of these `costs` among `stages`, so that the most expensive stage costs as little as possible. Among
/// such divisions, the costs differ least. Each stage has at least one block, except the last stage, which has the head and may have no block.
///
/// Errors like [`expect_blocks`].
pub fn divide(costs: &LayerCosts, stages: usize) -> Result<Vec<Span>> {
    let layers = costs.blocks.len();
    expect_blocks(layers, stages)?;
    let most = |cost: f64, stage: f64| cost.max(stage);
    let unbounded = best(costs, stages, f64::INFINITY, most).expect("each stage can have a block").0;
    // The bound allows for the rounding of sums.
    let bound = unbounded * (1.0 + 1e-9);
    let (_, starts) = best(costs, stages, bound, |cost, stage| cost + stage * stage).expect("a division has this cost");
    let end = |stage: usize| starts.get(stage + 1).copied().unwrap_or(layers);
    let span =
        |stage: usize| Span { blocks: starts[stage]..end(stage), embedding: stage == 0, head: stage + 1 == stages };
    Ok((0..stages).map(span).collect())
}

/// Returns the smallest cost of a division in which no stage costs more than `bound`, and the first block of each stage. `add` adds the cost of a
/// stage to the cost of the preceding stages.
fn best(costs: &LayerCosts, stages: usize, bound: f64, add: impl Fn(f64, f64) -> f64) -> Option<(f64, Vec<usize>)> {
    let layers = costs.blocks.len();
    let cost = |blocks: Range<usize>, is_last: bool| {
        costs.blocks[blocks].iter().sum::<f64>() + if is_last { costs.head } else { 0.0 }
    };
    // The best division of the first blocks into the stages so far, by number of blocks.
    let mut found: Vec<Option<(f64, Vec<usize>)>> = vec![None; layers + 1];
    found[0] = Some((0.0, Vec::new()));
    for stage in 0..stages {
        let is_last = stage + 1 == stages;
        let divided = |end: usize| {
            let starts = 0..if is_last { end + 1 } else { end };
            let with = |start: usize| {
                let (before, starts) = found[start].as_ref()?;
                let own = cost(start..end, is_last);
                (own <= bound).then(|| (add(*before, own), [starts.as_slice(), &[start]].concat()))
            };
            starts.filter_map(with).min_by(|(a, _), (b, _)| a.total_cmp(b))
        };
        found = (0..=layers).map(divided).collect();
    }
    found.swap_remove(layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(costs: &LayerCosts, stages: usize) -> Vec<usize> {
        divide(costs, stages).unwrap().into_iter().map(|span| span.blocks.len()).collect()
    }

    #[test]
    fn the_head_moves_blocks_to_other_stages() {
        let equal = |layers: usize, head| LayerCosts { blocks: vec![1.0; layers], head };
        assert_eq!(blocks(&equal(32, 0.0), 4), [8, 8, 8, 8]);
        assert_eq!(blocks(&equal(32, 0.6), 2), [16, 16]);
        // Llama-3-8B: the head costs as much as 2.4 blocks.
        assert_eq!(blocks(&equal(32, 2.4), 2), [17, 15]);
        assert_eq!(blocks(&equal(32, 2.4), 4), [8, 9, 9, 6]);
        assert_eq!(blocks(&equal(4, 3.0), 4), [1, 1, 2, 0]);
        assert_eq!(blocks(&equal(5, 0.0), 1), [5]);
        let error = divide(&equal(3, 1.0), 4).unwrap_err().to_string();
        assert!(error.contains("is 4, and the model has 3 blocks"), "{error}");
    }

    proptest! {
        /// All blocks are in order, and no other division is better.
        #[test]
        fn no_other_division_costs_less(costs in proptest::collection::vec(0.1..9.0f64, 3..9), head in 0.0..12.0f64) {
            let costs = LayerCosts { blocks: costs, head };
            let spans = divide(&costs, 3).unwrap();
            let layers = costs.blocks.len();
            let ends: Vec<_> = spans.iter().map(|span| span.blocks.end).collect();
            prop_assert!(spans[0].blocks.start == 0 && ends[2] == layers);
            prop_assert!(spans.windows(2).all(|pair| pair[0].blocks.end == pair[1].blocks.start));
            let most = |a: usize, b: usize| {
                let sum = |range: Range<usize>| costs.blocks[range].iter().sum::<f64>();
                sum(0..a).max(sum(a..b)).max(sum(b..layers) + head)
            };
            let all = (1..layers).flat_map(|a| (a + 1..=layers).map(move |b| (a, b)));
            let least = all.map(|(a, b)| most(a, b)).fold(f64::INFINITY, f64::min);
            prop_assert!(most(ends[0], ends[1]) <= least * (1.0 + 1e-6));
        }
    }
}
