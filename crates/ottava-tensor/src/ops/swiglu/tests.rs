use super::Activation::{self, ClampedSwiGlu, GeGlu, Gelu, Relu2, SwiGlu, Tanh};
use super::{activation, activation_backward, activation_backward_to, activation_dots, activation_to};
use crate::cuda::GpuModel;
use crate::ops::destination::tests::{all, destinations, destinations_on, hostile};
use crate::ops::{
    Accumulation, CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Operand, Output, SavedActivation,
    cast, compress, product_activation_to,
};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, quantized, values};
use crate::{DType, Device, Granularity, Tensor};

/// The tolerance of products, quotients and exponentials of values below 10 in F64, and of sums of seven. They differ by some units of 2⁻⁵³, 1.1e-16.
const ROUNDING: f64 = 1e-12;

/// All activations except SwiGLU.
const OTHERS: [Activation; 7] = [
    Gelu(super::Gelu::Exact),
    Gelu(super::Gelu::Tanh),
    GeGlu(super::Gelu::Exact),
    GeGlu(super::Gelu::Tanh),
    ClampedSwiGlu,
    Relu2,
    Tanh,
];

#[test]
fn the_squared_relu_is_that_of_its_definition() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 4], &[-2.0, 0.0, 0.5, 3.0]).unwrap();
    let dy = Tensor::from_slice(&Device::Cpu, &[1, 4], &[1.0, 1.0, -1.0, 2.0]).unwrap();
    assert_eq!(values(&activation(Relu2, &x).unwrap()), [0.0, 0.0, 0.25, 9.0]);
    assert_eq!(values(&activation_backward(Relu2, &dy, &x).unwrap()), [0.0, 0.0, -1.0, 12.0]);
}

#[test]
fn activations_agree_across_devices() {
    for how in OTHERS.into_iter().chain([SwiGlu]) {
        for (t, f) in [(1, 1), (3, 7), (65, 301), (5, 2056)] {
            for dtype in [DType::F32, DType::BF16] {
                let inputs = [wide_normals(&[t, how.inputs() * f], dtype), normals("dy", &[t, f], dtype)];
                // The exponentials, error functions and hyperbolic tangents of CPU and GPU differ in the last bits. An H200 differs by 9.2 steps of F32.
                let steps = if dtype == DType::F32 { 16.0 } else { 1.0 };
                parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                    Ok(vec![activation(how, &x[0])?, activation_backward(how, &x[1], &x[0])?])
                });
            }
        }
    }
}

/// Returns normal values. Many of them are beyond the bounds of the clamped SwiGLU.
fn wide_normals(shape: &[usize], dtype: DType) -> Tensor {
    let wide: Vec<f64> = values(&normals("x", shape, DType::F64)).into_iter().map(|x| 6.0 * x).collect();
    cast(&Tensor::from_slice(&Device::Cpu, shape, &wide).unwrap(), dtype).unwrap()
}

/// Compares with central differences. No value is within the step of a bound.
#[test]
fn the_clamped_swiglu_has_the_gradient_of_its_bounds() {
    const STEP: f64 = 1e-5;
    let x = [-9.0, 0.3, 6.5, 8.0, /* ups */ -7.5, -6.0, 7.25, 2.0];
    let y =
        |x: &[f64]| values(&activation(ClampedSwiGlu, &Tensor::from_slice(&Device::Cpu, &[1, 8], x).unwrap()).unwrap());
    let by_hand = |g: f64, u: f64| (u + 1.0) * g / (1.0 + (-1.702 * g).exp());
    for (seen, expected) in
        y(&x).into_iter().zip([by_hand(-9.0, -7.0), by_hand(0.3, -6.0), by_hand(6.5, 7.0), by_hand(7.0, 2.0)])
    {
        assert!((seen - expected).abs() < ROUNDING, "{seen}, {expected}");
    }
    let ones = Tensor::from_slice(&Device::Cpu, &[1, 4], &[1.0; 4]).unwrap();
    let input = Tensor::from_slice(&Device::Cpu, &[1, 8], &x).unwrap();
    let gradient = values(&activation_backward(ClampedSwiGlu, &ones, &input).unwrap());
    for (i, gradient) in gradient.into_iter().enumerate() {
        let sum_at = |step: f64| {
            let mut moved = x;
            moved[i] += step;
            y(&moved).iter().sum::<f64>()
        };
        let slope = (sum_at(STEP) - sum_at(-STEP)) / (2.0 * STEP);
        // The differences have two errors: 2e-11 (`STEP² / 6`) times the third derivative, and 1e-10 from rounding the sum by 2⁻⁵³ (divided by
        // `STEP`). Up to 9e-10 was seen.
        assert!((gradient - slope).abs() < 1e-8, "{i}: {gradient}, {slope}");
    }
    // As in torch.clamp, a value that equals its bound has a gradient.
    let at_bounds = Tensor::from_slice(&Device::Cpu, &[1, 4], &[7.0, 1.0, 1.0, -7.0]).unwrap();
    let ones = Tensor::from_slice(&Device::Cpu, &[1, 2], &[1.0; 2]).unwrap();
    let gradient = values(&activation_backward(ClampedSwiGlu, &ones, &at_bounds).unwrap());
    assert!(gradient[0] != 0.0 && gradient[3] != 0.0, "{gradient:?}");
}

/// Compares with `torch.nn.functional.gelu` of PyTorch 2.15 in F64 and its gradient: first the exact form, then `approximate="tanh"`.
#[test]
fn gelu_is_that_of_pytorch() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 5], &[-6.0, -1.3, 0.0, 0.7, 4.0]).unwrap();
    let ones = Tensor::from_slice(&Device::Cpu, &[1, 5], &[1.0; 5]).unwrap();
    let (up, down) = (Tensor::from_slice(&Device::Cpu, &[1, 2], &[0.7, 3.0]).unwrap(), 0.7 * 0.758036347776927);
    for (how, y, dx) in [
        (
            super::Gelu::Exact,
            [-5.919525869479969e-09, -0.1258406299612934, 0.0, 0.5306254434438489, 3.9998733150326675],
            [-3.546870945402639e-08, -0.12597868507653925, 0.5, 0.9766141011336599, 1.0005036496612265],
        ),
        (
            super::Gelu::Tanh,
            [-8.43964897967453e-11, -0.1260709876826906, 0.0, 0.5305701347051167, 3.9999297540518075],
            [-7.709976012836329e-10, -0.12587806978401672, 0.5, 0.976357218656104, 1.000335123197122],
        ),
    ] {
        let seen = [activation(Gelu(how), &x).unwrap(), activation_backward(Gelu(how), &ones, &x).unwrap()];
        for (seen, expected) in seen.iter().map(values).zip([y, dx]) {
            assert!(
                seen.iter().zip(expected).all(|(a, b)| (a - b).abs() < ROUNDING),
                "{how:?}: {seen:?}, {expected:?}"
            );
        }
        let gated = values(&activation(GeGlu(how), &up).unwrap())[0];
        // `down` is the exact form. At a gate of 0.7, the form with `tanh` is smaller by 5.5e-5, which is 1.7e-4 after the product with 3.
        assert!((gated - 3.0 * down).abs() < 1e-3, "{how:?}: {gated} of a gate of 0.7 and an up of 3");
    }
}

#[test]
fn gates_are_the_first_half_of_a_row() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 4], &[0f64, 2.0, 5.0, 7.0]).unwrap();
    let expected = 2.0 / (1.0 + (-2f64).exp()) * 7.0;
    let y = values(&activation(SwiGlu, &x).unwrap());
    assert!(y[0] == 0.0 && (y[1] - expected).abs() < ROUNDING, "{y:?}");
}

#[test]
fn all_activations_write_to_every_destination() {
    for how in OTHERS {
        for (t, f) in [(3, 7), (129, 144), (130, 301)] {
            for dtype in [DType::F16, DType::BF16] {
                let inputs = [hostile("x", &[t, how.inputs() * f], dtype), hostile("dy", &[t, f], dtype)];
                destinations(&inputs, |x, output| activation_to(how, &x[0], output));
                destinations(&inputs, |x, output| Ok(activation_backward_to(how, &x[1], &x[0], output, None)?.0));
            }
        }
    }
}

/// One sequence of Llama-3-8B has 16 padded rows. On GPUs with clusters, each row has a cluster of eight blocks. On other GPUs, it has one block, in
/// which each thread has three eights.
#[test]
fn a_wide_row_has_a_cluster() {
    let launch = |name: &str| {
        let device = Device::dry_gpu(GpuModel::named(name).unwrap());
        let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
        let x = Tensor::zeros(&device, &[1, 2 * 14336], DType::BF16).unwrap();
        let mut statistics = CastStatistics::new(&device, 1).unwrap();
        let scale = CastScale::Own(Granularity::PerRow, CurrentScaling::default());
        let (format, copies) = (DType::E4M3, CodeCopies::Rows);
        let to = Fp8Output { format, scale, copies, statistics: &mut statistics, slot: 0 };
        gpu.start_trace();
        activation_to(SwiGlu, &x, Output::Fp8(to)).unwrap();
        gpu.take_trace().into_iter().find(|line| line.starts_with("swiglu_")).expect("it casts rows")
    };
    assert!(launch("H200").contains("<128,1,1 in 8;224>"), "{}", launch("H200"));
    assert!(launch("rtx-4090").contains("<16,1,1;608>"), "{}", launch("rtx-4090"));
}

/// Tests few rows with one block and with clusters of two, four and eight blocks, and many rows.
#[test]
fn wide_activations_write_to_every_destination() {
    let Some(gpu) = gpu() else { return };
    for how in [SwiGlu, Gelu(super::Gelu::Tanh)] {
        for (t, f) in [(1, 2048), (18, 2056), (3, 8184), (64, 14336), (2, 32768), (515, 4104)] {
            for dtype in [DType::F32, DType::BF16] {
                let x = hostile("x", &[t, how.inputs() * f], dtype);
                destinations_on(&gpu, &[x], |x, output| activation_to(how, &x[0], output));
            }
        }
    }
}

#[test]
fn swiglu_writes_to_every_destination() {
    for (t, f) in [(1, 1), (3, 7), (17, 48), (129, 144), (131, 256), (130, 301), (257, 264)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[t, 2 * f], dtype), hostile("dy", &[t, f], dtype)];
            destinations(&inputs, |x, output| activation_to(SwiGlu, &x[0], output));
            destinations(&inputs, |x, output| Ok(activation_backward_to(SwiGlu, &x[1], &x[0], output, None)?.0));
        }
    }
}

#[test]
fn backward_recomputes_the_activation_of_forward() {
    writes_the_activation(SwiGlu, &[(129, 144), (130, 256), (257, 264), (130, 272)]);
    OTHERS.into_iter().for_each(|how| writes_the_activation(how, &[(130, 256)]));
}

/// A small case for race checkers, which slow kernels down a thousand times.
#[test]
fn backward_recomputes_a_small_activation() {
    writes_the_activation(SwiGlu, &[(3, 7), (17, 48)]);
    OTHERS.into_iter().for_each(|how| writes_the_activation(how, &[(17, 48)]));
}

fn writes_the_activation(which: Activation, shapes: &[(usize, usize)]) {
    let how = CurrentScaling::default();
    let own = |granularity| CastScale::Own(granularity, how);
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let given = [3.7f32, 40.0].map(|scale| Tensor::from_slice(&device, &[1], &[scale]).unwrap());
        let [gradient_scale, activation_scale] = given.each_ref().map(CastScale::Given);
        for &(t, f) in shapes {
            for (dtype, format, scales) in [
                (DType::F32, DType::E4M3, [gradient_scale, activation_scale]),
                (DType::BF16, DType::E4M3, [gradient_scale, activation_scale]),
                (DType::BF16, DType::E5M2, [gradient_scale, activation_scale]),
                (DType::BF16, DType::E4M3, [own(Granularity::PerRow); 2]),
                (DType::F32, DType::E4M3, [own(Granularity::Blocks1x128); 2]),
                (DType::BF16, DType::E4M3, [own(Granularity::Blocks1x128); 2]),
                (DType::BF16, DType::E4M3, [own(Granularity::Blocks128x128); 2]),
                (DType::BF16, DType::E4M3, [own(Granularity::MixedBlocks), own(Granularity::Blocks1x128)]),
                (DType::BF16, DType::E4M3, [own(Granularity::Blocks1x128), own(Granularity::MixedBlocks)]),
                (DType::BF16, DType::E4M3, [gradient_scale, own(Granularity::Blocks1x128)]),
            ] {
                for copies in [CodeCopies::Columns, CodeCopies::Both] {
                    let [x, dy] = [hostile("x", &[t, which.inputs() * f], dtype), hostile("dy", &[t, f], dtype)]
                        .map(|x| x.to_device(&device).unwrap());
                    let mut seen = [(); 4].map(|()| CastStatistics::new(&device, 2).unwrap());
                    let [gradient, both, activation, with_gradient] = &mut seen;
                    let to =
                        |format, copies, scale, statistics| Fp8Output { format, scale, copies, statistics, slot: 1 };

                    let alone = Output::Fp8(to(DType::E5M2, CodeCopies::Both, scales[0], gradient));
                    let alone = activation_backward_to(which, &dy, &x, alone, None).unwrap().0.fp8().unwrap();
                    let forward = Output::Fp8(to(format, copies, scales[1], activation));
                    let forward = activation_to(which, &x, forward).unwrap().fp8().unwrap();
                    let output = Output::Fp8(to(DType::E5M2, CodeCopies::Both, scales[0], both));
                    let again = to(format, copies, scales[1], with_gradient);
                    let (dx, again) = activation_backward_to(which, &dy, &x, output, Some(again)).unwrap();

                    let [gradient, both, activation, with_gradient] = &seen;
                    let expected = all(&alone, gradient).into_iter().chain(all(&forward, activation));
                    let got = all(&dx.fp8().unwrap(), both).into_iter().chain(all(&again.unwrap(), with_gradient));
                    for (i, (expected, got)) in expected.zip(got).enumerate() {
                        let what = format!(
                            "{which:?} [{t}, {f}] {dtype} {format} {scales:?} {copies:?}, part {i} on {device}"
                        );
                        assert_close(&what, &expected, &got, Tolerance::Exact);
                    }
                }
            }
        }
    }
}

/// Compares the codes of the activation of a product. The kernel of the activation applies the scales, or the product was scaled before. Tests few
/// and many rows, and rows that do and do not consist of whole eights. Scales differ from row to row.
#[test]
fn activations_of_products_agree_across_devices() {
    let Some(gpu) = gpu() else { return };
    for how in OTHERS.into_iter().chain([SwiGlu]) {
        for (m, f, k) in [(64, 48, 64), (129, 48, 64), (150, 7, 33), (200, 1032, 256), (256, 9736, 128), (257, 24, 64)]
        {
            let uneven = |name: &str, shape: [usize; 2]| {
                let x = values(&normals(name, &shape, DType::F64));
                let x: Vec<f64> = x.iter().enumerate().map(|(i, x)| x * [0.1, 0.3, 0.2][i / k % 3]).collect();
                cast(&Tensor::from_slice(&Device::Cpu, &shape, &x).unwrap(), DType::BF16).unwrap()
            };
            let inputs = [uneven("x", [m, k]), uneven("weight", [how.inputs() * f, k])];
            let on = |device: &Device| {
                let by_rows = |x: &Tensor| {
                    quantized(&x.to_device(device).unwrap(), DType::E4M3, Granularity::PerRow, CodeCopies::Rows)
                };
                let [x, weight] = inputs.each_ref().map(|x| by_rows(x).unwrap());
                let mut seen = CastStatistics::new(device, 1).unwrap();
                let scale = CastScale::Own(Granularity::PerRow, CurrentScaling::default());
                let to =
                    Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Rows, statistics: &mut seen, slot: 0 };
                let operands = [Operand::Rows(&x), Operand::Rows(&weight)];
                let run =
                    || product_activation_to(how, operands, DType::BF16, Accumulation::Exact, Output::Fp8(to)).unwrap();
                let codes = match device {
                    Device::Cuda(gpu) => {
                        gpu.synchronize().unwrap();
                        gpu.with_constant_weights(run)
                    }
                    _ => run(),
                };
                codes.fp8().unwrap()
            };
            let (cpu, gpu) = (on(&Device::Cpu), on(&gpu));
            let what = format!("{how:?} of {m} x {f} x {k}");
            // Another product may round an activation to another BF16, and the cast may then give the next code, which is 1/8 away.
            let codes = [&cpu, &gpu].map(|q| q.codes.as_ref().unwrap());
            assert_close(&what, codes[0], codes[1], Tolerance::Steps(DType::E4M3, 1.0));
            assert_close(&what, &cpu.scale_inv, &gpu.scale_inv, Tolerance::Steps(DType::BF16, 4.0));
        }
    }
}

#[test]
fn activated_with_an_amax_output_is_an_error() {
    let (x, dy) = (normals("x", &[2, 4], DType::F32), normals("dy", &[2, 2], DType::F32));
    let (mut amax, scale) = (Tensor::zeros(&Device::Cpu, &[1], DType::F32).unwrap(), normals("s", &[1], DType::F32));
    let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
    let (format, copies) = (DType::E4M3, CodeCopies::Columns);
    let scale = CastScale::Given(&scale);
    let activated = Fp8Output { format, scale, copies, statistics: &mut seen, slot: 0 };
    let error = activation_backward_to(SwiGlu, &dy, &x, Output::Amax { amax: &mut amax }, Some(activated)).unwrap_err();
    assert!(error.to_string().contains("amax alone"), "{error}");
}

#[test]
fn dots_are_products_with_the_activations() {
    for how in OTHERS.into_iter().chain([SwiGlu]) {
        let (x, dy) = (normals("x", &[3, how.inputs() * 7], DType::F64), normals("dy", &[3, 7], DType::F64));
        let (y, dy_values) = (values(&activation(how, &x).unwrap()), values(&dy));
        let expected = y.chunks(7).zip(dy_values.chunks(7)).map(|(y, dy)| y.iter().zip(dy).map(|(y, dy)| y * dy).sum());
        let dots = values(&activation_dots(how, &dy, &x).unwrap());
        assert!(dots.iter().zip(expected).all(|(a, b): (&f64, f64)| (a - b).abs() < ROUNDING), "{how:?}");
        for (t, f) in [(1, 1), (5, 301), (130, 256)] {
            for dtype in [DType::F32, DType::BF16] {
                let inputs = [normals("x", &[t, how.inputs() * f], dtype), normals("dy", &[t, f], dtype)];
                // Exponentials differ in the last bits (2^-17 for 16-bit types), and sums run in another order.
                let steps = if dtype == DType::F32 { 64.0 } else { 1.0 / 64.0 };
                parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                    let compressed = SavedActivation::Compressed(compress(&x[0])?);
                    Ok(vec![activation_dots(how, &x[1], &x[0])?, activation_dots(how, &x[1], compressed)?])
                });
            }
        }
    }
}
