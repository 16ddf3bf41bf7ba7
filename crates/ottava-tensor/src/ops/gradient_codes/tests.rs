use super::{CodingError, GROUP, decode_gradients, encode_gradients, gradient_code_bytes, sum_gradient_codes};
use crate::ops::cast;
use crate::ops::destination::tests::hostile;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

const TYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Returns the codes without feedback, and their error.
fn encode(x: &Tensor, slices: usize) -> (Tensor, f64) {
    let mut error = CodingError::new(x.device()).unwrap();
    let codes = encode_gradients(x, slices, None, Some(&mut error)).unwrap();
    let relative = values(&error.relative().unwrap())[0];
    (codes, relative)
}

fn of(x: &[f32], dtype: DType) -> Tensor {
    cast(&Tensor::from_slice(&Device::Cpu, &[x.len()], x).unwrap(), dtype).unwrap()
}

#[test]
fn codes_sums_and_feedback_agree_across_devices() {
    for (slices, slice) in [(1, 256), (2, 512), (3, 4352), (8, 256)] {
        let n = [slices * slice];
        for dtype in TYPES {
            let feedback = normals("feedback", &n, DType::BF16);
            for (x, finite) in [(normals("x", &n, dtype), true), (hostile("x", &n, dtype), false)] {
                parity(&[x, feedback.clone()], Tolerance::Exact, |inputs| {
                    let [x, feedback] = inputs else { unreachable!() };
                    let mut error = CodingError::new(x.device())?;
                    let plain = encode_gradients(x, slices, None, Some(&mut error))?;
                    let mut feedback = Tensor::from_bytes(x.device(), &n, DType::BF16, &feedback.read_bytes()?)?;
                    let codes = encode_gradients(x, slices, Some(&mut feedback), Some(&mut error))?;
                    let mut seen = vec![plain, codes, feedback];
                    // NaN has other bits on a GPU, so only finite inputs are decoded.
                    if finite {
                        seen.push(sum_gradient_codes(&seen[1], slice, dtype)?);
                        seen.push(decode_gradients(&seen[1], slice, dtype)?);
                    }
                    Ok(seen)
                });
            }
            // Sums run in another order.
            parity(&[normals("x", &n, dtype)], Tolerance::Steps(DType::F32, 16.0), |x| {
                let mut error = CodingError::new(x[0].device())?;
                encode_gradients(&x[0], slices, None, Some(&mut error))?;
                Ok(vec![error.relative()?])
            });
        }
    }
}

#[test]
fn each_value_comes_back_within_half_a_step_of_its_group() {
    for dtype in TYPES {
        // Groups have very different magnitudes. A scale for two groups would lose the smaller group.
        let x: Vec<f32> = values(&normals("x", &[2048], DType::F32))
            .iter()
            .enumerate()
            .map(|(i, x)| (x * 2f64.powi([-100, 3, -40, 60][i / GROUP % 4])) as f32)
            .collect();
        let x = of(&x, dtype);
        let (codes, error) = encode(&x, 4);
        let back = values(&decode_gradients(&codes, 512, dtype).unwrap());
        let (mut lost, mut all) = (0.0, 0.0);
        for (group, back) in values(&x).chunks(GROUP).zip(back.chunks(GROUP)) {
            let amax = group.iter().fold(0f64, |amax, x| amax.max(x.abs()));
            for (x, back) in group.iter().zip(back) {
                assert!((x - back).abs() <= (x.abs() / 16.0).max(amax * 2f64.powi(-9) / 224.0), "{x:e}: {back:e}");
                lost += (x - back).powi(2);
                all += x * x;
            }
        }
        let expected = (lost / all).sqrt();
        // The op squares each error in F32 and sums groups in F32, which causes errors of some units of 2⁻²⁴; up to 1.1e-7 was seen.
        assert!((error / expected - 1.0).abs() < 1e-5, "{error} for {expected}");
    }
}

/// The sum is F32, in the order of ranks, and rounded once. Neither codes nor rounded sums are added.
#[test]
fn slices_of_ranks_are_added_in_order_and_rounded_once() {
    let slice = 256;
    // In BF16, 256 + 1 is a tie to 256.
    let ranks: Vec<Tensor> = [256.0, 1.0, 1.0, -0.375].iter().map(|x| of(&vec![*x; 2 * slice], DType::BF16)).collect();
    let sent: Vec<Tensor> = ranks.iter().map(|x| encode(x, 2).0).collect();
    let mut received = Tensor::zeros(&Device::Cpu, &[4, gradient_code_bytes(slice)], DType::E4M3).unwrap();
    for (rank, codes) in sent.iter().enumerate() {
        let row = codes.rows(1, 2).unwrap();
        received.copy_from(rank, &row).unwrap();
    }
    for (dtype, expected) in [(DType::F32, 257.625), (DType::BF16, 258.0)] {
        let sum = values(&sum_gradient_codes(&received, slice, dtype).unwrap());
        assert_eq!(sum, vec![expected; slice], "{dtype}");
    }
}

/// The feedback returns the errors of casts: the mean of many equal gradients is far nearer to the gradient than one cast is.
#[test]
fn feedback_returns_what_was_lost() {
    let x = normals("x", &[512], DType::BF16);
    let mut feedback = Tensor::zeros(&Device::Cpu, &[512], DType::BF16).unwrap();
    let mut error = CodingError::new(&Device::Cpu).unwrap();
    let (mut mean, steps) = (vec![0.0; 512], 64);
    for _ in 0..steps {
        let codes = encode_gradients(&x, 1, Some(&mut feedback), Some(&mut error)).unwrap();
        for (mean, x) in mean.iter_mut().zip(values(&decode_gradients(&codes, 512, DType::F32).unwrap())) {
            *mean += x / f64::from(steps);
        }
    }
    let distance =
        |other: &[f64]| -> f64 { values(&x).iter().zip(other).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt() };
    let once = values(&decode_gradients(&encode(&x, 1).0, 512, DType::F32).unwrap());
    assert!(distance(&mean) < distance(&once) / 20.0, "{} against {}", distance(&mean), distance(&once));
}

#[test]
fn non_finite_gradients_arrive_and_leave_no_feedback() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut x = vec![1f32; 512];
        x[300] = bad;
        let mut feedback = Tensor::zeros(&Device::Cpu, &[512], DType::BF16).unwrap();
        let mut error = CodingError::new(&Device::Cpu).unwrap();
        let codes = encode_gradients(&of(&x, DType::F32), 2, Some(&mut feedback), Some(&mut error)).unwrap();
        let back = values(&decode_gradients(&codes, 256, DType::F32).unwrap());
        let nan: Vec<usize> = (0..512).filter(|&i| back[i].is_nan()).collect();
        assert_eq!(nan, (256..384).collect::<Vec<_>>(), "{bad}");
        assert!(values(&feedback).iter().all(|x| *x == 0.0));
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    let mut error = CodingError::new(&Device::Cpu).unwrap();
    let mut fails = |x: &Tensor, slices: usize, feedback: Option<usize>| {
        let mut feedback = feedback.map(|n| Tensor::zeros(&Device::Cpu, &[n], DType::BF16).unwrap());
        encode_gradients(x, slices, feedback.as_mut(), Some(&mut error)).unwrap_err().to_string()
    };
    let x = |n: usize| Tensor::zeros(&Device::Cpu, &[n], DType::F32).unwrap();
    assert_eq!(fails(&x(384), 1, None), "384 gradients are not 1 slices of a multiple of 256");
    assert_eq!(fails(&x(512), 4, None), "512 gradients are not 4 slices of a multiple of 256");
    assert!(fails(&x(512), 2, Some(256)).contains("256 elements, expected 512"));
    assert_eq!(fails(&x(4097 * 256), 4097, None), "gradients of 4097 slices, and at most 4096 are sent");
    let (codes, _) = encode(&x(512), 2);
    assert!(sum_gradient_codes(&codes, 512, DType::F32).unwrap_err().to_string().contains("expected"));
}
