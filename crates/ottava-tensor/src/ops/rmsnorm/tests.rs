use super::{RmsnormBackward, cuda, rmsnorm, rmsnorm_backward, rmsnorm_to};
use crate::ops::destination::tests::{all, destinations, destinations_on, hostile};
use crate::ops::quantize::prepare;
use crate::ops::{CastScale, CastStatistics, CodeCopies, Fp8Output, Output, add, amax};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn rmsnorm_agrees_across_devices() {
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
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let (y, rstd) = rmsnorm(&x[0], &x[1], 1e-6)?;
                let mut dweight = x[3].duplicate()?;
                let dx = rmsnorm_backward(&x[2], &x[0], &x[1], &rstd, &mut dweight, RmsnormBackward::default())?;
                Ok(vec![y, rstd, dx, dweight])
            });
        }
    }
}

#[test]
fn rows_have_unit_mean_square() {
    let (x, mut ones) = (normals("x", &[4, 50], DType::F64), normals("w", &[50], DType::F64));
    ones.write_bytes(bytemuck::cast_slice(&[1f64; 50])).unwrap();
    let (y, _) = rmsnorm(&x, &ones, 0.0).unwrap();
    for row in values(&y).chunks(50) {
        let mean_square = row.iter().map(|v| v * v).sum::<f64>() / 50.0;
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
    // All group counts, partial strips, and rows too long for shared memory.
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

/// A small case for race checkers, which take minutes for the shapes above.
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
            cuda::rmsnorm_strips(cuda, &x, &weight, 1e-5, &mut again, &mut strips, &mut to).unwrap();
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
                    let options = RmsnormBackward { dresidual, amax: Some(&mut amaxes[place]) };
                    let dx = rmsnorm_backward(&dy, &b, &weight, &rstd, &mut dweights[place], options).unwrap();
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
