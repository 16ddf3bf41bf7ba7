use super::{normal, normal_from};
use crate::Device;
use crate::testing::{Tolerance, assert_close, gpu, values};

#[test]
fn normal_agrees_across_devices() {
    let Some(gpu) = gpu() else { return };
    for (n, seed) in [(1, 0), (1000, 7), (1 << 20, u64::MAX)] {
        let [a, b] = [Device::Cpu, gpu.clone()].map(|d| normal(&d, &[n], 0.02, seed).unwrap());
        assert_close("normal", &a, &b, Tolerance::Exact);
        let rest = normal_from(&gpu, &[n - n / 3], 0.02, seed, n / 3).unwrap();
        assert_close("its rest", &a.rows(n / 3, n).unwrap(), &rest, Tolerance::Exact);
    }
}

#[test]
fn moments_and_tails_are_normal() {
    let n = 1 << 20;
    let x = values(&normal(&Device::Cpu, &[n], 1.0, 42).unwrap());
    let moment = |p: i32| x.iter().map(|x| x.powi(p)).sum::<f64>() / n as f64;
    // The tolerance is four standard errors of each moment.
    for (p, expected, error) in [(1, 0.0, 0.004), (2, 1.0, 0.006), (3, 0.0, 0.016), (4, 3.0, 0.04)] {
        assert!((moment(p) - expected).abs() < error, "moment {p} is {}", moment(p));
    }
    for (sigma, share) in [(1.0, 0.317_31), (2.0, 0.045_50), (3.0, 0.002_70), (4.0, 6.33e-5)] {
        let found = x.iter().filter(|x| x.abs() > sigma).count() as f64 / n as f64;
        let error = 4.0 * (share / n as f64).sqrt();
        assert!((found - share).abs() < error, "{found} beyond {sigma} sigma, {share} expected");
    }
}

#[test]
fn parts_are_those_of_the_whole() {
    let whole = values(&normal(&Device::Cpu, &[7, 11], 0.5, 3).unwrap());
    for (start, end) in [(0, 77), (0, 1), (13, 70), (76, 77), (5, 5)] {
        let part = normal_from(&Device::Cpu, &[end - start], 0.5, 3, start).unwrap();
        assert_eq!(values(&part), whole[start..end], "{start}..{end}");
    }
}

#[test]
fn seeds_give_different_and_repeatable_numbers() {
    let draw = |seed| values(&normal(&Device::Cpu, &[64], 1.0, seed).unwrap());
    assert_eq!(draw(1), draw(1));
    assert!(draw(1).iter().zip(draw(2)).all(|(a, b)| *a != b));
}
