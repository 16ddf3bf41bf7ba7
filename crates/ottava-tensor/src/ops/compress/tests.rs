use super::{CompressedTensor, SavedActivation, compress, decompress};
use crate::ops::Activation::{self, Gelu, SwiGlu};
use crate::ops::destination::tests::{all, hostile};
use crate::ops::{
    CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, NormBackward, NormKind, NormWeights, Output,
    activation_backward, activation_backward_to, activation_compressing, activation_to, cast, norm_backward, norm_to,
    rmsnorm,
};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use crate::{DType, Device, Granularity, Result, Tensor};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn matrix(columns: usize, x: &[f32], dtype: DType) -> Tensor {
    cast(&Tensor::from_slice(&Device::Cpu, &[x.len() / columns, columns], x).unwrap(), dtype).unwrap()
}

/// Returns groups of very different magnitudes: rows of `x` times powers of two, down to subnormals of F32.
fn spread(name: &str, shape: [usize; 2], dtype: DType) -> Tensor {
    let x = values(&normals(name, &shape, DType::F32));
    let exponents = if dtype == DType::F16 { -14..=9 } else { -140..=120 };
    let steps: Vec<i32> = exponents.step_by(7).collect();
    let scaled = x.iter().enumerate().map(|(i, x)| (x * 2f64.powi(steps[i / 5 % steps.len()])) as f32);
    matrix(shape[1], &scaled.collect::<Vec<_>>(), dtype)
}

fn parts(x: CompressedTensor) -> Vec<Tensor> {
    vec![x.codes, x.scale_inv]
}

#[test]
fn compress_agrees_across_devices() {
    for shape in [[1, 1], [3, 7], [2, 16], [5, 33], [129, 64], [64, 1040]] {
        for dtype in DTYPES {
            for x in [normals("x", &shape, dtype), hostile("x", &shape, dtype), spread("x", shape, dtype)] {
                parity(&[x], Tolerance::Exact, |x| compress(&x[0]).map(parts));
            }
            for x in [normals("x", &shape, dtype), spread("x", shape, dtype)] {
                parity(&[x], Tolerance::Exact, |x| Ok(vec![decompress(&compress(&x[0])?)?]));
            }
        }
    }
}

#[test]
fn decompressed_values_are_within_half_a_step() {
    for dtype in DTYPES {
        let x = spread("x", [37, 83], dtype);
        let back = values(&decompress(&compress(&x).unwrap()).unwrap());
        for (row, back) in values(&x).chunks(83).zip(back.chunks(83)) {
            for (group, back) in row.chunks(16).zip(back.chunks(16)) {
                let amax = group.iter().fold(0f64, |amax, x| amax.max(x.abs()));
                // A code has four significant bits, except for subnormal codes and the smallest exponent.
                let finest = (amax * 2f64.powi(-9) / 224.0).max(2f64.powi(-126 - 9)) / 2.0;
                for (x, back) in group.iter().zip(back) {
                    assert!((x - back).abs() <= (x.abs() / 16.0).max(finest), "{x:e} came back as {back:e}");
                }
            }
        }
        let back = decompress(&compress(&x).unwrap()).unwrap();
        assert_close("the same once more", &back, &decompress(&compress(&back).unwrap()).unwrap(), Tolerance::Exact);
    }
}

#[test]
fn scales_bring_the_largest_between_224_and_448() {
    let exponent = |largest: f32| {
        let x = matrix(2, &[largest, 0.0], DType::F32);
        parts(compress(&x).unwrap())[1].read_bytes().unwrap()[0]
    };
    assert_eq!([448.0, 448.1, 449.0, 224.0, 224.1, 896.0].map(exponent), [127, 128, 128, 126, 127, 128]);
    assert_eq!([1.75, 1.0, -1.7501].map(exponent), [119, 119, 120]);
    // Exponents are limited to 2⁻¹²⁶, whose reciprocal is normal. No exponent above 2¹²⁰ is needed.
    assert_eq!([0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE].map(exponent), [1; 4]);
    assert_eq!([f32::MAX, f32::INFINITY, f32::NAN].map(exponent), [247, 255, 255]);
}

#[test]
fn groups_with_non_finite_values_decode_to_nan() {
    for dtype in DTYPES {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = vec![1f32; 40];
            x[17] = bad;
            let back = values(&decompress(&compress(&matrix(40, &x, dtype)).unwrap()).unwrap());
            let nan: Vec<usize> = (0..40).filter(|&i| back[i].is_nan()).collect();
            assert_eq!(nan, (16..32).collect::<Vec<_>>(), "{bad} in {dtype}");
            assert!(back.iter().all(|x| x.is_nan() || *x == 1.0));
        }
    }
}

/// Ops with a compressed input give the bits of the same ops with the decompressed input, on every device and for every shape.
#[test]
fn backward_of_compressed_inputs_matches_decompressed() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for (t, f) in [(1, 1), (3, 7), (17, 48), (33, 24), (130, 256), (257, 528)] {
            for dtype in DTYPES {
                let place = |x: Tensor| x.to_device(&device).unwrap();
                let (x, dy) = (place(normals("x", &[t, 2 * f], dtype)), place(normals("dy", &[t, f], dtype)));
                let compressed = SavedActivation::Compressed(compress(&x).unwrap());
                let exact = SavedActivation::Exact(compressed.value().unwrap());
                for (what, made) in swiglu(&dy, &compressed).into_iter().zip(swiglu(&dy, &exact)).enumerate() {
                    let what = format!("swiglu, [{t}, {f}] {dtype} on {device}, result {what}");
                    assert_close(&what, &made.1, &made.0, Tolerance::Exact);
                }
                let dy = place(normals("dy", &[t, 2 * f], dtype));
                let weight = place(normals("weight", &[2 * f], dtype));
                let (_, rstd) = rmsnorm(&x, &weight, 1e-5).unwrap();
                let both = [&compressed, &exact].map(|x| norm(&dy, x, &weight, &rstd).unwrap());
                for (what, (got, expected)) in both[0].iter().zip(&both[1]).enumerate() {
                    let what = format!("rmsnorm, [{t}, {}] {dtype} on {device}, result {what}", 2 * f);
                    assert_close(&what, expected, got, Tolerance::Exact);
                }
            }
        }
    }
}

/// Returns the gradient for every output, with and without the recomputed activation.
fn swiglu(dy: &Tensor, x: &SavedActivation) -> Vec<Tensor> {
    let device = dy.device();
    let mut amax = Tensor::zeros(device, &[1], DType::F32).unwrap();
    activation_backward_to(SwiGlu, dy, x, Output::Amax { amax: &mut amax }, None).unwrap();
    let mut made = vec![activation_backward(SwiGlu, dy, x).unwrap(), amax];
    let scale = Tensor::from_slice(device, &[1], &[40f32]).unwrap();
    for scale in [
        CastScale::Given(&scale),
        CastScale::Own(Granularity::Blocks1x128, CurrentScaling::default()),
        CastScale::Own(Granularity::PerRow, CurrentScaling::default()),
    ] {
        let mut seen = [(); 3].map(|()| CastStatistics::new(device, 1).unwrap());
        let [seen_alone, seen_fused, activation] = &mut seen;
        let to = |format, copies, statistics| Fp8Output { format, scale, copies, statistics, slot: 0 };
        let output = Output::Fp8(to(DType::E5M2, CodeCopies::Both, seen_alone));
        let (gradient, _) = activation_backward_to(SwiGlu, dy, x, output, None).unwrap();
        let output = Output::Fp8(to(DType::E5M2, CodeCopies::Both, seen_fused));
        let activated = to(DType::E4M3, CodeCopies::Columns, activation);
        let (again, activated) = activation_backward_to(SwiGlu, dy, x, output, Some(activated)).unwrap();
        let codes = [gradient.fp8().unwrap(), again.fp8().unwrap(), activated.unwrap()];
        made.extend(codes.iter().zip(&seen).flat_map(|(codes, seen)| all(codes, seen)));
    }
    made
}

/// Compares LayerNorm and GELU of compressed inputs with LayerNorm and GELU of decompressed inputs.
#[test]
fn layernorm_and_gelu_read_compressed_inputs() {
    let how = Gelu(crate::ops::Gelu::Exact);
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for (t, c) in [(3, 7), (130, 272), (33, 1040)] {
            let [x, dy] = ["x", "dy"].map(|name| normals(name, &[t, c], DType::BF16).to_device(&device).unwrap());
            let weight = normals("w", &[c], DType::BF16).to_device(&device).unwrap();
            let compressed = compress(&x).unwrap();
            let value = decompress(&compressed).unwrap();
            let layer = NormWeights { kind: NormKind::Layer, weight: &weight, bias: Some(&weight) };
            let (_, statistics) = norm_to(&value, layer, 1e-5, Output::Plain).unwrap();
            let [compressed, exact] =
                [SavedActivation::Compressed(compressed), SavedActivation::Exact(value)].map(|x| {
                    let sums = [(); 2].map(|()| Tensor::zeros(&device, &[c], DType::F32).unwrap());
                    let [mut dweight, mut dbias] = sums;
                    let options = NormBackward { dbias: Some(&mut dbias), dresidual: Some(&dy), amax: None };
                    let dx = norm_backward(&dy, &x, layer, &statistics, &mut dweight, options).unwrap();
                    [dx, dweight, dbias, activation_backward(how, &dy, &x).unwrap()]
                });
            for (i, (a, b)) in compressed.iter().zip(&exact).enumerate() {
                assert_close(&format!("[{t}, {c}] on {device}, result {i}"), a, b, Tolerance::Exact);
            }
        }
    }
}

/// Returns the gradients by input and weight. With a residual, also returns the amax.
fn norm(dy: &Tensor, x: &SavedActivation, weight: &Tensor, rstd: &Tensor) -> Result<Vec<Tensor>> {
    let (device, mut made) = (dy.device(), Vec::new());
    for residual in [None, Some(dy)] {
        let mut dweight = Tensor::zeros(device, weight.shape(), DType::F32)?;
        let mut amax = Tensor::zeros(device, &[1], DType::F32)?;
        let options = NormBackward { dresidual: residual, amax: residual.map(|_| &mut amax), dbias: None };
        made.push(norm_backward(dy, x, NormWeights::rms(weight), rstd, &mut dweight, options)?);
        made.extend([dweight, amax]);
    }
    Ok(made)
}

#[test]
fn swiglu_compresses_bf16_as_compress_does() {
    compresses_beside(SwiGlu, DType::BF16);
    compresses_beside(Gelu(crate::ops::Gelu::Tanh), DType::BF16);
}

#[test]
fn swiglu_compressing_matches_compress() {
    compresses_beside(SwiGlu, DType::F32);
    compresses_beside(SwiGlu, DType::F16);
}

/// Checks on every device that the activation equals the result of `activation_to`, and that the compressed input equals the result of `compress`.
fn compresses_beside(how: Activation, dtype: DType) {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for (t, f) in [(1, 1), (3, 7), (17, 48), (33, 24), (130, 272), (257, 528)] {
            let x = hostile("x", &[t, how.inputs() * f], dtype).to_device(&device).unwrap();
            let expected = parts(compress(&x).unwrap());
            let plain = values(&activation_to(how, &x, Output::Plain).unwrap().plain().unwrap());
            let (y, compressed) = activation_compressing(how, &x, Output::Plain).unwrap();
            let same = values(&y.plain().unwrap()).iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "the value of [{t}, {f}] {dtype} on {device}");
            for (expected, got) in expected.iter().zip(parts(compressed)) {
                assert_close(&format!("plain, [{t}, {f}] {dtype} on {device}"), expected, &got, Tolerance::Exact);
            }
            let given = Tensor::from_slice(&device, &[1], &[40f32]).unwrap();
            let own = |granularity| CastScale::Own(granularity, CurrentScaling::default());
            for scale in [CastScale::Given(&given), own(Granularity::PerRow), own(Granularity::Blocks1x128)] {
                let mut seen = [(); 2].map(|()| CastStatistics::new(&device, 1).unwrap());
                let [seen_alone, seen_fused] = &mut seen;
                let to = |statistics| {
                    Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Both, statistics, slot: 0 })
                };
                let plain = activation_to(how, &x, to(seen_alone)).unwrap().fp8().unwrap();
                let (y, compressed) = activation_compressing(how, &x, to(seen_fused)).unwrap();
                let got = all(&y.fp8().unwrap(), &seen[1]).into_iter().chain(parts(compressed));
                for (i, (expected, got)) in all(&plain, &seen[0]).iter().chain(&expected).zip(got).enumerate() {
                    let what = format!("{scale:?}, [{t}, {f}] {dtype} on {device}, part {i}");
                    assert_close(&what, expected, &got, Tolerance::Exact);
                }
            }
        }
    }
}

#[test]
fn gradients_of_non_finite_inputs_are_not_finite() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        for bad in [f32::INFINITY, f32::NAN] {
            let mut x = values(&normals("x", &[4, 64], DType::F32)).into_iter().map(|x| x as f32).collect::<Vec<_>>();
            x[70] = bad;
            let x = matrix(64, &x, DType::BF16).to_device(&device).unwrap();
            let saved = SavedActivation::Compressed(compress(&x).unwrap());
            let dy = normals("dy", &[4, 32], DType::BF16).to_device(&device).unwrap();
            assert!(values(&activation_backward(SwiGlu, &dy, &saved).unwrap())[70].is_nan(), "swiglu on {device}");
            let (dy, weight) = (normals("dy", &[4, 64], DType::BF16), normals("weight", &[64], DType::BF16));
            let [dy, weight] = [dy, weight].map(|x| x.to_device(&device).unwrap());
            let (_, rstd) = rmsnorm(&x, &weight, 1e-5).unwrap();
            let dx = values(&norm(&dy, &saved, &weight, &rstd).unwrap()[0]);
            assert!(dx[64..128].iter().all(|x| x.is_nan()), "rmsnorm on {device}");
            assert!(dx.iter().filter(|x| !x.is_finite()).count() == 64, "other rows are as before, on {device}");
        }
    }
}

#[test]
fn unsupported_inputs_are_errors() {
    let error = compress(&normals("x", &[4, 4], DType::F64)).unwrap_err().to_string();
    assert!(error.contains("compress: x") && error.contains("float64"), "{error}");
    assert!(compress(&normals("x", &[4], DType::F32)).is_err());
    let x = compress(&Tensor::zeros(&Device::Cpu, &[0, 32], DType::F32).unwrap()).unwrap();
    assert_eq!(decompress(&x).unwrap().shape(), [0, 32]);
}
