use super::{Correction, FARTHEST, IGNORE_INDEX, Inputs, KlEstimator, PolicyBound, PolicyLoss};
use crate::element::{Element, Real};
use crate::{DType, Tensor};

pub(super) fn policy_loss(how: &PolicyLoss, of: Inputs, bounded: &mut Tensor, factors: &mut Tensor) {
    match of.losses.dtype() {
        DType::F64 => all::<f64>(how, of, bounded.host_mut(), factors.host_mut()),
        _ => all::<f32>(how, of, bounded.host_mut(), factors.host_mut()),
    }
}

/// What is known of a token. All arithmetic runs in F64, in which ratios near 1 differ.
#[derive(Clone, Copy)]
struct Token {
    lp: f64,
    /// `lp - old`.
    log_ratio: f64,
    reference: f64,
    advantage: f64,
    correction: f64,
    weight: f64,
}

impl Token {
    /// The token as the policy of the step would have drawn it. `log_of_draw` is the logarithm of the ratio of its sequence.
    fn corrected(self, how: &Correction, log_of_draw: f64) -> Token {
        let correction = how.factor(if how.of_sequence { log_of_draw } else { self.log_ratio });
        Token { log_ratio: 0.0, correction, ..self }
    }
}

fn all<R: Real + Element>(how: &PolicyLoss, of: Inputs, bounded: &mut [R], factors: &mut [R]) {
    let known = of.known;
    let [losses, old, reference, advantages, corrections, weights] =
        [of.losses, &known.old, &known.reference, &known.advantages, &known.corrections, &known.weights]
            .map(|tensor| tensor.host::<R>());
    let (targets, scale) = (of.targets.host::<i32>(), of.scale.host::<R>()[0].to_f64());
    let token = |t: usize| Token {
        lp: -losses[t].to_f64(),
        log_ratio: -losses[t].to_f64() - old[t].to_f64(),
        reference: reference[t].to_f64(),
        advantage: advantages[t].to_f64(),
        correction: corrections[t].to_f64(),
        weight: if targets[t] == IGNORE_INDEX { 0.0 } else { weights[t].to_f64() },
    };
    let starts = known.sequences.host::<i32>();
    for ends in starts.windows(2) {
        let [start, end] = [ends[0], ends[1]].map(|at| at.clamp(0, losses.len() as i32) as usize);
        let all = start..end;
        let log_of_draw: f64 =
            all.clone().map(token).filter(|token| token.weight != 0.0).map(|token| token.log_ratio).sum();
        let token = |t: usize| match how.correction {
            Some(correction) => token(t).corrected(&correction, log_of_draw),
            None => token(t),
        };
        let counted = || all.clone().map(token).filter(|token| token.weight != 0.0);
        let length = counted().count() as f64;
        let ratio = Ratio::of(counted().map(|token| token.log_ratio).sum::<f64>() / length.max(1.0));
        // The sequence's ratio has a share of each of its tokens.
        let slope: f64 = match how.of_sequence {
            true => counted().map(|token| token.weight * token.correction * how.bound.at(&token, ratio).by_ratio).sum(),
            false => 0.0,
        };
        for t in all.clone() {
            let token = token(t);
            if token.weight == 0.0 {
                (bounded[t], factors[t]) = (R::default(), R::default());
                continue;
            }
            let own = Ratio::of(token.log_ratio);
            let policy = how.bound.at(&token, if how.of_sequence { ratio } else { own });
            let by_ratio = match how.of_sequence {
                true => slope / length,
                false => token.weight * token.correction * policy.by_ratio,
            };
            let (kl, by_lp) = how.kl.at(&token, own);
            let by_lp = by_ratio + token.weight * (token.correction * policy.by_lp + how.beta * by_lp);
            bounded[t] = R::of(token.weight * (token.correction * policy.loss + how.beta * kl));
            factors[t] = R::of(-scale * by_lp);
        }
    }
}

/// `e^log`, and its derivative by `log`, which is 0 beyond the farthest logarithm.
#[derive(Clone, Copy)]
struct Ratio {
    w: f64,
    slope: f64,
}

impl Ratio {
    fn of(log: f64) -> Ratio {
        let w = log.clamp(-FARTHEST, FARTHEST).exp();
        Ratio { w, slope: if log.abs() <= FARTHEST { w } else { 0.0 } }
    }
}

/// A loss, and its derivatives by the logarithm of the ratio and by the log-probability beside it.
struct Policy {
    loss: f64,
    by_ratio: f64,
    by_lp: f64,
}

impl PolicyBound {
    fn at(self, token: &Token, Ratio { w, slope }: Ratio) -> Policy {
        let a = token.advantage;
        match self {
            PolicyBound::Clip { low, high, most } => {
                let free = w.min(most) * a;
                let clipped = w.clamp(1.0 - low, 1.0 + high) * a;
                let follows = free <= clipped && w < most;
                Policy { loss: -free.min(clipped), by_ratio: if follows { -slope * a } else { 0.0 }, by_lp: 0.0 }
            }
            PolicyBound::Weight { low, high } => {
                let weight = w.clamp(1.0 - low, 1.0 + high);
                Policy { loss: -weight * a * token.lp, by_ratio: 0.0, by_lp: -weight * a }
            }
            PolicyBound::None => Policy { loss: -a * token.lp, by_ratio: 0.0, by_lp: -a },
        }
    }
}

impl KlEstimator {
    /// The estimate and its derivative by `lp`, with the token's own ratio.
    fn at(self, token: &Token, Ratio { w, slope }: Ratio) -> (f64, f64) {
        let apart = token.reference - token.lp;
        let d = apart.clamp(-FARTHEST, FARTHEST);
        // The derivative of `d` by `lp`.
        let by = if apart.abs() <= FARTHEST { -1.0 } else { 0.0 };
        let k3 = d.exp() - 1.0 - d;
        match self {
            KlEstimator::K1 => (-w * d, -slope * d - w * by),
            KlEstimator::K2 => (d * d / 2.0, d * by),
            KlEstimator::K3 => (k3, (d.exp() - 1.0) * by),
            KlEstimator::WeightedK3 => (w * k3, slope * k3 + w * (d.exp() - 1.0) * by),
        }
    }
}
