use super::*;
use crate::testing::{Tolerance, normals, parity};

/// Spreads the bits of `number` over the range of draws.
fn uniform(number: usize) -> u64 {
    (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn at(temperature: f64) -> Draw {
    Draw { temperature, ..Draw::GREEDY }
}

/// Returns the tokens and log-probabilities of draws from `logits` `[R, V]`. The log-probabilities are of the unchanged logits.
fn sampled(logits: &Tensor, draws: &[Draw]) -> Result<Vec<Tensor>> {
    sampled_of(logits, draws, Distribution::Model)
}

fn sampled_of(logits: &Tensor, draws: &[Draw], distribution: Distribution) -> Result<Vec<Tensor>> {
    let [rows, columns] = logits.dims("logits")?;
    let adjustments = draws.iter().map(|draw| draw.adjustments.len()).sum();
    let mut on_device = Draws::new(logits.device(), [rows, columns], adjustments)?;
    on_device.set(draws)?;
    let (tokens, logprobs) = sample(logits, &mut on_device, distribution)?;
    Ok(vec![tokens, logprobs])
}

/// Returns how often each column of `logits` is drawn, for 20,000 positions spread over the whole range.
fn shares<const N: usize>(logits: [f32; N], draw: &Draw) -> [f64; N] {
    const DRAWS: usize = 20_000;
    let all = Tensor::from_slice(&Device::Cpu, &[DRAWS, N], &logits.repeat(DRAWS)).unwrap();
    let draws: Vec<Draw> = (0..DRAWS).map(|i| Draw { uniform: uniform(i), ..draw.clone() }).collect();
    let mut shares = [0.0; N];
    for token in sampled(&all, &draws).unwrap()[0].to_vec::<i32>().unwrap() {
        shares[token as usize] += 1.0 / DRAWS as f64;
    }
    shares
}

const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 1.5];

fn softmax(logits: [f64; 5]) -> [f64; 5] {
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    logits.map(|logit| logit.exp() / sum)
}

fn assert_shares(draw: &Draw, expected: [f64; 5]) {
    for (found, expected) in shares(LOGITS, draw).iter().zip(expected) {
        // Positions are multiples of the golden ratio, which are spread so evenly that shares err by a few of 20,000 positions; up to 1.3e-4 was
        // seen. Independent draws would err by 3.5e-3.
        assert!((found - expected).abs() < 0.002, "{found} for {expected} of {draw:?}");
        assert!(expected > 0.0 || *found == 0.0, "a token that cannot be drawn: {draw:?}");
    }
}

/// Draws compare integers, which are equal on all devices. The logarithm in a log-probability may differ in its last bit.
#[test]
fn sample_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (6, 1024), (40, 5003)] {
        let mut logits = normals("logits", &[rows, columns], DType::F32).to_vec::<f32>().unwrap();
        logits.iter_mut().for_each(|x| *x *= 3.0);
        // Every third row has many equal logits.
        for row in logits.chunks_exact_mut(columns).step_by(3) {
            row.iter_mut().for_each(|x| *x = x.round());
        }
        let draws: Vec<Draw> = (0..rows)
            .map(|i| Draw {
                top_k: [None, Some(1), Some(5), Some(300), Some(columns), Some(2 * columns)][i % 6],
                top_p: [1.0, 0.9, 0.3, 1e-9][i % 4],
                min_p: [0.0, 0.02, 1.0][i % 3],
                uniform: uniform(i + 1),
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.1,
                adjustments: (0..columns as u32)
                    .filter(|token| i % 2 == 1 && (token + i as u32).is_multiple_of(3))
                    .map(|token| Adjustment {
                        token,
                        count: (token % 4).checked_sub(1),
                        bias: if token % 5 == 2 { f32::NEG_INFINITY } else { (token % 7) as f32 * 0.25 },
                    })
                    .collect(),
                ..at([1.0, 0.0, 0.6, 40.0, 1e-9][i % 5])
            })
            .collect();
        let logits = Tensor::from_slice(&Device::Cpu, &[rows, columns], &logits).unwrap();
        parity(std::slice::from_ref(&logits), Tolerance::Exact, |x| Ok(vec![sampled(&x[0], &draws)?.swap_remove(0)]));
        for distribution in [Distribution::Model, Distribution::Draw] {
            parity(std::slice::from_ref(&logits), Tolerance::Steps(DType::F32, 1.0), |x| {
                Ok(vec![sampled_of(&x[0], &draws, distribution)?.swap_remove(1)])
            });
        }
    }
}

#[test]
fn draws_follow_the_softmax_at_every_temperature() {
    assert_eq!(shares(LOGITS, &at(0.0))[1].round(), 1.0, "temperature 0 takes the likeliest token");
    assert_eq!(shares(LOGITS, &at(1e-300))[1].round(), 1.0);
    for temperature in [0.5, 1.0, 3.0] {
        assert_shares(&at(temperature), softmax(LOGITS.map(|logit| f64::from(logit) / temperature)));
    }
}

#[test]
fn top_k_top_p_and_min_p_cut_the_tail() {
    let only = |kept: &[usize]| {
        let all = softmax(LOGITS.map(f64::from));
        let sum: f64 = kept.iter().map(|&token| all[token]).sum();
        std::array::from_fn(|token| if kept.contains(&token) { all[token] / sum } else { 0.0 })
    };
    assert_shares(&Draw { top_k: Some(2), ..at(1.0) }, only(&[1, 4]));
    assert_shares(&Draw { top_k: Some(9), ..at(1.0) }, only(&[0, 1, 2, 3, 4]));
    // The probabilities are 0.44, 0.27, 0.16, 0.06 and 0.02 for the tokens 1, 4, 2, 0 and 3.
    assert_shares(&Draw { top_p: 0.8, ..at(1.0) }, only(&[1, 4, 2]));
    assert_shares(&Draw { top_p: 1e-9, ..at(1.0) }, only(&[1]));
    assert_shares(&Draw { min_p: 0.5, ..at(1.0) }, only(&[1, 4]));
    assert_shares(&Draw { min_p: 1.0, ..at(1.0) }, only(&[1]));
    assert_shares(&Draw { top_k: Some(3), top_p: 0.7, ..at(1.0) }, only(&[1, 4]));
}

#[test]
fn among_equal_logits_the_smaller_ids_are_left() {
    let equal = [1.0, 3.0, 3.0, 3.0];
    let of = |draw: &Draw| shares(equal, draw).map(|share| (share * 10.0).round() as i32);
    assert_eq!(of(&at(0.0)), [0, 10, 0, 0]);
    assert_eq!(of(&Draw { top_k: Some(2), ..at(1.0) }), [0, 5, 5, 0]);
    assert_eq!(of(&Draw { top_p: 0.5, ..at(1.0) }), [0, 5, 5, 0]);
}

#[test]
fn penalties_are_those_of_vllm() {
    let adjusted = |token, count, bias| Adjustment { token, count, bias };
    let draw = Draw {
        repetition_penalty: 2.0,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        adjustments: vec![
            adjusted(0, Some(0), 0.0),
            adjusted(1, Some(2), 0.0),
            adjusted(3, Some(1), 0.0),
            adjusted(4, None, 3.0),
            adjusted(99, None, 1.0),
        ],
        ..at(1.0)
    };
    let expected = [0.0, 1.0 - 0.25 - 1.0, 1.0, -2.0 - 0.25 - 0.5, 4.5];
    assert_shares(&draw, softmax(expected));
    let barred = Draw { adjustments: vec![adjusted(1, None, f32::NEG_INFINITY)], ..at(0.0) };
    assert_eq!(shares(LOGITS, &barred)[4].round(), 1.0);
}

#[test]
fn log_probabilities_are_those_of_unchanged_logits_and_rows_that_are_not_finite_have_no_token() {
    let rows = [LOGITS, [0.0, f32::NAN, 0.0, 0.0, 0.0], [f32::INFINITY, 0.0, 0.0, 0.0, 0.0]].concat();
    let logits = Tensor::from_slice(&Device::Cpu, &[3, 5], &rows).unwrap();
    let draw = Draw { adjustments: vec![Adjustment { token: 2, count: None, bias: 50.0 }], ..at(0.5) };
    let found = sampled(&logits, &[draw.clone(), draw.clone(), draw]).unwrap();
    assert_eq!(found[0].to_vec::<i32>().unwrap(), [2, -1, -1]);
    let logprob = f64::from(found[1].to_vec::<f32>().unwrap()[0]);
    // The result is rounded to F32, by up to 2⁻²⁴ of its value, and polynomials for exponentials are exact to 2⁻²³.
    assert!((logprob - softmax(LOGITS.map(f64::from))[2].ln()).abs() < 1e-6, "{logprob}");
}

/// The log-probability of each token that can be drawn is the logarithm of its share, and the processed logits have the same softmax.
#[test]
fn log_probabilities_of_draws_are_those_of_the_distribution_that_is_drawn_from() {
    let adjusted = |token, count, bias| Adjustment { token, count, bias };
    let penalties = Draw {
        repetition_penalty: 2.0,
        presence_penalty: 0.25,
        adjustments: vec![adjusted(1, Some(2), 0.0), adjusted(3, None, 1.5), adjusted(4, None, f32::NEG_INFINITY)],
        ..at(0.7)
    };
    let greedy = Draw { temperature: 0.0, ..penalties.clone() };
    for (draw, kept, logits) in [
        (at(0.5), [0, 1, 2, 3, 4].as_slice(), LOGITS.map(|x| f64::from(x) / 0.5)),
        (Draw { top_k: Some(3), ..at(2.0) }, &[1, 2, 4], LOGITS.map(|x| f64::from(x) / 2.0)),
        (Draw { top_k: Some(1), ..at(2.0) }, &[1], LOGITS.map(f64::from)),
        (Draw { top_p: 0.8, ..at(1.0) }, &[1, 2, 4], LOGITS.map(f64::from)),
        (Draw { min_p: 0.5, ..at(1.0) }, &[1, 4], LOGITS.map(f64::from)),
        (penalties, &[0, 1, 2, 3], [0.0, 0.75, 1.0, 0.5, 0.0].map(|x| x / 0.7)),
        (greedy, &[0, 1, 2, 3], [0.0, 0.75, 1.0, 0.5, 0.0]),
    ] {
        let sum: f64 = kept.iter().map(|&token| logits[token].exp()).sum();
        let expected: [f64; 5] = std::array::from_fn(|token| match kept.contains(&token) {
            true => logits[token] - sum.ln(),
            false => f64::NEG_INFINITY,
        });
        let all = Tensor::from_slice(&Device::Cpu, &[50, 5], &LOGITS.repeat(50)).unwrap();
        let draws: Vec<Draw> = (0..50).map(|i| Draw { uniform: uniform(i), ..draw.clone() }).collect();
        let found = sampled_of(&all, &draws, Distribution::Draw).unwrap();
        for (token, logprob) in found[0].to_vec::<i32>().unwrap().iter().zip(found[1].to_vec::<f32>().unwrap()) {
            // As in the test above.
            assert!((f64::from(logprob) - expected[*token as usize]).abs() < 1e-6, "{token}: {logprob}, {draw:?}");
        }
        let processed: Vec<f64> = draw.processed(&LOGITS).into_iter().map(f64::from).collect();
        let sum: f64 = processed.iter().map(|x| x.exp()).sum();
        let processed: Vec<f64> = processed.into_iter().map(|x| x - sum.ln()).collect();
        for (found, expected) in processed.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6 || *found == expected, "{processed:?} for {expected}, {draw:?}");
        }
    }
}

#[test]
fn top_p_of_a_large_vocabulary_is_that_of_a_whole_sort() {
    let logits: Vec<f32> = (0..3000).map(|i| ((i * 7919 % 3001) as f32 + 1.0).ln()).collect();
    let x = Tensor::from_slice(&Device::Cpu, &[1, 3000], &logits).unwrap();
    for top_p in [0.001, 0.02, 0.3, 0.9, 0.99999] {
        let mut order: Vec<usize> = (0..3000).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let total: f64 = logits.iter().map(|x| f64::from(x.exp())).sum();
        let mut mass = 0.0;
        let last = order.iter().position(|&i| {
            mass += f64::from(logits[i].exp());
            mass >= top_p * total
        });
        // A draw at the end of the range gives the remaining token with the largest id.
        let expected = order[..=last.unwrap()].iter().max().unwrap();
        let draw = Draw { top_p, uniform: u64::MAX, ..at(1.0) };
        assert_eq!(sampled(&x, &[draw]).unwrap()[0].to_vec::<i32>().unwrap(), [*expected as i32], "{top_p}");
    }
}
