use super::{swiglu, swiglu_backward, swiglu_backward_to, swiglu_to};
use crate::ops::destination::tests::{all, destinations, hostile};
use crate::ops::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Output};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use crate::{DType, Device, Granularity, Tensor};

#[test]
fn swiglu_agrees_across_devices() {
    for (t, f) in [(1, 1), (3, 7), (65, 301), (5, 2056)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("x", &[t, 2 * f], dtype), normals("dy", &[t, f], dtype)];
            // The exponentials of CPU and GPU differ in the last bit.
            let steps = if dtype == DType::F32 { 8.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                Ok(vec![swiglu(&x[0])?, swiglu_backward(&x[1], &x[0])?])
            });
        }
    }
}

#[test]
fn gates_are_the_first_half_of_a_row() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 4], &[0f64, 2.0, 5.0, 7.0]).unwrap();
    let expected = 2.0 / (1.0 + (-2f64).exp()) * 7.0;
    let y = values(&swiglu(&x).unwrap());
    assert!(y[0] == 0.0 && (y[1] - expected).abs() < 1e-12, "{y:?}");
}

#[test]
fn swiglu_writes_to_every_destination() {
    for (t, f) in [(1, 1), (3, 7), (17, 48), (129, 144), (131, 256), (130, 301), (257, 264)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[t, 2 * f], dtype), hostile("dy", &[t, f], dtype)];
            destinations(&inputs, |x, output| swiglu_to(&x[0], output));
            destinations(&inputs, |x, output| Ok(swiglu_backward_to(&x[1], &x[0], output, None)?.0));
        }
    }
}

#[test]
fn backward_recomputes_the_activation_of_forward() {
    writes_the_activation(&[(129, 144), (130, 256), (257, 264), (130, 272)]);
}

/// A small case for race checkers, which slow kernels down a thousand times.
#[test]
fn backward_recomputes_a_small_activation() {
    writes_the_activation(&[(3, 7), (17, 48)]);
}

fn writes_the_activation(shapes: &[(usize, usize)]) {
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
                    let [x, dy] = [hostile("x", &[t, 2 * f], dtype), hostile("dy", &[t, f], dtype)]
                        .map(|x| x.to_device(&device).unwrap());
                    let mut seen = [(); 4].map(|()| CastStatistics::new(&device, 2).unwrap());
                    let [gradient, both, activation, with_gradient] = &mut seen;
                    let to =
                        |format, copies, scale, statistics| Fp8Output { format, scale, copies, statistics, slot: 1 };

                    let alone = Output::Fp8(to(DType::E5M2, CodeCopies::Both, scales[0], gradient));
                    let alone = swiglu_backward_to(&dy, &x, alone, None).unwrap().0.fp8().unwrap();
                    let forward = Output::Fp8(to(format, copies, scales[1], activation));
                    let forward = swiglu_to(&x, forward).unwrap().fp8().unwrap();
                    let output = Output::Fp8(to(DType::E5M2, CodeCopies::Both, scales[0], both));
                    let again = to(format, copies, scales[1], with_gradient);
                    let (dx, again) = swiglu_backward_to(&dy, &x, output, Some(again)).unwrap();

                    let [gradient, both, activation, with_gradient] = &seen;
                    let expected = all(&alone, gradient).into_iter().chain(all(&forward, activation));
                    let got = all(&dx.fp8().unwrap(), both).into_iter().chain(all(&again.unwrap(), with_gradient));
                    for (i, (expected, got)) in expected.zip(got).enumerate() {
                        let what = format!("[{t}, {f}] {dtype} {format} {scales:?} {copies:?}, part {i} on {device}");
                        assert_close(&what, &expected, &got, Tolerance::Exact);
                    }
                }
            }
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
    let error = swiglu_backward_to(&dy, &x, Output::Amax { amax: &mut amax }, Some(activated)).unwrap_err();
    assert!(error.to_string().contains("amax alone"), "{error}");
}
