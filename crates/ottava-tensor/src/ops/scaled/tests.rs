use super::*;
use crate::ops::cast;
use crate::testing::{Tolerance, normals, parity, parity_of_values, values};

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap()
}

#[test]
fn scaled_agrees_across_devices() {
    for n in [1, 7, 8, 300, 70_003] {
        for from in [DType::F32, DType::BF16] {
            for dtype in [DType::F16, DType::E4M3] {
                for to in [DType::F32, DType::BF16, DType::F16] {
                    parity(&[normals("x", &[n], from)], Tolerance::Exact, |x| {
                        let stored = scaled(&x[0], dtype)?;
                        Ok(vec![unscaled(&stored, to)?, stored.values, stored.scale_inv])
                    });
                }
            }
        }
    }
}

/// Tests FP8-LM's rule: `2^⌊log2(largest finite / amax)⌋`.
#[test]
fn scales_are_the_largest_powers_of_two_without_overflow() {
    for (largest, inverse) in [(448.0, 1.0), (448.1, 2.0), (1.0, 2f32.powi(-8)), (0.0, 1.0), (1e-45, 2f32.powi(-126))] {
        let stored = scaled(&tensor(&[-largest, 0.0]), DType::E4M3).unwrap();
        assert_eq!(values(&stored.scale_inv), [f64::from(inverse)], "amax {largest}");
    }
    let stored = scaled(&tensor(&[3.0]), DType::F16).unwrap();
    assert_eq!((values(&stored.values)[0], values(&stored.scale_inv)[0]), (49_152.0, 2f64.powi(-14)));
}

/// Non-finite gradients must decode to NaN.
#[test]
fn non_finite_values_decode_to_nan() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for dtype in [DType::F16, DType::E4M3] {
            parity_of_values(&[tensor(&[1.0, bad, 0.0])], Tolerance::Exact, |x| {
                let back = values(&unscaled(&scaled(&x[0], dtype)?, DType::F32)?);
                assert!(back[1].is_nan(), "{bad} in {dtype} came back as {back:?}");
                Ok(vec![])
            });
        }
    }
}

#[test]
fn split_halves_restore_the_bits() {
    let bits = [0x3F80_0000, 0x3F80_7FFF, 0x3F80_8000, 0x3F81_8000, 0xBF80_8001, 0, 0x8000_0001, 0x7F7F_7FFF]
        .map(f32::from_bits);
    for x in [tensor(&bits), normals("x", &[1000], DType::F32)] {
        parity(&[x], Tolerance::Exact, |x| {
            let (upper, rest) = split(&x[0])?;
            let uppers = cast(&upper, DType::F32)?.to_vec::<f32>()?;
            for ((x, upper), rest) in x[0].to_vec::<f32>()?.iter().zip(uppers).zip(rest.to_vec::<i16>()?) {
                assert_eq!(upper.to_bits().wrapping_add_signed(rest.into()), x.to_bits());
                assert!((upper - x).abs() <= x.abs() / 256.0 + f32::from_bits(0x8000));
            }
            Ok(vec![upper, rest])
        });
    }
}

/// Tests every granularity and shape.
#[test]
fn cast_scaled_matches_unscale_then_cast() {
    use crate::granularity::Granularity::{Blocks1x128, Blocks128x128, PerRow};
    use crate::ops::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output};
    for device in std::iter::once(Device::Cpu).chain(crate::testing::gpu()) {
        let given = Tensor::from_slice(&device, &[1], &[37f32]).unwrap();
        let own = |granularity| CastScale::Own(granularity, CurrentScaling::default());
        for scale in [CastScale::Given(&given), own(PerRow), own(Blocks1x128), own(Blocks128x128)] {
            for [rows, columns] in [[1, 1], [5, 300], [130, 257], [128, 256]] {
                let x = normals("x", &[rows, columns], DType::F32).to_device(&device).unwrap();
                let x = scaled(&x, DType::F16).unwrap();
                for dtype in [DType::BF16, DType::F32] {
                    let mut seen = [(); 2].map(|()| CastStatistics::new(&device, 1).unwrap());
                    let [one, other] = &mut seen;
                    let to = |statistics| Fp8Output {
                        format: DType::E4M3,
                        scale,
                        copies: CodeCopies::Both,
                        statistics,
                        slot: 0,
                    };
                    let expected = to(one).cast(&unscaled(&x, dtype).unwrap()).unwrap();
                    let got = to(other).cast_scaled(&x, dtype).unwrap();
                    let tensors = |q: &crate::QuantizedTensor, s: &CastStatistics| {
                        let codes = [q.codes.clone(), q.transposed.clone(), q.transposed_scale_inv.as_deref().cloned()];
                        let measured = [&s.amax, &s.saturated, &s.underflowed, &s.elements].map(Tensor::clone);
                        codes.into_iter().flatten().chain([q.scale_inv.clone()]).chain(measured).collect::<Vec<_>>()
                    };
                    for (expected, got) in tensors(&expected, one).iter().zip(&tensors(&got, other)) {
                        let what = format!("{scale:?} of [{rows}, {columns}] in {dtype} on {device}");
                        crate::testing::assert_close(&what, expected, got, Tolerance::Exact);
                    }
                }
            }
        }
    }
}
