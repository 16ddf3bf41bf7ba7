use super::{IGNORE_INDEX, ValueLoss, ValueTargets};
use crate::element::{Element, Real};
use crate::{DType, Tensor};

pub(super) fn value_loss(
    how: &ValueLoss,
    values: &Tensor,
    targets: &Tensor,
    known: ValueTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    gradient: &mut Tensor,
) {
    match values.dtype() {
        DType::F64 => all::<f64>(how, values, targets, known, scale, losses.host_mut(), gradient.host_mut()),
        _ => all::<f32>(how, values, targets, known, scale, losses.host_mut(), gradient.host_mut()),
    }
}

/// All arithmetic runs in F64.
fn all<R: Real + Element>(
    how: &ValueLoss,
    values: &Tensor,
    targets: &Tensor,
    known: ValueTargets,
    scale: &Tensor,
    losses: &mut [R],
    gradient: &mut [R],
) {
    let [values, old, returns, weights] =
        [values, known.old, known.returns, known.weights].map(|tensor| tensor.host::<R>());
    let (targets, factor) = (targets.host::<i32>(), how.coefficient * scale.host::<R>()[0].to_f64());
    for t in 0..values.len() {
        let weight = if targets[t] == IGNORE_INDEX { 0.0 } else { weights[t].to_f64() };
        if weight == 0.0 {
            (losses[t], gradient[t]) = (R::default(), R::default());
            continue;
        }
        let (value, old, returns) = (values[t].to_f64(), old[t].to_f64(), returns[t].to_f64());
        let (error, bounded) = (value - returns, value.clamp(old - how.range, old + how.range) - returns);
        // Beyond the range, the bounded value is constant.
        let follows = error * error >= bounded * bounded;
        losses[t] = R::of(weight * 0.5 * (error * error).max(bounded * bounded));
        gradient[t] = R::of(if follows { factor * weight * error } else { 0.0 });
    }
}
