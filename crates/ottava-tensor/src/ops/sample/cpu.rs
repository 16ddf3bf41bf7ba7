use super::{Change, Distribution, Draws, ONE, RowDraw};
use crate::Tensor;
use std::f32::consts::{LN_2, LOG2_E};
use std::f64;

pub(super) fn sample(
    logits: &Tensor,
    draws: &mut Draws,
    distribution: Distribution,
    tokens: &mut Tensor,
    logprobs: &mut Tensor,
) {
    let [rows, columns] = draws.shape;
    let (of_rows, changes) = draws.words.host::<i64>().split_at(rows * size_of::<RowDraw>() / 8);
    let (of_rows, changes): (&[RowDraw], &[Change]) = (bytemuck::cast_slice(of_rows), bytemuck::cast_slice(changes));
    let mut row = Vec::new();
    let found = tokens.host_mut::<i32>().iter_mut().zip(logprobs.host_mut::<f32>());
    for (r, (how, (token, logprob))) in of_rows.iter().zip(found).enumerate() {
        let plain = &logits.host::<f32>()[r * columns..][..columns];
        (*token, *logprob) = (-1, 0.0);
        if !plain.iter().all(|x| x.is_finite()) {
            continue;
        }
        row.clear();
        row.extend_from_slice(plain);
        adjust(&mut row, how, changes);
        let candidates = (how.top_k != 1).then(|| Candidates::of(&row, how));
        let found = candidates.as_ref().map_or_else(|| likeliest(&row), |left| left.token_at(how.uniform));
        *token = found as i32;
        *logprob = match (distribution, candidates) {
            (Distribution::Model, _) => log_softmax(plain, found),
            (Distribution::Draw, None) if how.greedy > 0 => log_softmax(&row, found),
            (Distribution::Draw, None) => 0.0,
            (Distribution::Draw, Some(left)) => left.logprob(f64::from((row[found] - largest(&row)) * how.scale)),
        };
    }
}

/// As `Draw::processed` says.
pub(super) fn processed(plain: &[f32], how: &RowDraw, changes: &[Change]) -> Vec<f32> {
    let mut row = plain.to_vec();
    adjust(&mut row, how, changes);
    if how.greedy > 0 {
        return row;
    }
    let (largest, mut left) = (largest(&row), vec![f32::NEG_INFINITY; row.len()]);
    for (column, _, x) in Candidates::of(&row, how).0 {
        left[column] = (x - largest) * how.scale * LN_2;
    }
    left
}

/// Applies the changes of a row to its logits.
fn adjust(row: &mut [f32], how: &RowDraw, changes: &[Change]) {
    for change in &changes[how.start as usize..how.end as usize] {
        let logit = &mut row[change.token as usize];
        if change.count >= 0 {
            *logit = if *logit > 0.0 { *logit / how.repetition } else { *logit * how.repetition };
        }
        if change.count > 0 {
            *logit -= how.presence + how.frequency * change.count as f32;
        }
        *logit += change.bias;
    }
}

fn largest(row: &[f32]) -> f32 {
    // The maxima of eight interleaved parts are independent, so compilers vectorise them.
    let mut largest = [f32::NEG_INFINITY; 8];
    let (eights, rest) = row.as_chunks::<8>();
    for eight in eights {
        largest.iter_mut().zip(eight).for_each(|(largest, &x)| *largest = if x > *largest { x } else { *largest });
    }
    largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Returns the first column of the largest element.
fn likeliest(row: &[f32]) -> usize {
    let largest = largest(row);
    row.iter().position(|&x| x == largest).unwrap_or(0)
}

fn log_softmax(row: &[f32], column: usize) -> f32 {
    let largest = largest(row);
    let total: u64 = row.iter().map(|x| weight((x - largest) * LOG2_E)).sum();
    (f64::from(row[column] - largest) - (total as f64 / 2f64.powi(ONE as i32)).ln()) as f32
}

/// Returns `floor(2^ONE · 2^x)` for `x <= 0`. The bits are the same wherever F32 is the same, unlike the bits of `exp` in libraries.
fn weight(x: f32) -> u64 {
    if x.is_nan() || x < -(ONE as f32) {
        return 0;
    }
    let n = (x + 0.5).floor();
    let f = x - n;
    // The powers of ln 2 divided by factorials. For |f| up to 1/2, the polynomial is exact to 2⁻²³.
    let coefficients = [1.3333558e-3, 9.618129e-3, 5.550411e-2, 2.402265e-1, LN_2, 1.0];
    let p = coefficients.into_iter().fold(1.540353e-4f32, |p, coefficient| p * f + coefficient);
    (p * f32::from_bits(((n as i32 + 127 + ONE as i32) as u32) << 23)) as u64
}

/// The columns that can be drawn, in the order of the row. Each column has its weight and its element.
struct Candidates(Vec<(usize, u64, f32)>);

impl Candidates {
    /// The columns that `how` leaves of a row with its changes.
    fn of(row: &[f32], how: &RowDraw) -> Candidates {
        Candidates::select(row, how.scale, how.least).cut(how.top_k as usize, how.top_p)
    }

    /// The log-probability of a column among these, with the weight `2^(ONE + x)`.
    fn logprob(&self, x: f64) -> f32 {
        let total: u64 = self.0.iter().map(|(_, weight, _)| weight).sum();
        (x * f64::consts::LN_2 - (total as f64 / 2f64.powi(ONE as i32)).ln()) as f32
    }

    fn select(row: &[f32], scale: f32, least: u64) -> Candidates {
        let largest = largest(row);
        let all = row.iter().enumerate().map(|(column, &x)| (column, weight((x - largest) * scale), x));
        Candidates(all.filter(|&(_, weight, _)| weight > 0 && weight >= least).collect())
    }

    /// Keeps the `top_k` largest elements (0 for all elements). Then keeps the fewest of these whose weights have the share `top_p` of their weights,
    /// in units of 2⁻⁶⁴.
    fn cut(mut self, top_k: usize, top_p: u64) -> Candidates {
        // Larger elements first, then smaller columns. The two zeros are equal.
        let order =
            |a: &(usize, u64, f32), b: &(usize, u64, f32)| (b.2 + 0.0).total_cmp(&(a.2 + 0.0)).then(a.0.cmp(&b.0));
        let all = &mut self.0;
        if (1..all.len()).contains(&top_k) {
            all.select_nth_unstable_by(top_k - 1, order);
            all.truncate(top_k);
        }
        if top_p != u64::MAX {
            let wanted = share(top_p, all.iter().map(|(_, weight, _)| weight).sum()) + 1;
            // A few columns have most of the weight, so only as many columns as necessary are sorted.
            let mut sorted = 64;
            loop {
                sorted = sorted.min(all.len());
                if sorted < all.len() {
                    all.select_nth_unstable_by(sorted, order);
                }
                all[..sorted].sort_unstable_by(order);
                let mut mass = 0;
                let kept = all[..sorted].iter().position(|(_, weight, _)| {
                    mass += weight;
                    mass >= wanted
                });
                if kept.is_some() || sorted == all.len() {
                    all.truncate(kept.map_or(sorted, |last| last + 1));
                    break;
                }
                sorted *= 8;
            }
        }
        all.sort_unstable_by_key(|&(column, ..)| column);
        self
    }

    /// Returns the column at the share `uniform` of the cumulated weights. Returns the first column if there is no candidate.
    fn token_at(&self, uniform: u64) -> usize {
        let mut left = share(uniform, self.0.iter().map(|(_, weight, _)| weight).sum());
        for &(column, weight, _) in &self.0 {
            if left < weight {
                return column;
            }
            left -= weight;
        }
        0
    }
}

/// Returns the floor of `part · whole`, with `part` in units of 2⁻⁶⁴.
fn share(part: u64, whole: u64) -> u64 {
    ((u128::from(part) * u128::from(whole)) >> 64) as u64
}
