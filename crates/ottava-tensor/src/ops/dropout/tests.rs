use super::{DrawnColumns, TokenDraws, add_noise, dropout};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

const COLUMNS: DrawnColumns = DrawnColumns { key: 7, first: 0 };

/// Returns the draws of `numbers` on `device`, with a seed that needs all 64 bits.
fn draws(device: &Device, numbers: &[i32]) -> TokenDraws {
    let mut draws = TokenDraws::new(device, numbers).unwrap();
    draws.set_seed(0xFEDC_BA98_7654_3210).unwrap();
    draws
}

fn numbers(tokens: usize) -> Vec<i32> {
    (0..tokens as i32).map(|token| 3 * token - 1).collect()
}

/// Returns which elements of ones `[tokens, columns]` dropout keeps.
fn kept(tokens: usize, columns: usize, p: f64, draws: &TokenDraws, of: DrawnColumns) -> Vec<bool> {
    let ones = Tensor::from_slice(&Device::Cpu, &[tokens, columns], &vec![1f32; tokens * columns]).unwrap();
    values(&dropout(&ones, p, draws, of).unwrap()).iter().map(|x| *x != 0.0).collect()
}

#[test]
fn dropout_agrees_across_devices() {
    for (t, c, first) in [(1, 1, 0), (3, 7, 5), (5, 257, 0), (9, 520, 64), (4, 64, 3)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Each value is rounded once.
            parity(&[normals("x", &[t, c], dtype)], Tolerance::Exact, |x| {
                let (draws, columns) = (draws(x[0].device(), &numbers(t)), DrawnColumns { key: 9, first });
                Ok(vec![dropout(&x[0], 0.3, &draws, columns)?, add_noise(&x[0], 0.25, &draws, columns)?])
            });
        }
    }
}

#[test]
fn dropout_keeps_its_share_and_scales_it() {
    let (tokens, columns, draws) = (64, 512, draws(&Device::Cpu, &numbers(64)));
    for p in [0.05, 0.5, 0.9] {
        let x = normals("x", &[tokens, columns], DType::F64);
        let y = values(&dropout(&x, p, &draws, COLUMNS).unwrap());
        for (x, y) in values(&x).iter().zip(&y) {
            assert!(*y == 0.0 || *y == x * (1.0 / (1.0 - p)), "{x} becomes {y}");
        }
        let count = y.iter().filter(|y| **y == 0.0).count() as f64;
        let (mean, deviation) = (p * y.len() as f64, (p * (1.0 - p) * y.len() as f64).sqrt());
        assert!((count - mean).abs() < 4.0 * deviation, "{count} of {} are dropped at {p}", y.len());
    }
    let x = normals("x", &[tokens, columns], DType::BF16);
    assert_eq!(values(&dropout(&x, 0.0, &draws, COLUMNS).unwrap()), values(&x));
}

#[test]
fn tokens_columns_layers_and_steps_have_their_own_numbers() {
    let all = draws(&Device::Cpu, &numbers(8));
    let whole = kept(8, 64, 0.5, &all, COLUMNS);
    // A part of the tokens or of the columns has the numbers of the whole.
    let some = kept(3, 64, 0.5, &all.of_tokens(4..7).unwrap(), COLUMNS);
    assert_eq!(some, whole[4 * 64..7 * 64]);
    for first in [16, 33] {
        let right = kept(8, 64 - first, 0.5, &all, DrawnColumns { first, ..COLUMNS });
        let expected: Vec<bool> = whole.chunks(64).flat_map(|row| row[first..].to_vec()).collect();
        assert_eq!(right, expected, "from column {first}");
    }
    // About half of the elements are equal in two independent masks.
    let differ = |other: &[bool]| {
        let equal = whole.iter().zip(other).filter(|(a, b)| a == b).count();
        assert!((150..=362).contains(&equal), "{equal} of 512 elements are equal");
    };
    differ(&kept(8, 64, 0.5, &all, DrawnColumns { key: 8, first: 0 }));
    differ(&kept(8, 64, 0.5, &draws(&Device::Cpu, &[100, 101, 102, 103, 104, 105, 106, 107]), COLUMNS));
    differ(&[&whole[64..], &whole[..64]].concat());
    differ(&whole.iter().skip(1).chain(&whole[..1]).copied().collect::<Vec<_>>());
    let mut next = all.clone();
    next.seed = Tensor::zeros(&Device::Cpu, &[2], DType::I32).unwrap();
    next.set_seed(0xFEDC_BA98_7654_3211).unwrap();
    differ(&kept(8, 64, 0.5, &next, COLUMNS));
    next.set_seed(0xFEDC_BA99_7654_3210).unwrap();
    differ(&kept(8, 64, 0.5, &next, COLUMNS));
}

#[test]
fn noise_is_uniform() {
    let (tokens, columns, draws) = (64, 512, draws(&Device::Cpu, &numbers(64)));
    let zeros = Tensor::zeros(&Device::Cpu, &[tokens, columns], DType::F64).unwrap();
    let noise = values(&add_noise(&zeros, 2.0, &draws, COLUMNS).unwrap());
    let count = noise.len() as f64;
    assert!(noise.iter().all(|x| x.abs() < 2.0));
    let mean = noise.iter().sum::<f64>() / count;
    let square = noise.iter().map(|x| x * x).sum::<f64>() / count;
    assert!(mean.abs() < 4.0 * (4.0 / 3.0 / count).sqrt(), "the mean is {mean}");
    assert!((square - 4.0 / 3.0).abs() < 0.03, "the mean square is {square}");
}

#[test]
fn probabilities_of_one_and_other_numbers_of_tokens_are_errors() {
    let (x, draws) = (normals("x", &[2, 3], DType::BF16), draws(&Device::Cpu, &numbers(2)));
    for p in [1.0, -0.1, f64::NAN] {
        assert!(dropout(&x, p, &draws, COLUMNS).unwrap_err().to_string().contains("dropout: the probability"));
    }
    let x = normals("x", &[3, 3], DType::BF16);
    assert!(dropout(&x, 0.5, &draws, COLUMNS).unwrap_err().to_string().contains("dropout: x"));
    assert!(add_noise(&x, 0.5, &draws, COLUMNS).unwrap_err().to_string().contains("add_noise: x"));
}
