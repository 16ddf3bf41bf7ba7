use super::*;
use crate::cuda::{Arg, Entry, Source};
use crate::ops::destination::tests::hostile;
use crate::testing::{Tolerance, gpu, normals, parity};

fn all_outputs(x: &Tensor, format: DType, scale: &Tensor, copies: CodeCopies) -> Result<Vec<Tensor>> {
    let mut seen = CastStatistics::new(x.device(), 3)?;
    let q = quantize(x, format, scale, copies, &mut seen, 1)?;
    let copies = q.codes.into_iter().chain(q.transposed);
    Ok(copies.chain([q.scale_inv, seen.amax, seen.saturated, seen.underflowed, seen.elements]).collect())
}

#[test]
fn quantize_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (16, 16), (63, 65), (129, 200), (257, 391)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for format in [DType::E4M3, DType::E5M2] {
                for scale in [1.0f32, 300.0, 0.37, 1e-30] {
                    let x = hostile("quantize", &[rows, columns], dtype);
                    let scale = Tensor::from_slice(&Device::Cpu, &[1], &[scale]).unwrap();
                    for copies in [CodeCopies::Rows, CodeCopies::Columns, CodeCopies::Both] {
                        parity(&[x.clone(), scale.clone()], Tolerance::Exact, |x| {
                            all_outputs(&x[0], format, &x[1], copies)
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn rounded_casts_match_round_then_cast() {
    for (rows, columns) in [(16, 16), (48, 4096), (129, 200)] {
        for dtype in [DType::F16, DType::BF16] {
            let x = hostile("rounded", &[rows, columns], DType::F32);
            let scale = Tensor::from_slice(&Device::Cpu, &[1], &[37f32]).unwrap();
            parity(&[x, scale], Tolerance::Exact, |x| {
                let mut seen = CastStatistics::new(x[0].device(), 1)?;
                let zeros = Tensor::zeros(x[0].device(), &[rows, columns], DType::F32)?;
                let mut q = quantize(&zeros, DType::E4M3, &x[1], CodeCopies::Rows, &mut seen, 0)?;
                let mut seen = CastStatistics::new(x[0].device(), 1)?;
                quantize_rounded_into(&x[0], dtype, &x[1], &mut q, &mut seen, 0)?;
                let mut expected = CastStatistics::new(x[0].device(), 1)?;
                let then = quantize(&cast(&x[0], dtype)?, DType::E4M3, &x[1], CodeCopies::Rows, &mut expected, 0)?;
                let codes = q.codes.unwrap();
                assert!(codes.read_bytes()? == then.codes.unwrap().read_bytes()?, "{rows} x {columns} by {dtype}");
                assert_eq!(seen.amax.read_bytes()?, expected.amax.read_bytes()?);
                Ok(vec![codes, q.scale_inv, seen.amax, seen.saturated, seen.underflowed, seen.elements])
            });
        }
    }
}

#[test]
fn statistics_count_what_was_lost() {
    let x = [1.0f32, -600.0, 0.0, 1e-6, f32::NAN, f32::INFINITY, 448.0];
    let x = Tensor::from_slice(&Device::Cpu, &[1, 7], &x).unwrap();
    let one = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
    let q = quantize(&x, DType::E4M3, &one, CodeCopies::Rows, &mut seen, 0).unwrap();
    let counts = [&seen.saturated, &seen.underflowed, &seen.elements].map(|t| t.to_vec::<i64>().unwrap()[0]);
    assert_eq!(counts, [2, 1, 7]);
    assert_eq!(seen.amax.to_vec::<f32>().unwrap(), [f32::INFINITY]);
    let codes = q.codes.unwrap().read_bytes().unwrap();
    assert_eq!(codes[..7], [0x38, 0xFE, 0x00, 0x00, 0x7F, 0x7E, 0x7E]);
    assert!(codes[7..].iter().all(|&c| c == 0), "padding is zero");
}

#[test]
fn statistics_accumulate_over_casts() {
    let one = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
    for x in [3f32, 500.0, -2.0] {
        let x = Tensor::from_slice(&Device::Cpu, &[1, 1], &[x]).unwrap();
        quantize(&x, DType::E4M3, &one, CodeCopies::Rows, &mut seen, 0).unwrap();
    }
    assert_eq!(seen.amax.to_vec::<f32>().unwrap(), [500.0]);
    assert_eq!(seen.elements.to_vec::<i64>().unwrap(), [3]);
}

#[test]
fn amax_and_its_scale_agree_across_devices() {
    for n in [1, 100, 5000] {
        for dtype in [DType::F32, DType::BF16] {
            parity(&[normals("amax", &[n], dtype)], Tolerance::Exact, |x| {
                let [mut first, mut second] = [amax(&x[0])?, amax(&x[0])?];
                let measured = first.duplicate()?;
                let plain = take_scale(&mut first, DType::E4M3, CurrentScaling::default())?;
                let how = CurrentScaling { epsilon: 10.0, power_of_two: true };
                let rounded = take_scale(&mut second, DType::E5M2, how)?;
                assert_eq!(first.to_vec::<f32>()?, [0.0], "what is taken is cleared");
                Ok(vec![measured, plain, rounded, second])
            });
        }
    }
}

#[test]
fn measure_matches_the_amax_of_a_cast() {
    for dtype in [DType::F32, DType::BF16] {
        let inputs = [normals("x", &[33, 47], dtype), normals("y", &[5, 7], dtype)];
        parity(&inputs, Tolerance::Exact, |x| {
            let mut seen = CastStatistics::new(x[0].device(), 3)?;
            x.iter().try_for_each(|x| measure(x, &mut seen, 1))?;
            let cast = x.iter().map(|x| Ok(amax(x)?.to_vec::<f32>()?[0])).collect::<crate::Result<Vec<_>>>()?;
            assert_eq!(seen.amax.to_vec::<f32>()?, [0.0, cast[0].max(cast[1]), 0.0]);
            Ok(vec![seen.amax, seen.elements])
        });
    }
}

#[test]
fn special_amaxes_give_the_documented_scales() {
    let scale = |amax: f32, how| {
        let mut amax = Tensor::from_slice(&Device::Cpu, &[1], &[amax]).unwrap();
        take_scale(&mut amax, DType::E4M3, how).unwrap().to_vec::<f32>().unwrap()[0]
    };
    let plain = CurrentScaling::default();
    for (amax, expected) in [(0.0, 1.0), (f32::INFINITY, 1.0), (f32::NAN, 1.0), (7.0, 64.0), (1e-45, f32::MAX)] {
        assert_eq!(scale(amax, plain), expected, "amax {amax:e}");
    }
    assert_eq!(scale(3.0, CurrentScaling { power_of_two: true, ..plain }), 128.0);
    assert_eq!(scale(1e-9, CurrentScaling { epsilon: 1.0, ..plain }), 448.0);
}

static CONVERSIONS: Source = Source::bare(
    "conversions",
    concat!(
        include_str!("../common.cuh"),
        r#"
        __device__ bool same(unsigned short a, unsigned short b) {
            const float x = load(f16{a}), y = load(f16{b});
            return a == b || x != x && y != y;
        }
        template <class T> __device__ u32 differences_at(u32 bits) {
            const float x = __uint_as_float(bits), y = __uint_as_float(bits ^ 0x80000001);
            const u32 a = halves<T>(bits & 0xFFFF), b = halves_by_integers<T>(bits & 0xFFFF);
            return (encode<T>(x, y) != encode_by_integers<T>(x, y)) + !same(a, b) + !same(a >> 16, b >> 16);
        }
        extern "C" __global__ void conversions(u32* differences) {
            for (u64 i = grid_start(); i < 1ull << 32; i += grid_step()) {
                const u32 here = differences_at<e4m3>((u32)i) + differences_at<e5m2>((u32)i);
                if (here) atomicAdd(differences, here);
            }
        }
        "#
    ),
);

/// GPUs below compute capability 8.9 convert by integer arithmetic. For all floats and all pairs of codes, the results equal the results of the
/// instructions.
#[test]
fn conversions_by_integers_are_those_of_the_instructions() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
    let mut differences = Tensor::zeros(&device, &[1], DType::I32).unwrap();
    let entry = Entry { name: "conversions", args: vec![Arg::Ptr(differences.device_ptr_mut())] };
    let kernel = CONVERSIONS.kernel(&[], entry);
    // SAFETY: the kernel writes one word, which `differences` has.
    unsafe { gpu.launch(&kernel, [4096, 1, 1], 256, 0).unwrap() };
    assert_eq!(differences.to_vec::<i32>().unwrap(), [0]);
}
