//! Fast paths of the GPU that must give the bits of the CPU: division and square root without rare cases, the amax with a bound that skips
//! most weights, and codes by multiplication with a reciprocal.

use super::*;

/// Returns seeded values with normally distributed exponents, scaled by `range`. Some values, and some whole rows, are zeros.
fn magnitudes(name: &str, n: usize, range: f32) -> Tensor {
    let x = ["mantissa", "exponent"].map(|part| normals(&format!("{name} {part}"), &[n], DType::F32));
    let x = x.map(|x| x.to_vec::<f32>().unwrap());
    let mut x: Vec<f32> = x[0].iter().zip(&x[1]).map(|(x, e)| x * (e * range).exp2()).collect();
    let zero = |i: usize| i % 61 == name.len() || (name != "weights" && (i / 8).is_multiple_of(7));
    x.iter_mut().enumerate().filter(|(i, _)| zero(*i)).for_each(|(_, x)| *x = 0.0);
    Tensor::from_slice(&Device::Cpu, &[n], &x).unwrap()
}

/// Replaces NaN by 0, because the bits of NaN differ between devices.
fn without_nan(x: &Tensor) -> Tensor {
    let values: Vec<f32> = values(x).iter().map(|x| if x.is_nan() { 0.0 } else { *x as f32 }).collect();
    Tensor::from_slice(x.device(), x.shape(), &values).unwrap()
}

/// Tests F32 master weights, and scaled F16 master weights, whose scale depends on the new amax.
#[test]
fn fast_division_matches_the_cpu_for_every_magnitude() {
    for range in [0.0, 4.0, 20.0, 60.0] {
        let number = |x: f32| Tensor::from_slice(&Device::Cpu, &[1], &[x]).unwrap();
        let [w, m, root, g] = [("weights", range / 4.0), ("m", range), ("root", range), ("grad", range)]
            .map(|(name, range)| magnitudes(name, 1 << 19, range));
        let inputs = [w, m, squares(&root), g];
        let inputs: Vec<_> = inputs.into_iter().chain([number(0.3)]).collect();
        for (beta2, epsilon) in [(0.95, 1e-8), (0.999, 0.0), (0.5, 3.0), (1.0 - 1e-14, 1e-8)] {
            for weights in [Weights::Master(None), Weights::ScaledMade(DType::BF16)] {
                parity(&inputs, Tolerance::Exact, |x| {
                    let mut case = Case::of(&x[0], &x[3], Stored { weights, ..PLAIN });
                    case.moments = Moments::Plain { m: x[1].duplicate()?, v: x[2].duplicate()? };
                    plain_update(&mut [case.parameter(0, None)], &x[4], &AdamW { beta2, epsilon, step: 3, ..HOW });
                    let weights = [case.master, case.scaled.values, case.scaled.scale_inv];
                    Ok(weights.iter().chain(&moment_tensors(&case.moments)).map(without_nan).collect())
                });
            }
        }
    }
}

/// Tests groups with ranges from nearly equal values to the whole range of F32, around all magnitudes.
#[test]
fn fast_expansion_matches_the_cpu_for_every_range() {
    let (rows, columns) = (512, 640);
    for range in [0.01, 0.3, 1.0, 3.0, 10.0, 25.0, 60.0, 200.0] {
        let parts = ["place", "middle", "sign"].map(|name| values(&normals(name, &[rows, columns], DType::F32)));
        let value = |i: usize| {
            // The values are spread nearly evenly within the range.
            let place = (parts[0][i] * 3.0).sin() / 2.0;
            let middle = parts[1][i / 128 * 128] * (60.0 - range / 4.0);
            if i % 97 == 5 { 0.0 } else { ((middle + place * range).exp2() * parts[2][i].signum()) as f32 }
        };
        let x: Vec<f32> = (0..rows * columns).map(value).collect();
        let [g, w] =
            [&x, &vec![1.0; rows * columns]].map(|x| Tensor::from_slice(&Device::Cpu, &[rows, columns], x).unwrap());
        let norm = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
        let stored = Stored { weights: Weights::Master(None), states: States::Expanded, grad: DType::F32 };
        // Squares of values far from 1 underflow or overflow, so only first moments test such values.
        parity(&[w, g, norm], Tolerance::Exact, |x| {
            let written = steps(x, 2, stored);
            Ok(written.iter().map(|x| if x.dtype() == DType::F32 { without_nan(x) } else { x.clone() }).collect())
        });
    }
}
