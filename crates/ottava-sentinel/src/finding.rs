//! The findings of a comparison.

use ottava_recipe::scaling::{Comparison, PrecisionComparison, Quantity};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

/// The bounds beyond which a number is a finding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// The maximum difference of the losses, in nats per token.
    pub loss_gap: f64,
    /// The minimum cosine between the gradients of all weights of the blocks.
    pub cosine: f64,
}

impl Bounds {
    /// The maximum relative error of a cast. The largest rounding error of an element is 2⁻⁴ in E4M3 and 2⁻³ in E5M2, so a greater error of a tensor
    /// comes from saturation or underflow. If values grow and the history of a delayed scale lags behind them, the error is below this bound.
    const CAST_ERROR: f64 = 0.25;
    /// The maximum distance of the slope of a product from 1. Sums in FP8 products and roundings of the results cause 0.003.
    const SLOPE: f64 = 0.01;
    /// The maximum relative error of a product of given codes. Fast accumulation causes 0.01.
    const PRODUCT_ERROR: f64 = 0.05;

    /// Returns bounds at half the distance, for linears that are tried again after a finding.
    fn halved(self) -> Bounds {
        Bounds { loss_gap: self.loss_gap / 2.0, cosine: (1.0 + self.cosine) / 2.0 }
    }
}

/// The bounds of a metric of evaluations. They differ, so that a metric near one of them does not change the precision at each evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MetricBounds {
    /// How much worse the metric may be by the recipe than in BF16.
    pub gap: f64,
    /// How much worse the metric may be by the recipe for a return from BF16 to the recipe.
    pub to_return: f64,
}

/// The quantity that a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// The difference of the losses.
    LossGap,
    /// The cosine between all gradients.
    Cosine,
    /// The relative error of a cast.
    CastError,
    /// The slope of a product.
    Slope(Quantity),
    /// The relative error of a product.
    ProductError(Quantity),
    /// How much worse a metric of evaluations is by the recipe than in BF16.
    MetricGap,
}

/// A number beyond its bound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The cast or linear; `None` for a number of the whole model.
    pub tensor: Option<String>,
    /// The measured quantity.
    pub measure: Measure,
    /// The measured number.
    pub value: f64,
    /// The bound that the number exceeds.
    pub bound: f64,
}

impl Finding {
    /// Returns the linear of the finding.
    pub fn linear(&self) -> Option<&str> {
        let name = self.tensor.as_deref()?;
        Some(if self.measure == Measure::CastError { linear_of(name) } else { name })
    }
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { tensor, measure, value, bound } = self;
        let name = tensor.as_deref().unwrap_or_default();
        match measure {
            Measure::LossGap => write!(f, "the loss is {value:+.4} nats from that in BF16 (bound {bound})"),
            Measure::Cosine => {
                write!(f, "the gradients have a cosine of {value:.3} with those in BF16 (bound {bound})")
            }
            Measure::MetricGap => write!(f, "the metric is worse by {value:.4} than in BF16 (bound {bound})"),
            Measure::CastError => write!(f, "the cast `{name}` has a relative error of {value:.3} (bound {bound})"),
            Measure::Slope(product) => {
                let product = product.as_str();
                write!(f, "{product} of `{name}` is {value:.4} times the product of its codes (bound 1 ± {bound})")
            }
            Measure::ProductError(product) => {
                let product = product.as_str();
                write!(
                    f,
                    "{product} of `{name}` has a relative error of {value:.3} to the product of its codes (bound {bound})"
                )
            }
        }
    }
}

/// The summary of a comparison, and its findings.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The loss by the recipe minus the loss in BF16, in nats per token.
    pub loss_gap: f64,
    /// The cosine between the gradients by the recipe and in BF16, over all weights of the blocks.
    pub cosine: f64,
    /// The norm of these gradients by the recipe, divided by their norm in BF16.
    pub norm_ratio: f64,
    /// The numbers beyond their bounds. Numbers of tensors come first, in the order of the passes.
    pub findings: Vec<Finding>,
    /// The linears that are cast, each with the root of the sum of the squared errors of its casts. The largest is first.
    pub ranking: Vec<(String, f64)>,
    /// The linears, each with the estimated cost of its casts in the loss, in nats per token. The largest is first.
    pub loss_costs: Vec<(String, f64)>,
}

impl Verdict {
    /// Judges `comparison`. After a finding, linears or the whole model are tried again with bounds that are half as wide. If `all` is set, this
    /// holds for all bounds. If linears are in `tried`, it holds for the bounds of these linears, and for the loss and the cosine.
    pub fn of(comparison: &PrecisionComparison, bounds: Bounds, tried: &[String], all: bool) -> Verdict {
        let [by_recipe, high] = comparison.losses;
        let loss_gap = by_recipe - high;
        let whole = bounds_of(bounds, all || !tried.is_empty());
        let mut findings = Vec::new();
        let mut errors: BTreeMap<&str, f64> = BTreeMap::new();
        for compared in &comparison.tensors {
            let width = if all || tried.iter().any(|name| name == linear_of_comparison(compared)) { 0.5 } else { 1.0 };
            if compared.quantity == Quantity::Cast {
                *errors.entry(linear_of(&compared.name)).or_default() += compared.error().powi(2);
            }
            findings.extend(finding_of(compared, width));
        }
        let gradients = comparison.tensors.iter().filter(|compared| compared.quantity == Quantity::Gradient);
        let gradients = gradients.fold([0.0; 4], |sums, compared| std::array::from_fn(|i| sums[i] + compared.sums[i]));
        let gradients = Comparison { name: String::new(), quantity: Quantity::Gradient, sums: gradients };
        let (cosine, norm_ratio) = (gradients.cosine(), gradients.norm_ratio());
        let mut global = |measure, value: f64, bound, is_within: bool| {
            if !is_within {
                findings.push(Finding { tensor: None, measure, value, bound });
            }
        };
        global(Measure::LossGap, loss_gap, whole.loss_gap, loss_gap.abs() <= whole.loss_gap);
        global(Measure::Cosine, cosine, whole.cosine, cosine >= whole.cosine);
        let mut ranking: Vec<_> = errors.into_iter().map(|(name, sum)| (name.to_string(), sum.sqrt())).collect();
        ranking.sort_by(|a, b| b.1.total_cmp(&a.1));
        Verdict { loss_gap, cosine, norm_ratio, findings, ranking, loss_costs: comparison.loss_costs() }
    }
}

fn bounds_of(bounds: Bounds, is_tried: bool) -> Bounds {
    if is_tried { bounds.halved() } else { bounds }
}

/// Returns the finding about a cast or a product, if its number is beyond the bound or not finite.
fn finding_of(compared: &Comparison, width: f64) -> Option<Finding> {
    let finding = |measure, value, bound| Some(Finding { tensor: Some(compared.name.clone()), measure, value, bound });
    let (error, slope) = (compared.error(), compared.slope());
    match compared.quantity {
        Quantity::Cast => {
            let bound = Bounds::CAST_ERROR * width;
            if error <= bound { None } else { finding(Measure::CastError, error, bound) }
        }
        product if product.is_product() => {
            let (of_slope, of_error) = (Bounds::SLOPE * width, Bounds::PRODUCT_ERROR * width);
            if (slope - 1.0).abs() > of_slope {
                finding(Measure::Slope(product), slope, of_slope)
            } else if error <= of_error {
                None
            } else {
                finding(Measure::ProductError(product), error, of_error)
            }
        }
        _ => None,
    }
}

/// Returns the linear of a cast.
fn linear_of(cast: &str) -> &str {
    cast.rsplit_once('.').map_or(cast, |(linear, _)| linear)
}

fn linear_of_comparison(compared: &Comparison) -> &str {
    if compared.quantity == Quantity::Cast { linear_of(&compared.name) } else { &compared.name }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { loss_gap: 0.05, cosine: 0.9 };

    /// Returns the comparison of a tensor that is `slope` times its reference plus an orthogonal error.
    fn compared(name: &str, quantity: Quantity, slope: f64, error: f64) -> Comparison {
        let apart = (slope - 1.0).powi(2) + error * error;
        Comparison { name: name.into(), quantity, sums: [slope * slope + error * error, 1.0, slope, apart] }
    }

    fn verdict(losses: [f64; 2], tensors: Vec<Comparison>, tried: &[String]) -> Verdict {
        Verdict::of(&PrecisionComparison { losses, tensors, loss_per_square: 1.0 }, BOUNDS, tried, false)
    }

    #[test]
    fn healthy_numbers_are_no_findings() {
        let tensors = vec![
            compared("l.0.down.input", Quantity::Cast, 0.98, 0.12),
            compared("l.0.down", Quantity::Dgrad, 1.003, 0.01),
            compared("l.0.down.weight", Quantity::Gradient, 1.05, 0.3),
        ];
        let verdict = verdict([2.04, 2.0], tensors, &[]);
        assert_eq!(verdict.findings, []);
        // 2.04 - 2.0 in F64 has the rounding of 2.04, 2.2e-16.
        assert!((verdict.loss_gap - 0.04).abs() < 1e-12 && verdict.cosine > 0.95);
        assert_eq!(verdict.ranking.len(), 1);
    }

    #[test]
    fn a_finding_names_its_tensor_linear_and_bound() {
        let tensors = vec![
            compared("l.0.down.input", Quantity::Cast, 0.7, 0.3),
            compared("l.1.up", Quantity::Dgrad, 1.02, 0.003),
            compared("l.1.up", Quantity::Wgrad, 1.0, 0.2),
            compared("l.1.up.weight", Quantity::Gradient, 0.3, 1.0),
        ];
        let verdict = verdict([2.2, 2.0], tensors, &[]);
        let found: Vec<_> = verdict.findings.iter().map(|finding| (finding.linear(), finding.measure)).collect();
        assert_eq!(
            found,
            [
                (Some("l.0.down"), Measure::CastError),
                (Some("l.1.up"), Measure::Slope(Quantity::Dgrad)),
                (Some("l.1.up"), Measure::ProductError(Quantity::Wgrad)),
                (None, Measure::LossGap),
                (None, Measure::Cosine),
            ]
        );
        assert_eq!(
            verdict.findings[1].to_string(),
            "dgrad of `l.1.up` is 1.0200 times the product of its codes (bound 1 ± 0.01)"
        );
    }

    #[test]
    fn what_is_tried_again_has_half_the_bound() {
        let tensors = || vec![compared("l.0.down.input", Quantity::Cast, 0.98, 0.2)];
        assert_eq!(verdict([2.0, 2.0], tensors(), &[]).findings, []);
        assert_eq!(verdict([2.0, 2.0], tensors(), &["l.0.down".into()]).findings.len(), 1);
        assert_eq!(verdict([2.03, 2.0], vec![], &[]).findings, []);
        assert_eq!(verdict([2.03, 2.0], vec![], &["l.0.down".into()]).findings.len(), 1);
    }

    #[test]
    fn numbers_that_are_not_finite_are_findings() {
        let mut broken = compared("l.0.down.input", Quantity::Cast, 1.0, 0.0);
        broken.sums = [f64::NAN; 4];
        let verdict = verdict([f64::NAN, 2.0], vec![broken], &[]);
        assert_eq!(verdict.findings.len(), 2);
    }
}
