use super::loss::{Comparison, MOST_CERTAIN};
use super::{PreferenceLoss, PreferenceTargets, PreferenceTerm, log_odds};
use crate::element::Real;
use crate::{DType, Tensor};

pub(super) fn sequence_log_probs(losses: &Tensor, sums: &mut Tensor) {
    fn add<R: Real>(losses: &[R], sums: &mut [R]) {
        let tokens = losses.len() / sums.len();
        for (sum, losses) in sums.iter_mut().zip(losses.chunks_exact(tokens)) {
            // The sum is F64, because training uses small differences of such sums.
            *sum = R::of(-losses.iter().map(|loss| loss.to_f64()).sum::<f64>());
        }
    }
    match losses.dtype() {
        DType::F64 => add::<f64>(losses.host(), sums.host_mut()),
        _ => add::<f32>(losses.host(), sums.host_mut()),
    }
}

pub(super) fn preference_loss(
    terms: &[PreferenceTerm],
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    factors: &mut Tensor,
) {
    match policy.dtype() {
        DType::F64 => all::<f64>(terms, beta, policy, targets, scale, losses.host_mut(), factors.host_mut()),
        _ => all::<f32>(terms, beta, policy, targets, scale, losses.host_mut(), factors.host_mut()),
    }
}

/// The inputs of all sequences.
struct Sequences<'a, R> {
    policy: &'a [R],
    reference: &'a [R],
    lengths: &'a [R],
    labels: &'a [R],
    kl: R,
}

fn all<R: Real>(
    terms: &[PreferenceTerm],
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut [R],
    factors: &mut [R],
) {
    let PreferenceTargets { reference, lengths, labels, kl } = targets;
    let sequences = Sequences {
        policy: policy.host(),
        reference: reference.host(),
        lengths: lengths.host(),
        labels: labels.host(),
        kl: kl.host::<R>()[0],
    };
    let (scale, tokens) = (scale.host::<R>()[0], factors.len() / losses.len());
    losses.fill(R::default());
    factors.fill(R::default());
    for &PreferenceTerm { loss, weight } in terms {
        let (weight, compared) = (R::of(weight), sequences.compared(loss.compares()));
        for (s, (value, factors)) in losses.iter_mut().zip(factors.chunks_exact_mut(tokens)).enumerate() {
            let (of_loss, derivative) = sequences.loss(loss, beta, s, compared[s]);
            *value += weight * of_loss;
            let factor = -(weight * derivative) * scale;
            factors.iter_mut().for_each(|of_token| *of_token += factor);
        }
    }
}

/// The two values of a [`Comparison`], and the divisor of the sequence's log-probability in its own value.
#[derive(Clone, Copy)]
struct Compared<R> {
    values: [R; 2],
    divisor: R,
}

impl<R: Real> Sequences<'_, R> {
    fn ratio(&self, s: usize) -> R {
        self.policy[s] - self.reference[s]
    }

    /// Returns the values that the loss of each sequence compares.
    fn compared(&self, how: Comparison) -> Vec<Compared<R>> {
        let pairs = self.policy.len() / 2;
        let of_pairs = |value: &dyn Fn(usize) -> R| (0..pairs).map(value).collect::<Vec<R>>();
        let one = R::of(1.0);
        let each = |value: &dyn Fn(usize) -> Compared<R>| (0..self.policy.len()).map(value).collect();
        match how {
            Comparison::Label => each(&|s| Compared { values: [self.ratio(s), self.labels[s]], divisor: one }),
            Comparison::Pair => each(&|s| {
                let chosen = s - s % 2;
                Compared { values: [self.ratio(chosen), self.ratio(chosen + 1)], divisor: one }
            }),
            Comparison::PerToken => each(&|s| {
                let mean = |s: usize| self.ratio(s) / self.lengths[s];
                let chosen = s - s % 2;
                Compared { values: [mean(chosen), mean(chosen + 1)], divisor: self.lengths[s] }
            }),
            Comparison::RankedMargins => {
                let margins = |of: &[R]| of_pairs(&|pair| of[2 * pair] - of[2 * pair + 1]);
                let (own, reference) = (margins(self.policy), margins(self.reference));
                let other = at_equal_ranks(&own, &reference);
                each(&|s| Compared { values: [own[s / 2], other[s / 2]], divisor: one })
            }
            Comparison::RankedSides => {
                let sides = [0, 1].map(|side| of_pairs(&|pair| self.ratio(2 * pair + side)));
                let other = [at_equal_ranks(&sides[0], &sides[1]), at_equal_ranks(&sides[1], &sides[0])];
                each(&|s| {
                    let (own, other) = (sides[s % 2][s / 2], other[s % 2][s / 2]);
                    Compared { values: if s.is_multiple_of(2) { [own, other] } else { [other, own] }, divisor: one }
                })
            }
            Comparison::Chosen => {
                let tokens: R = of_pairs(&|pair| self.lengths[2 * pair]).into_iter().sum();
                let divisor = tokens / R::of(pairs as f64);
                each(&|s| Compared { values: [self.policy[s - s % 2] / divisor, R::default()], divisor })
            }
        }
    }

    /// Returns the loss of sequence `s`, and its derivative by the log-probability of the sequence. A rejected sequence has no loss.
    fn loss(&self, loss: PreferenceLoss, beta: f64, s: usize, Compared { values, divisor }: Compared<R>) -> (R, R) {
        match loss {
            PreferenceLoss::Kto { desirable_weight, undesirable_weight } => {
                of_label(values, self.kl, beta, [desirable_weight, undesirable_weight])
            }
            PreferenceLoss::ApoZeroUnpaired { desirable_weight, undesirable_weight } => {
                of_label(values, R::default(), beta, [desirable_weight, undesirable_weight])
            }
            of_pairs => {
                let (mut value, slopes) = of_pair(of_pairs, beta, values);
                let mut derivative = slopes[s % 2] / divisor;
                if let PreferenceLoss::BradleyTerry { centering } = loss {
                    let (both, centering) = (self.policy[s - s % 2] + self.policy[s - s % 2 + 1], R::of(centering));
                    value += centering * both * both;
                    derivative += R::of(2.0) * centering * both;
                }
                (if s.is_multiple_of(2) { value } else { R::default() }, derivative)
            }
        }
    }
}

/// Returns for each of `values` the element of `others` that has the same rank. A NaN is the largest.
fn at_equal_ranks<R: Real>(values: &[R], others: &[R]) -> Vec<R> {
    let key = |value: R| {
        let value = value.to_f64();
        if value.is_nan() { f64::NAN } else { value }
    };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| key(values[a]).total_cmp(&key(values[b])));
    let mut sorted = others.to_vec();
    sorted.sort_by(|&a, &b| key(a).total_cmp(&key(b)));
    let mut partners = vec![R::default(); values.len()];
    for (place, other) in order.into_iter().zip(sorted) {
        partners[place] = other;
    }
    partners
}

/// Returns the loss of a pair with these values of the chosen and the rejected sequence, and its derivatives by both values.
fn of_pair<R: Real>(loss: PreferenceLoss, beta: f64, [chosen, rejected]: [R; 2]) -> (R, [R; 2]) {
    let (one, half, shift, beta) = (R::of(1.0), R::of(0.5), R::of(0.5 / beta), R::of(beta));
    let (a, b) = (beta * chosen, beta * rejected);
    match loss {
        PreferenceLoss::Ipo => {
            let apart = chosen - rejected - shift;
            (apart * apart, [R::of(2.0) * apart, -(R::of(2.0) * apart)])
        }
        PreferenceLoss::SppoHard => {
            let (up, down) = (chosen - shift, rejected + shift);
            (up * up + down * down, [R::of(2.0) * up, R::of(2.0) * down])
        }
        PreferenceLoss::NcaPair => {
            let value = softplus(-a) + half * softplus(a) + half * softplus(b);
            (value, [beta * (half * sigmoid(a) - sigmoid(-a)), beta * half * sigmoid(b)])
        }
        PreferenceLoss::BcoPair => (softplus(-a) + softplus(b), [-(beta * sigmoid(-a)), beta * sigmoid(b)]),
        PreferenceLoss::ApoZero => (sigmoid(-a) + sigmoid(b), [-(beta * slope(a)), beta * slope(b)]),
        PreferenceLoss::ApoDown => {
            let h = beta * (chosen - rejected);
            (sigmoid(a) + sigmoid(-h), [beta * (slope(a) - slope(h)), beta * slope(h)])
        }
        PreferenceLoss::Sft => (-chosen, [-one, R::default()]),
        PreferenceLoss::OddsRatio => of_odds(beta.to_f64(), [chosen.to_f64(), rejected.to_f64()]),
        of_margin_alone => {
            let x = beta * (chosen - rejected) - R::of(of_margin_alone.target_margin());
            let (value, derivative) = of_margin(of_margin_alone, x);
            (value, [beta * derivative, -(beta * derivative)])
        }
    }
}

/// Returns the odds-ratio loss of a pair with these mean log-probabilities, and the derivatives by both means. The computation is in F64, because
/// `1 - p` of a probability `p` near 1 has few digits in F32.
fn of_odds<R: Real>(beta: f64, means: [f64; 2]) -> (R, [R; 2]) {
    let [chosen, rejected] = means.map(log_odds);
    let apart = chosen - rejected;
    // The derivative of the logarithm of odds is 1 / (1 - p).
    let [by_chosen, by_rejected] = means.map(|mean| beta * sigmoid(-apart) / (1.0 - Real::exp(mean.min(MOST_CERTAIN))));
    (R::of(beta * softplus(-apart)), [R::of(-by_chosen), R::of(by_rejected)])
}

/// Returns the loss of `x = β · h` minus the margin of the loss, and the derivative of the loss by `x`.
fn of_margin<R: Real>(loss: PreferenceLoss, x: R) -> (R, R) {
    let smoothed = |sign: f64, label_smoothing: f64, all: f64| {
        let (right, wrong) = (R::of((1.0 - label_smoothing) / all), R::of(sign * label_smoothing / all));
        (right * softplus(-x) + wrong * softplus(x), wrong * sigmoid(x) - right * sigmoid(-x))
    };
    match loss {
        PreferenceLoss::Sigmoid { label_smoothing }
        | PreferenceLoss::Simpo { label_smoothing, .. }
        | PreferenceLoss::Aot { label_smoothing }
        | PreferenceLoss::AotUnpaired { label_smoothing } => smoothed(1.0, label_smoothing, 1.0),
        PreferenceLoss::SigmoidNorm | PreferenceLoss::BradleyTerry { .. } => smoothed(1.0, 0.0, 1.0),
        PreferenceLoss::Robust { label_smoothing } => smoothed(-1.0, label_smoothing, 1.0 - 2.0 * label_smoothing),
        PreferenceLoss::Hinge if x < R::of(1.0) => (R::of(1.0) - x, R::of(-1.0)),
        PreferenceLoss::Hinge => (R::default(), R::default()),
        PreferenceLoss::ExoPair { label_smoothing } => {
            let (right, wrong) = (R::of((-label_smoothing).ln_1p()), R::of(label_smoothing.ln()));
            let (share, rest) = (sigmoid(x), sigmoid(-x));
            let value = share * (-softplus(-x) - right) + rest * (-softplus(x) - wrong);
            (value, share * rest * (x - right + wrong))
        }
        PreferenceLoss::Discopop { tau } => {
            let (tau, logistic) = (R::of(tau), softplus(-x));
            let (share, rest) = (sigmoid(x / tau), sigmoid(-(x / tau)));
            // Equals `m · e^(-x)`. The second factor alone would overflow.
            let exponential = (-x - softplus(-(x / tau))).exp();
            let mixed = (exponential - logistic * share) * rest / tau;
            (logistic * rest + exponential, mixed - rest * sigmoid(-x) - exponential)
        }
        _ => unreachable!("a loss of more than the margin"),
    }
}

/// Returns the loss of a sequence with `x` and its label, relative to `kl`, and its derivative by `x`. The loss is `weight · (1 - σ(β · (x - kl)))`
/// for a desirable sequence, and `weight · (1 - σ(β · (kl - x)))` for an undesirable sequence.
fn of_label<R: Real>([x, label]: [R; 2], kl: R, beta: f64, [desirable, undesirable]: [f64; 2]) -> (R, R) {
    let beta = R::of(beta);
    let is_desirable = label > R::default();
    let (above, weight) = if is_desirable { (x - kl, R::of(desirable)) } else { (kl - x, R::of(undesirable)) };
    let (rest, share) = (sigmoid(-(beta * above)), sigmoid(beta * above));
    let derivative = -(weight * beta * share * rest);
    (weight * rest, if is_desirable { derivative } else { -derivative })
}

fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}

/// Returns the derivative of [`sigmoid`].
fn slope<R: Real>(x: R) -> R {
    sigmoid(x) * sigmoid(-x)
}

/// Returns `ln(1 + e^x)`, without overflow.
fn softplus<R: Real>(x: R) -> R {
    let (positive, size) = if x > R::default() { (x, x) } else { (R::default(), -x) };
    positive + (R::of(1.0) + (-size).exp()).ln()
}
