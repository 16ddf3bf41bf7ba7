use super::{ExpertGroups, GroupScore, RouterLosses, RouterScores, Routes, Routing};
use crate::Tensor;
use crate::element::Real;
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

/// Runs a body for F32 or F64, depending on the type of `$tensor`.
macro_rules! with_real {
    ($tensor:expr, $R:ident => $body:expr) => {
        match $tensor.dtype() {
            crate::DType::F64 => {
                type $R = f64;
                $body
            }
            _ => {
                type $R = f32;
                $body
            }
        }
    };
}

pub(super) fn route(
    logits: &Tensor,
    bias: Option<&Tensor>,
    routing: Routing,
    counted: Option<&Tensor>,
    routes: &mut Routes,
) {
    let (experts, chosen) = (logits.shape()[1], routing.chosen);
    let by_logits = routing.compares_logits(bias);
    let counts = |token: usize| counted.is_none_or(|counted| counted.host::<i32>()[token] != 0);
    with_real!(logits, R => {
        let bias: Option<&[R]> = bias.map(Tensor::host);
        let Routes { ids, weights, lse, entropy } = routes;
        let of_choices = ids.host_mut::<i32>().par_chunks_mut(chosen).zip(weights.host_mut::<R>().par_chunks_mut(chosen));
        let of_token = lse.host_mut::<R>().par_iter_mut().zip(entropy.host_mut::<R>());
        let rows = logits.host::<R>().par_rows(experts);
        of_choices.zip(of_token).zip(rows).enumerate().for_each(|(token, (((ids, weights), (lse, entropy)), logits))| {
            let scores;
            (scores, *lse) = scores_of(logits, routing.scores);
            *entropy = if counts(token) { entropy_of(&scores) } else { R::default() };
            let mut keys = match bias {
                _ if by_logits => logits.to_vec(),
                Some(bias) => scores.iter().zip(bias).map(|(&score, &bias)| score + bias).collect(),
                None => scores.clone(),
            };
            if let Some(groups) = routing.groups {
                exclude(&mut keys, groups);
            }
            for (id, best) in ids.iter_mut().zip(best_of(&keys, chosen)) {
                *id = best as i32;
            }
            weigh(&scores, ids, routing, weights);
        });
    });
}

/// Returns the scores for the logits of a token, and the logarithm of the sum of the exponentials of the logits.
fn scores_of<R: Real>(logits: &[R], how: RouterScores) -> (Vec<R>, R) {
    let largest = logits.iter().copied().fold(logits[0], |a, b| if b > a { b } else { a });
    let exponentials: Vec<R> = logits.iter().map(|&z| (z - largest).exp()).collect();
    let sum: R = exponentials.iter().copied().sum();
    let scores = match how {
        RouterScores::Softmax => exponentials.into_iter().map(|e| e / sum).collect(),
        RouterScores::Sigmoid => logits.iter().map(|&z| sigmoid(z)).collect(),
    };
    (scores, largest + sum.ln())
}

fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}

fn entropy_of<R: Real>(scores: &[R]) -> R {
    let sum: R = scores.iter().copied().sum();
    let terms = scores.iter().map(|&score| score / sum).filter(|&p| p > R::default());
    // The sum starts from +0, as on the GPU. The sum of an iterator starts from -0.
    terms.fold(R::default(), |sum, p| sum - p * p.ln())
}

/// Excludes all experts that are not in the best groups.
fn exclude<R: Real>(keys: &mut [R], groups: ExpertGroups) {
    let size = keys.len() / groups.count;
    let scores: Vec<R> = keys
        .chunks(size)
        .map(|group| {
            let mut best = best_of(group, if groups.by == GroupScore::TwoBest { 2 } else { 1 }).into_iter();
            let first = group[best.next().expect("groups are not empty")];
            best.next().map_or(first, |second| first + group[second])
        })
        .collect();
    let kept = best_of(&scores, groups.chosen);
    for (_, group) in keys.chunks_mut(size).enumerate().filter(|(group, _)| !kept.contains(group)) {
        group.fill(R::of(f64::NEG_INFINITY));
    }
}

/// Returns the indices of the `count` largest keys, the largest first. Among equal keys, the first is preferred.
fn best_of<R: Real>(keys: &[R], count: usize) -> Vec<usize> {
    let mut taken = vec![false; keys.len()];
    let next = |_| {
        let free = (0..keys.len()).filter(|&place| !taken[place]);
        let best = free.reduce(|best, place| if keys[place] > keys[best] { place } else { best });
        let best = best.expect("no more are chosen than there are");
        taken[best] = true;
        best
    };
    (0..count).map(next).collect()
}

fn weigh<R: Real>(scores: &[R], ids: &[i32], routing: Routing, weights: &mut [R]) {
    let sum: R = ids.iter().map(|&id| scores[id as usize]).sum();
    for (weight, &id) in weights.iter_mut().zip(ids) {
        let score = scores[id as usize];
        let share = routing.normalise.map_or(score, |epsilon| score / (sum + R::of(epsilon)));
        *weight = share * R::of(routing.scale);
    }
}

pub(super) fn route_backward(
    logits: &Tensor,
    routes: &Routes,
    dweights: &Tensor,
    routing: Routing,
    losses: Option<RouterLosses>,
    dlogits: &mut Tensor,
) {
    let (experts, chosen) = (logits.shape()[1], routing.chosen);
    with_real!(logits, R => {
        let losses = losses.map(|losses| {
            let scale = losses.scale.host::<R>()[0];
            let balance = R::of(losses.balance * experts as f64 / chosen as f64) * scale;
            let of_ranks = losses.counts.host::<i32>();
            let count = |e: usize| of_ranks[e..].iter().step_by(experts).sum::<i32>();
            let counts: Vec<R> = (0..experts).map(|e| R::of(f64::from(count(e)))).collect();
            (balance, counts, R::of(2.0 * losses.z) * scale, losses.counted.host::<i32>())
        });
        let of_choices = routes.ids.host::<i32>().par_chunks(chosen).zip(dweights.host::<R>().par_chunks(chosen));
        let of_token = logits.host::<R>().par_rows(experts).zip(routes.lse.host::<R>());
        let rows = dlogits.host_mut::<R>().par_rows_mut(experts);
        rows.zip(of_choices).zip(of_token).enumerate().for_each(|(token, ((dlogits, (ids, dweights)), (logits, &lse)))| {
            // The factors of both losses for this token: the gradient by the scores, and the gradient by `lse²`.
            let losses = losses.as_ref().filter(|(.., counted)| counted[token] != 0).map(|(balance, counts, z, counted)| {
                let share = R::of(1.0) / R::of(f64::from(counted[token]));
                let factor = *balance * share * share;
                (counts.iter().map(|&n| factor * n).collect::<Vec<R>>(), *z * share)
            });
            let softmax = |z: R| (z - lse).exp();
            let score = |e: usize| match routing.scores {
                RouterScores::Softmax => softmax(logits[e]),
                RouterScores::Sigmoid => sigmoid(logits[e]),
            };
            let scores: Vec<R> = (0..experts).map(score).collect();
            // Computes the gradient by the scores, then the gradient by the logits.
            let mut dscores = vec![R::default(); experts];
            let mut divisor = R::of(1.0);
            let mut common = R::default();
            if let Some(epsilon) = routing.normalise {
                divisor = ids.iter().map(|&id| scores[id as usize]).sum::<R>() + R::of(epsilon);
                common = ids.iter().zip(dweights).map(|(&id, &dw)| dw * (scores[id as usize] / divisor)).sum();
            }
            for (&id, &dw) in ids.iter().zip(dweights) {
                dscores[id as usize] = R::of(routing.scale) * ((dw - common) / divisor);
            }
            if let Some((balance, _)) = &losses {
                let sum: R = match routing.scores {
                    RouterScores::Softmax => R::of(1.0),
                    RouterScores::Sigmoid => scores.iter().copied().sum(),
                };
                let mean: R = match routing.scores {
                    // For the softmax, the gradient by the logits subtracts this mean below.
                    RouterScores::Softmax => R::default(),
                    RouterScores::Sigmoid => scores.iter().zip(balance).map(|(&s, &b)| b * (s / sum)).sum(),
                };
                for (dscore, &b) in dscores.iter_mut().zip(balance) {
                    *dscore += (b - mean) / sum;
                }
            }
            let through: R = match routing.scores {
                RouterScores::Softmax => scores.iter().zip(&dscores).map(|(&s, &d)| s * d).sum(),
                RouterScores::Sigmoid => R::default(),
            };
            for (e, dlogit) in dlogits.iter_mut().enumerate() {
                let s = scores[e];
                *dlogit = match routing.scores {
                    RouterScores::Softmax => s * (dscores[e] - through),
                    RouterScores::Sigmoid => s * (R::of(1.0) - s) * dscores[e],
                };
                if let Some((_, z)) = &losses {
                    *dlogit += *z * lse * softmax(logits[e]);
                }
            }
        });
    });
}

pub(super) fn count_choices(ids: &Tensor, counted: &Tensor, counts: &mut Tensor) {
    let chosen = ids.shape()[1];
    let counts = counts.host_mut::<i32>();
    let tokens = ids.host::<i32>().chunks(chosen).zip(counted.host::<i32>());
    tokens.filter(|(_, counted)| **counted != 0).flat_map(|(ids, _)| ids).for_each(|&id| counts[id as usize] += 1);
}

pub(super) fn add_counts(counts: &mut Tensor, now: &Tensor) {
    counts.host_mut::<i64>().iter_mut().zip(now.host::<i32>()).for_each(|(sum, &n)| *sum += i64::from(n));
}
