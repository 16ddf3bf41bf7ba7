//! Compares ten steps of a toy network at each optimizer level with an independent implementation of the formulas. It rounds by search in F64,
//! computes in F32 and finds scales by logarithms.

use super::*;
use crate::MemoryKind;
use crate::ops::WeightCopy;
use crate::ops::{global_norm, scaled, unscaled};
use crate::testing::{gpu, normals, values};

const ROWS: usize = 3;
const COLUMNS: usize = 300;
const N: usize = ROWS * COLUMNS;

const HOW: AdamW =
    AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1, max_norm: 1.0, gradient_scale: 1.0 };

/// A binary format: the bits of the fraction, the exponent of the smallest normal value, and the largest finite value.
#[derive(Clone, Copy)]
struct Format {
    fraction: i32,
    smallest: i32,
    largest: f64,
}

const E4M3: Format = Format { fraction: 3, smallest: -6, largest: 448.0 };
const F16: Format = Format { fraction: 10, smallest: -14, largest: 65_504.0 };
const BF16: Format = Format { fraction: 7, smallest: -126, largest: 3.389_531_389_251_535_5e38 };

impl Format {
    fn round(self, x: f64) -> f64 {
        let exponent = if x == 0.0 { self.smallest } else { (x.abs().log2().floor() as i32).max(self.smallest) };
        let unit = 2f64.powi(exponent - self.fraction);
        ((x / unit).round_ties_even() * unit).clamp(-self.largest, self.largest)
    }

    /// Returns the values rounded with FP8-LM's scale, and the scale.
    fn store(self, x: &[f32]) -> (Vec<f32>, f64) {
        let amax = x.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        let power = if amax == 0.0 { 1.0 } else { (self.largest / amax).log2().floor().exp2() };
        (x.iter().map(|x| (self.round(f64::from(*x) * power) / power) as f32).collect(), power)
    }
}

/// The state of the reference, with decoded values.
struct Reference {
    master: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl Reference {
    /// Does one update with the gradient `g`. Each operation is rounded to F32; the results are not yet rounded to their storage formats.
    fn update(&mut self, g: &[f32], norm: f32, how: &AdamW) {
        let f = |x: f64| x as f32;
        let correction = |beta: f64| 1.0 - beta.powi(how.step as i32);
        let clip = (f(how.max_norm) / (norm + 1e-6)).min(1.0);
        for (i, g) in g.iter().enumerate() {
            let g = g * clip;
            let m = self.m[i] + (g - self.m[i]) * f(1.0 - how.beta1);
            let v = self.v[i] * f(how.beta2) + g * g * f(1.0 - how.beta2);
            let root = v.sqrt() / f(correction(how.beta2).sqrt());
            let step = f(how.learning_rate / correction(how.beta1)) * (m / (root + f(how.epsilon)));
            self.master[i] = self.master[i] * f(1.0 - how.learning_rate * 0.1) - step;
            (self.m[i], self.v[i]) = (m, v);
        }
    }
}

/// Returns the gradient of `Σ c (w - t)² / 2`, with noise that differs between steps.
fn gradient(weights: &[f64], step: u64) -> Vec<f32> {
    let noise = values(&normals(&format!("noise {step}"), &[N], DType::F32));
    let (c, t) = (values(&normals("curvature", &[N], DType::F32)), values(&normals("target", &[N], DType::F32)));
    (0..N).map(|i| (c[i].abs() * (weights[i] - t[i]) + 0.1 * noise[i]) as f32).collect()
}

fn tensor(device: &Device, x: &[f32]) -> Tensor {
    Tensor::from_slice(device, &[ROWS, COLUMNS], x).unwrap()
}

fn f32s(x: &Tensor) -> Vec<f32> {
    values(x).into_iter().map(|x| x as f32).collect()
}

/// Tests master weights in F16 with gradients in E4M3. Moments are F32 (O1), or E4M3 and F16 (O2, and O3, which also keeps codes).
#[test]
fn ms_amp_levels_match_the_formulas_byte_for_byte() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for narrow_moments in [false, true] {
            let start = f32s(&normals("start", &[N], DType::F32));
            let mut master = scaled(&tensor(&device, &start), DType::F16).unwrap();
            let zeros = |dtype| Tensor::zeros(&device, &[ROWS, COLUMNS], dtype).unwrap();
            let stored = |dtype| ScaledTensor::zeros(&device, &[ROWS, COLUMNS], dtype, MemoryKind::Device).unwrap();
            let mut moments = match narrow_moments {
                true => Moments::Scaled { m: stored(DType::E4M3), v: stored(DType::F16) },
                false => Moments::Plain { m: zeros(DType::F32), v: zeros(DType::F32) },
            };
            let mut expected = Reference { master: F16.store(&start).0, m: vec![0.0; N], v: vec![0.0; N] };
            for step in 1..=10 {
                let how = AdamW { step, ..HOW };
                // Layers read BF16 weights.
                let read: Vec<f64> = expected.master.iter().map(|w| BF16.round(f64::from(*w))).collect();
                assert_eq!(values(&unscaled(&master, DType::BF16).unwrap()), read, "step {step} on {device}");
                let g = gradient(&read, step);
                let grad = scaled(&tensor(&device, &g), DType::E4M3).unwrap();
                let (g, power) = E4M3.store(&g);
                assert_stored("gradient", &grad, &g, power);
                let norm = global_norm(&[Gradient::Scaled(&grad)]).unwrap();
                let exact = g.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt() as f32;
                assert!((f32s(&norm)[0] / exact - 1.0).abs() < 1e-6);
                expected.update(&g, f32s(&norm)[0], &how);

                let mut scalars = AdamWScalars::new(&device).unwrap();
                scalars.set(&how).unwrap();
                let weight = UpdatedWeight::Scaled { master: &mut master, copy: WeightCopy::OnDemand(DType::BF16) };
                let (grad, moments_of) = (Gradient::Scaled(&grad), &mut moments);
                let mut amaxes = Tensor::zeros(&device, &[3], DType::F32).unwrap();
                let mut parameters = [AdamWParameter {
                    weight,
                    moments: moments_of,
                    grad,
                    weight_decay: 0.1,
                    seed: 0,
                    offset: 0,
                    amaxes: Some(&mut amaxes),
                    cast: None,
                }];
                let mut unread = CastStatistics::new(&device, 1).unwrap();
                adamw_amaxes(&mut parameters, &norm, &scalars).unwrap();
                adamw(&mut parameters, &mut unread, &norm, &scalars).unwrap();

                let power;
                (expected.master, power) = F16.store(&expected.master);
                assert_stored("master", &master, &expected.master, power);
                match &moments {
                    Moments::Plain { m, v } => assert_eq!([f32s(m), f32s(v)], [&expected.m[..], &expected.v[..]]),
                    Moments::Scaled { m, v } => {
                        let power;
                        (expected.m, power) = E4M3.store(&expected.m);
                        assert_stored("first moment", m, &expected.m, power);
                        let power;
                        (expected.v, power) = F16.store(&expected.v);
                        assert_stored("second moment", v, &expected.v, power);
                    }
                    Moments::Expanded { .. } => unreachable!("not at these levels"),
                }
            }
        }
    }
}

/// Checks the scale and every byte of `stored`.
fn assert_stored(what: &str, stored: &ScaledTensor, expected: &[f32], power: f64) {
    assert_eq!(values(&stored.scale_inv), [1.0 / power], "{what}: scale");
    let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x) * power).collect();
    assert_eq!(values(&stored.values), expected, "{what}");
}

/// Compares expanded moments with formulas in F64. Levels agree to a unit in the last place. Codes are equal unless a value is close to a rounding
/// boundary. Each step starts from the stored state.
#[test]
fn expanded_moments_divide_their_range_evenly() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let start = f32s(&normals("start", &[N], DType::F32));
        let mut weight = tensor(&device, &start);
        let zeros = || ExpandedTensor::zeros(&device, &[ROWS, COLUMNS], MemoryKind::Device).unwrap();
        let mut moments = Moments::Expanded { m: zeros(), v: zeros() };
        let (mut borders, mut all) = (0, 0);
        for step in 1..=10 {
            let how = AdamW { step, max_norm: 0.0, ..HOW };
            let Moments::Expanded { m, v } = &moments else { unreachable!("they are") };
            let (m, v) = (decoded(m), decoded(v));
            let g = gradient(&values(&weight), step);
            let mut expected = Reference { master: f32s(&weight), m, v };
            expected.update(&g, 0.0, &AdamW { max_norm: f64::INFINITY, ..how });
            let mut scalars = AdamWScalars::new(&device).unwrap();
            scalars.set(&how).unwrap();
            let grad = tensor(&device, &g);
            let parameter = AdamWParameter {
                weight: UpdatedWeight::Master { master: &mut weight, copy: WeightCopy::OnDemand(DType::F32) },
                moments: &mut moments,
                grad: Gradient::Plain(&grad),
                weight_decay: 0.1,
                seed: 0,
                offset: 0,
                amaxes: None,
                cast: None,
            };
            let norm = Tensor::from_slice(&device, &[1], &[1f32]).unwrap();
            adamw(&mut [parameter], &mut CastStatistics::new(&device, 1).unwrap(), &norm, &scalars).unwrap();
            for (got, expected) in values(&weight).iter().zip(&expected.master) {
                assert!((got - f64::from(*expected)).abs() < 1e-5, "step {step}: {got} for {expected}");
            }
            let Moments::Expanded { m, v } = &moments else { unreachable!("they are") };
            for (got, expected) in [(m, &expected.m), (v, &expected.v)] {
                let (groups, codes) = (got.groups.to_vec::<i32>().unwrap(), got.codes.to_vec::<u8>().unwrap());
                for (group, (row, start)) in (0..ROWS).flat_map(|r| [(r, 0), (r, 128), (r, 256)]).enumerate() {
                    let range = row * COLUMNS + start..row * COLUMNS + (start + 128).min(COLUMNS);
                    let [smallest, step] = levels(&expected[range.clone()]);
                    let stored = &groups[2 * group..][..2];
                    assert!((f64::from(stored[0]) / ULPS - 127.0 - smallest).abs() < 1e-5, "{stored:?} for {smallest}");
                    assert!((f64::from(stored[1]) / ULPS - step).abs() < 1e-6, "{stored:?} for {step}");
                    for i in range {
                        let x = f64::from(expected[i]);
                        let code = 1.0 + (logarithm(x) - smallest) / step;
                        let [low, high] =
                            [code - 1e-3, code + 1e-3].map(|near| near.round() as u8 | u8::from(x < 0.0) << 7);
                        assert!(codes[i] == low || codes[i] == high, "{x:e}: code {} for {code}", codes[i]);
                        borders += usize::from(low != high);
                        all += 1;
                    }
                }
            }
        }
        assert!(borders * 20 < all, "{borders} of {all} values lie on a border");
    }
}

/// The number of F32 values between two powers of two.
const ULPS: f64 = 8_388_608.0;

/// Returns log2 of `|x|` at powers of two, with linear interpolation between powers.
fn logarithm(x: f64) -> f64 {
    let octave = x.abs().log2().floor();
    octave + x.abs() / octave.exp2() - 1.0
}

/// Returns the logarithm of the smallest nonzero magnitude of a group, and the distance between codes.
fn levels(group: &[f32]) -> [f64; 2] {
    let sizes = group.iter().filter(|x| **x != 0.0).map(|x| logarithm(f64::from(*x)));
    let (largest, smallest) = sizes.fold((f64::MIN, f64::MAX), |(l, s), x| (l.max(x), s.min(x)));
    [smallest, (largest - smallest) / 126.0]
}

/// Decodes the codes by the formula.
fn decoded(x: &ExpandedTensor) -> Vec<f32> {
    let groups = x.groups.to_vec::<i32>().unwrap();
    let value = |(i, code): (usize, u8)| {
        let group = &groups[2 * (i / COLUMNS * 3 + i % COLUMNS / 128)..][..2];
        let place = f64::from(group[0]) + (f64::from(code & 0x7F) - 1.0) * f64::from(group[1]);
        let (octave, part) = ((place / ULPS).floor(), (place / ULPS).fract());
        let size = if code & 0x7F == 0 { 0.0 } else { (octave - 127.0).exp2() * (1.0 + part) };
        (if code >> 7 == 1 { -size } else { size }) as f32
    };
    x.codes.to_vec::<u8>().unwrap().into_iter().enumerate().map(value).collect()
}
