use super::{PreferenceLoss, PreferenceTargets};
use crate::element::Real;
use crate::{DType, Tensor};

pub(super) fn sequence_log_probs(losses: &Tensor, sums: &mut Tensor) {
    fn add<R: Real>(losses: &[R], sums: &mut [R]) {
        let tokens = losses.len() / sums.len();
        for (sum, losses) in sums.iter_mut().zip(losses.chunks_exact(tokens)) {
            // F64: small differences of such sums are what is learned from.
            *sum = R::of(-losses.iter().map(|loss| loss.to_f64()).sum::<f64>());
        }
    }
    match losses.dtype() {
        DType::F64 => add::<f64>(losses.host(), sums.host_mut()),
        _ => add::<f32>(losses.host(), sums.host_mut()),
    }
}

pub(super) fn preference_loss(
    loss: PreferenceLoss,
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    factors: &mut Tensor,
) {
    match policy.dtype() {
        DType::F64 => all::<f64>(loss, beta, policy, targets, scale, losses.host_mut(), factors.host_mut()),
        _ => all::<f32>(loss, beta, policy, targets, scale, losses.host_mut(), factors.host_mut()),
    }
}

fn all<R: Real>(
    loss: PreferenceLoss,
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut [R],
    factors: &mut [R],
) {
    let PreferenceTargets { reference, lengths, labels, kl } = targets;
    let value_of = |s: usize| policy.host::<R>()[s];
    let ratio = |s: usize| value_of(s) - reference.host::<R>()[s];
    let (lengths, labels, kl, scale) =
        (lengths.host::<R>(), labels.host::<R>(), kl.host::<R>()[0], scale.host::<R>()[0]);
    let tokens = factors.len() / losses.len();
    for (s, (value, factors)) in losses.iter_mut().zip(factors.chunks_exact_mut(tokens)).enumerate() {
        let chosen = s - s % loss.sequences();
        let (of_loss, mut derivative) = match loss {
            PreferenceLoss::Kto { desirable_weight, undesirable_weight } => match labels[s] > R::default() {
                true => of_label(ratio(s) - kl, R::of(beta), R::of(desirable_weight)),
                false => {
                    let (value, derivative) = of_label(kl - ratio(s), R::of(beta), R::of(undesirable_weight));
                    (value, -derivative)
                }
            },
            PreferenceLoss::Ipo => {
                let h = ratio(chosen) / lengths[chosen] - ratio(chosen + 1) / lengths[chosen + 1];
                let apart = h - R::of(0.5 / beta);
                (apart * apart, R::of(2.0) * apart / lengths[s])
            }
            of_pairs => {
                let (value, derivative) = of_margin(of_pairs, R::of(beta) * (ratio(chosen) - ratio(chosen + 1)));
                (value, R::of(beta) * derivative)
            }
        };
        *value = of_loss;
        // The rejected sequence of a pair.
        if s != chosen {
            (*value, derivative) = (R::default(), -derivative);
        }
        if let PreferenceLoss::BradleyTerry { centering } = loss {
            let (both, centering) = (value_of(chosen) + value_of(chosen + 1), R::of(centering));
            derivative += R::of(2.0) * centering * both;
            if s == chosen {
                *value += centering * both * both;
            }
        }
        factors.fill(-derivative * scale);
    }
}

/// The loss of `x = β · h`, and its derivative by `x`.
fn of_margin<R: Real>(loss: PreferenceLoss, x: R) -> (R, R) {
    let smoothed = |sign: f64, label_smoothing: f64, all: f64| {
        let (right, wrong) = (R::of((1.0 - label_smoothing) / all), R::of(sign * label_smoothing / all));
        (right * softplus(-x) + wrong * softplus(x), wrong * sigmoid(x) - right * sigmoid(-x))
    };
    match loss {
        PreferenceLoss::Sigmoid { label_smoothing } => smoothed(1.0, label_smoothing, 1.0),
        PreferenceLoss::BradleyTerry { .. } => smoothed(1.0, 0.0, 1.0),
        PreferenceLoss::Robust { label_smoothing } => smoothed(-1.0, label_smoothing, 1.0 - 2.0 * label_smoothing),
        PreferenceLoss::Hinge if x < R::of(1.0) => (R::of(1.0) - x, R::of(-1.0)),
        PreferenceLoss::Hinge => (R::default(), R::default()),
        PreferenceLoss::Ipo | PreferenceLoss::Kto { .. } => unreachable!("they have formulas of their own"),
    }
}

/// `weight · (1 - σ(β · x))`, and its derivative by `x`.
fn of_label<R: Real>(x: R, beta: R, weight: R) -> (R, R) {
    let (rest, share) = (sigmoid(-(beta * x)), sigmoid(beta * x));
    (weight * rest, -(weight * beta * share * rest))
}

fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}

/// `ln(1 + e^x)`, without overflow.
fn softplus<R: Real>(x: R) -> R {
    let (positive, size) = if x > R::default() { (x, x) } else { (R::default(), -x) };
    positive + (R::of(1.0) + (-size).exp()).ln()
}
