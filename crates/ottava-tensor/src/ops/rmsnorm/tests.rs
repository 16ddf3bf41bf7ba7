use super::{NormBackward, NormKind, NormWeights, cuda, norm_backward, norm_to, rmsnorm, rmsnorm_to};
use crate::ops::destination::tests::{all, destinations, destinations_on, hostile};
use crate::ops::quantize::prepare;
use crate::ops::{CastScale, CastStatistics, CodeCopies, Fp8Output, Output, add, amax, cast};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use crate::{DType, Device, Tensor};

fn plus_one(weight: &Tensor) -> NormWeights<'_> {
    NormWeights { kind: NormKind::RmsPlusOne, weight, bias: None }
}

#[test]
fn rmsnorm_agrees_across_devices() {
    let kinds: [fn(&Tensor) -> NormWeights; 2] = [|weight| NormWeights::rms(weight), plus_one];
    for (t, c) in [(1, 1), (3, 7), (5, 257), (129, 1000), (300, 72)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("x", &[t, c], dtype),
                normals("w", &[c], dtype),
                normals("dy", &[t, c], dtype),
                normals("s", &[c], DType::F32),
            ];
            // Sums over a row or column in another order can change a rounding by one step.
            let steps = if dtype == DType::F32 { 32.0 } else { 1.0 };
            for weights in kinds {
                parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                    let (y, rstd) = norm_to(&x[0], weights(&x[1]), 1e-6, Output::Plain)?;
                    let mut dweight = x[3].duplicate()?;
                    let options = NormBackward::default();
                    let dx = norm_backward(&x[2], &x[0], weights(&x[1]), &rstd, &mut dweight, options)?;
                    Ok(vec![y.plain().unwrap(), rstd, dx, dweight])
                });
            }
        }
    }
}

#[test]
fn rmsnorm_by_one_plus_its_weight_writes_to_every_destination() {
    for (t, c) in [(1, 1), (17, 48), (130, 301), (33, 1032), (18, 8200), (4400, 896), (2130, 3584)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [hostile("x", &[t, c], dtype), normals("w", &[c], dtype)];
            destinations(&inputs, |x, output| Ok(norm_to(&x[0], plus_one(&x[1]), 1e-5, output)?.0));
        }
    }
}

/// Uses F64, in which `1 + weight` is exact for these weights.
#[test]
fn one_plus_a_weight_is_rmsnorm_by_the_sum() {
    let (x, dy) = (normals("x", &[4, 50], DType::F64), normals("dy", &[4, 50], DType::F64));
    let weights = |plus: f64| -> Tensor {
        let values: Vec<f64> = (0..50).map(|i| f64::from(i) / 8.0 - 3.0 + plus).collect();
        Tensor::from_slice(&Device::Cpu, &[50], &values).unwrap()
    };
    let (own, sum) = (weights(0.0), weights(1.0));
    let [a, b] = [plus_one(&own), NormWeights::rms(&sum)].map(|weights| {
        let (y, rstd) = norm_to(&x, weights, 1e-5, Output::Plain).unwrap();
        let mut dweight = Tensor::zeros(&Device::Cpu, &[50], DType::F64).unwrap();
        let dx = norm_backward(&dy, &x, weights, &rstd, &mut dweight, NormBackward::default()).unwrap();
        [y.plain().unwrap(), dx, dweight].map(|x| values(&x))
    });
    assert_eq!(a, b);
}

#[test]
fn rows_have_unit_mean_square() {
    let (x, mut ones) = (normals("x", &[4, 50], DType::F64), normals("w", &[50], DType::F64));
    ones.write_bytes(bytemuck::cast_slice(&[1f64; 50])).unwrap();
    let (y, _) = rmsnorm(&x, &ones, 0.0).unwrap();
    for row in values(&y).chunks(50) {
        let mean_square = row.iter().map(|v| v * v).sum::<f64>() / 50.0;
        // The mean of 50 squares in F64, with one root and one product for each, differs by some units of 2⁻⁵³.
        assert!((mean_square - 1.0).abs() < 1e-12, "{mean_square}");
    }
}

#[test]
fn rmsnorm_writes_to_every_destination() {
    for (t, c) in [(1, 1), (3, 7), (17, 48), (129, 144), (130, 301), (257, 264), (33, 1032), (31, 5000), (18, 8200)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[t, c], dtype), normals("w", &[c], dtype)];
            destinations(&inputs, |x, output| Ok(rmsnorm_to(&x[0], &x[1], 1e-5, output)?.0));
        }
    }
}

#[test]
fn strips_match_tiles_for_many_rows() {
    let Some(gpu) = gpu() else { return };
    // All numbers of groups, partial strips, and rows too long for shared memory.
    for (t, c) in [
        (2117, 16),
        (2300, 144),
        (4400, 896),
        (2200, 1040),
        (2240, 1536),
        (2130, 3584),
        (4300, 4096),
        (2177, 7168),
        (2113, 7184),
    ] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("a", &[t, c], dtype), normals("w", &[c], dtype)];
            let (_, rstd) =
                rmsnorm(&inputs[0].to_device(&gpu).unwrap(), &inputs[1].to_device(&gpu).unwrap(), 1e-5).unwrap();
            destinations_on(&gpu, &inputs, |x, output| {
                let (y, again) = rmsnorm_to(&x[0], &x[1], 1e-5, output)?;
                assert_close("rstd", &rstd, &again, Tolerance::Exact);
                Ok(y)
            });
        }
    }
}

/// A small case for race checkers, which would take minutes for the shapes above.
#[test]
fn strips_match_tiles_for_few_rows() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(cuda) = &device else { unreachable!("`gpu` returns one") };
    let scale = Tensor::from_slice(&device, &[1], &[3.7f32]).unwrap();
    for (t, c) in [(1, 16), (33, 144), (70, 1040), (65, 4112)] {
        for (dtype, copies) in
            [(DType::F32, CodeCopies::Both), (DType::BF16, CodeCopies::Both), (DType::BF16, CodeCopies::Rows)]
        {
            let [x, weight] =
                [hostile("x", &[t, c], dtype), normals("w", &[c], dtype)].map(|x| x.to_device(&device).unwrap());
            let [mut expected, mut seen] = [(); 2].map(|()| CastStatistics::new(&device, 1).unwrap());
            let (format, scale) = (DType::E4M3, CastScale::Given(&scale));
            let by_tiles = Fp8Output { format, scale, copies, statistics: &mut expected, slot: 0 };
            let (tiles, rstd) = rmsnorm_to(&x, &weight, 1e-5, Output::Fp8(by_tiles)).unwrap();
            let mut to = Fp8Output { format, scale, copies, statistics: &mut seen, slot: 0 };
            let (mut strips, mut again) = (prepare(&to, &device, t, c).unwrap(), rstd.empty_like().unwrap());
            let weights = NormWeights::rms(&weight);
            cuda::rmsnorm_strips(cuda, &x, weights, 1e-5, &mut again, &mut strips, &mut to).unwrap();
            let expected = all(&tiles.fp8().unwrap(), &expected);
            for (i, (expected, got)) in expected.iter().zip(all(&strips, &seen)).enumerate() {
                assert_close(&format!("[{t}, {c}] {dtype} {copies:?}, part {i}"), expected, &got, Tolerance::Exact);
            }
            assert_close("rstd", &rstd, &again, Tolerance::Exact);
        }
    }
}

#[test]
fn fused_residuals_match_add() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for (t, c) in [(1, 1), (3, 7), (270, 48), (129, 301), (5, 4104), (1100, 1032)] {
            for dtype in [DType::F32, DType::BF16] {
                let [a, b, dy] = ["a", "b", "dy"].map(|name| normals(name, &[t, c], dtype).to_device(&device).unwrap());
                let weight = normals("w", &[c], dtype).to_device(&device).unwrap();
                let (_, rstd) = rmsnorm(&b, &weight, 1e-5).unwrap();
                let mut dweights = [(); 2].map(|_| normals("dw", &[c], DType::F32).to_device(&device).unwrap());
                let mut amaxes = [(); 2].map(|()| Tensor::zeros(&device, &[1], DType::F32).unwrap());
                let [(dx, first), (both, second)] = [None, Some(&a)].map(|dresidual| {
                    let place = usize::from(dresidual.is_some());
                    let options = NormBackward { dresidual, amax: Some(&mut amaxes[place]), dbias: None };
                    let dx = norm_backward(&dy, &b, NormWeights::rms(&weight), &rstd, &mut dweights[place], options)
                        .unwrap();
                    let expected = amax(&dx).unwrap();
                    (dx, expected)
                });
                assert_close("amax of dx", &first, &amaxes[0], Tolerance::Exact);
                assert_close("amax of the sum", &second, &amaxes[1], Tolerance::Exact);
                assert_close("dx", &add(&a, &dx).unwrap(), &both, Tolerance::Exact);
                assert_close("dweight", &dweights[0], &dweights[1], Tolerance::Exact);
            }
        }
    }
}

fn layer<'a>(weight: &'a Tensor, bias: Option<&'a Tensor>) -> NormWeights<'a> {
    NormWeights { kind: NormKind::Layer, weight, bias }
}

#[test]
fn layernorm_agrees_across_devices() {
    for (t, c) in [(1, 1), (3, 7), (5, 257), (129, 1000), (300, 72), (70, 8200)] {
        for (dtype, with_bias) in [(DType::F32, true), (DType::BF16, true), (DType::BF16, false)] {
            let inputs = [
                normals("x", &[t, c], dtype),
                normals("w", &[c], dtype),
                normals("b", &[c], dtype),
                normals("dy", &[t, c], dtype),
                normals("s", &[c], DType::F32),
            ];
            // Sums over a row or column in another order can change a rounding by one step. A difference from the mean amplifies the change.
            let steps = if dtype == DType::F32 { 64.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let weights = layer(&x[1], with_bias.then_some(&x[2]));
                let (y, statistics) = norm_to(&x[0], weights, 1e-5, Output::Plain)?;
                let (mut dweight, mut dbias) = (x[4].duplicate()?, x[4].duplicate()?);
                let options = NormBackward { dbias: with_bias.then_some(&mut dbias), ..NormBackward::default() };
                let dx = norm_backward(&x[3], &x[0], weights, &statistics, &mut dweight, options)?;
                Ok(vec![y.plain().unwrap(), statistics, dx, dweight, dbias])
            });
        }
    }
}

#[test]
fn layernorm_writes_to_every_destination() {
    for (t, c) in [(1, 1), (3, 7), (17, 48), (130, 301), (257, 264), (33, 1032), (18, 8200)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[t, c], dtype), normals("w", &[c], dtype), normals("b", &[c], dtype)];
            destinations(&inputs, |x, output| Ok(norm_to(&x[0], layer(&x[1], Some(&x[2])), 1e-5, output)?.0));
            destinations(&inputs[..2], |x, output| Ok(norm_to(&x[0], layer(&x[1], None), 1e-5, output)?.0));
        }
    }
}

#[test]
fn strips_of_a_layernorm_match_tiles() {
    let Some(gpu) = gpu() else { return };
    // All numbers of groups, the longest rows that fit in shared memory, and longer rows.
    for (t, c) in [(2117, 16), (4400, 896), (2200, 1040), (2130, 3584), (2150, 4096), (2115, 5120), (2177, 5136)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("a", &[t, c], dtype), normals("w", &[c], dtype), normals("b", &[c], dtype)];
            let [x, weight, bias] = inputs.each_ref().map(|x| x.to_device(&gpu).unwrap());
            let (_, statistics) = norm_to(&x, layer(&weight, Some(&bias)), 1e-5, Output::Plain).unwrap();
            destinations_on(&gpu, &inputs, |x, output| {
                let (y, again) = norm_to(&x[0], layer(&x[1], Some(&x[2])), 1e-5, output)?;
                assert_close("statistics", &statistics, &again, Tolerance::Exact);
                Ok(y)
            });
        }
    }
}

/// The mean of equal values is not rounded. Neither the product with 1/C (896 and 3584 are examples of C) nor merging the means of each 256 channels
/// rounds it.
#[test]
fn layernorm_of_equal_values_is_its_bias() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for (t, c) in [(2, 8), (3, 768), (5, 896), (1, 3584)] {
            for dtype in [DType::F32, DType::BF16] {
                let x = cast(&Tensor::from_slice(&device, &[t, c], &vec![3f32; t * c]).unwrap(), dtype).unwrap();
                let [weight, bias] = ["w", "b"].map(|name| normals(name, &[c], dtype).to_device(&device).unwrap());
                let (y, _) = norm_to(&x, layer(&weight, Some(&bias)), 1e-5, Output::Plain).unwrap();
                let expected = values(&bias).repeat(t);
                assert!(values(&y.plain().unwrap()) == expected, "[{t}, {c}] {dtype}");
            }
        }
    }
}

/// Compares with `torch.nn.functional.layer_norm` of PyTorch 2.15 in F64.
#[test]
fn layernorm_is_that_of_pytorch() {
    let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    let x = Tensor::from_slice(&Device::Cpu, &[1, 4], &[1.0, -2.0, 4.0, 0.5]).unwrap();
    let (weight, bias) = (tensor(&[2.0, 1.0, -1.0, 0.5]), tensor(&[0.1, 0.2, 0.3, 0.4]));
    let (y, statistics) = norm_to(&x, layer(&weight, Some(&bias)), 0.25, Output::Plain).unwrap();
    let dy = Tensor::from_slice(&Device::Cpu, &[1, 4], &[0.3, -1.0, 2.0, 0.7]).unwrap();
    let (mut dweight, mut dbias) = (tensor(&[0.0; 4]), tensor(&[0.0; 4]));
    let options = NormBackward { dbias: Some(&mut dbias), ..NormBackward::default() };
    let dx = norm_backward(&dy, &x, layer(&weight, Some(&bias)), &statistics, &mut dweight, options).unwrap();
    let expected = [
        (y.plain().unwrap(), [0.21414602910707004, -1.1126793347313042, -1.1268253638383738, 0.3143904781696976]),
        (dx, [0.518156046135546, -0.45732773876773947, -0.42401345795994305, 0.3631851505921364]),
        (dweight, [0.01712190436606051, 1.312679334731304, 2.853650727676748, -0.11985333056242335]),
        (dbias, [0.3, -1.0, 2.0, 0.7]),
    ];
    for (i, (seen, expected)) in expected.iter().enumerate() {
        // PyTorch may sum the statistics of four channels in F64 in another order; up to 5e-16 was seen.
        let close = values(seen).iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(close, "result {i}: {:?}, PyTorch has {expected:?}", values(seen));
    }
}

#[test]
fn an_rmsnorm_with_a_bias_is_an_error() {
    let (x, weight) = (normals("x", &[2, 3], DType::F32), normals("w", &[3], DType::F32));
    let weights = NormWeights { kind: NormKind::Rms, weight: &weight, bias: Some(&weight) };
    assert!(norm_to(&x, weights, 1e-5, Output::Plain).unwrap_err().to_string().contains("no bias"));
}
