//! Casts within an update give the codes and statistics of casts after the update.

use super::*;

/// Checks on every device that an update of several parameters with casts gives the bits of an update without casts followed by `quantize`,
/// `quantize_blocks` or `amax`.
fn casts_as_it_goes(shapes: &[[usize; 2]], stored: Stored, Codes { format, copies, own }: Codes) {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let what = format!("{stored:?}, {format} {copies:?} {own:?} on {device}");
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let (norm, scales) = (number(3.7), [number(300.0), number(1e-3), number(0.37)]);
        let cases = || shapes.iter().map(|shape| Case::new(&device, shape, stored));
        let mut plain: Vec<Case> = cases().collect();
        // Every fourth parameter is only measured.
        let casting = |i: usize| i % 4 != 3;
        let mut fused: Vec<Case> =
            cases().enumerate().map(|(i, c)| if casting(i) { c.with_codes(format, copies, own) } else { c }).collect();
        let slots = 2 * shapes.len();
        let [mut expected, mut seen] = [(); 2].map(|()| CastStatistics::new(&device, slots).unwrap());
        for step in 1..=2 {
            let how = AdamW { step, ..HOW };
            let scale = |i: usize| scale_by(&scales[(i + step as usize) % 3], own);
            let mut parameters: Vec<_> = plain.iter_mut().zip(0..).map(|(c, i)| c.parameter(i, None)).collect();
            plain_update(&mut parameters, &norm, &how);
            for (i, case) in plain.iter_mut().enumerate() {
                let read = case.read();
                if casting(i) {
                    case.codes = Some(cast_by(&read, format, scale(i), copies, &mut expected, 2 * i + 1));
                } else {
                    raise_amax(&read, &mut case.amax).unwrap();
                }
            }
            let parameters = fused.iter_mut().enumerate();
            let mut parameters: Vec<_> =
                parameters.map(|(i, c)| c.parameter(i as u64, Some((scale(i), 2 * i + 1)))).collect();
            update(&mut parameters, &mut seen, &norm, &how);
            for (i, (plain, fused)) in plain.iter().zip(&fused).enumerate() {
                compare(&format!("{:?}, {what}", shapes[i]), &plain.written(), &fused.written());
            }
            compare(&format!("statistics, {what}"), &measured(&expected), &measured(&seen));
        }
    }
}

const SHAPES: [[usize; 2]; 11] =
    [[1, 1], [3, 7], [16, 16], [63, 65], [129, 200], [257, 391], [1, 128], [130, 8], [5, 1000], [400, 3], [0, 4]];

#[test]
fn fused_casts_match_a_separate_cast() {
    // All pairs of formats of weights and moments, with alternating types of gradients.
    let mut grads = [DType::F32, DType::BF16, DType::E4M3].into_iter().cycle();
    let mut cases = Vec::new();
    for weights in WEIGHTS.into_iter().chain([Weights::Made(DType::BF16)]) {
        for states in STATES {
            let stored = Stored { weights, states, grad: grads.next().expect("there is no end") };
            let default = Some(CurrentScaling::default());
            for (format, own) in [(DType::E4M3, None), (DType::E5M2, None), (DType::E4M3, default)] {
                cases.push((stored, Codes { format, copies: CodeCopies::Both, own }));
            }
        }
        let stored = Stored { weights, states: Plain(DType::BF16), grad: DType::BF16 };
        for copies in [CodeCopies::Rows, CodeCopies::Columns] {
            for own in [None, Some(CurrentScaling { epsilon: 1e-3, power_of_two: true })] {
                cases.push((stored, Codes { format: DType::E4M3, copies, own }));
            }
        }
    }
    // The cast is compared with an update that has no codes.
    compile_for(cases.iter().flat_map(|&(stored, codes)| [(stored, None), (stored, Some(codes))]));
    for (stored, codes) in cases {
        casts_as_it_goes(&SHAPES, stored, codes);
    }
}

const NARROW: Stored = Stored { weights: Weights::Stochastic, states: Plain(DType::BF16), grad: DType::BF16 };

#[test]
fn many_casts_take_several_launches() {
    let shapes: Vec<[usize; 2]> = (0..110).map(|i| [i * i % 37, 1 + i * 7 % 150]).collect();
    casts_as_it_goes(&shapes, NARROW, Codes { format: DType::E4M3, copies: CodeCopies::Both, own: None });
}

#[test]
fn casts_agree_across_devices() {
    for (weights, states) in WEIGHTS.into_iter().zip(STATES.into_iter().cycle()) {
        parity(&[Tensor::from_slice(&Device::Cpu, &[1], &[0.9f32]).unwrap()], Tolerance::Exact, |norm| {
            let device = norm[0].device();
            let scale = Tensor::from_slice(device, &[1], &[300f32])?;
            let mut seen = CastStatistics::new(device, 1)?;
            let there = |name| normals(name, &[137, 72], DType::F32).to_device(device);
            let stored = Stored { weights, states, grad: DType::BF16 };
            let mut case =
                Case::of(&there("weights")?, &there("grad")?, stored).with_codes(DType::E4M3, CodeCopies::Both, None);
            update(&mut [case.parameter(5, Some((CastScale::Given(&scale), 0)))], &mut seen, &norm[0], &HOW);
            Ok(case.written().into_iter().chain(measured(&seen)).collect())
        });
    }
}

#[test]
fn a_non_finite_norm_casts_nothing() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let new = || Case::new(&device, &[20, 40], NARROW);
        let all = |cases: &[Case; 2]| cases.iter().flat_map(Case::written).collect::<Vec<_>>();
        let [before, mut after] = [(); 2].map(|()| [new().with_codes(DType::E4M3, CodeCopies::Both, None), new()]);
        let mut seen = CastStatistics::new(&device, 1).unwrap();
        let scale = number(1.0);
        let mut parameters: Vec<_> =
            after.iter_mut().map(|case| case.parameter(0, Some((CastScale::Given(&scale), 0)))).collect();
        update(&mut parameters, &mut seen, &number(f32::NAN), &HOW);
        compare("untouched", &all(&before), &all(&after));
        assert!(measured(&seen).iter().all(|t| t.read_bytes().unwrap().iter().all(|&byte| byte == 0)));
    }
}

#[test]
fn codes_of_another_shape_are_an_error() {
    let number = |x: f32| Tensor::from_slice(&Device::Cpu, &[1], &[x]).unwrap();
    let (one, mut seen) = (number(1.0), CastStatistics::new(&Device::Cpu, 1).unwrap());
    let scalars = AdamWScalars::new(&Device::Cpu).unwrap();
    let new = |shape: &[usize]| Case::new(&Device::Cpu, shape, NARROW);
    let mut case = new(&[2, 3]);
    case.codes = new(&[3, 2]).with_codes(DType::E4M3, CodeCopies::Both, None).codes;
    let error =
        adamw(&mut [case.parameter(0, Some((CastScale::Given(&one), 0)))], &mut seen, &one, &scalars).unwrap_err();
    assert_eq!(error.to_string(), "adamw: grad has shape [2, 3], expected [3, 2]");
    let mut case = new(&[2, 3]).with_codes(DType::E4M3, CodeCopies::Both, None);
    let error =
        adamw(&mut [case.parameter(0, Some((CastScale::Given(&one), 7)))], &mut seen, &one, &scalars).unwrap_err();
    assert_eq!(error.to_string(), "quantize: slot 7 of statistics with 1 entries");
    let mut case = new(&[2, 3]).with_codes(DType::E4M3, CodeCopies::Both, None);
    let rows = CastScale::Own(Granularity::PerRow, CurrentScaling::default());
    let error = adamw(&mut [case.parameter(0, Some((rows, 0)))], &mut seen, &one, &scalars).unwrap_err();
    assert!(
        error.to_string().ends_with("codes with per-row scales cannot be cast in the update; cast them after it"),
        "{error}"
    );
}
