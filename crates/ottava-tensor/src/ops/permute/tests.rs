use super::*;
use crate::ops::destination::tests::{destinations, hostile};
use crate::ops::{
    Activation, CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, GroupedRows, Operand,
    activation_backward_to, activation_to, dequantize, transpose,
};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};

/// Returns choices I32 `[tokens, chosen]` of `experts`, which differ within a token. If `favourite` is given, all tokens choose it.
fn choices(tokens: usize, chosen: usize, experts: usize, favourite: Option<usize>) -> Tensor {
    let scores = normals("choices", &[tokens, experts], DType::F32).to_vec::<f32>().unwrap();
    let mut ids = Vec::new();
    for (t, scores) in scores.chunks(experts).enumerate() {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        if let Some(favourite) = favourite {
            order.retain(|&e| e != favourite);
            order.insert(t % chosen, favourite);
        }
        ids.extend(order[..chosen].iter().map(|&e| e as i32));
    }
    Tensor::from_slice(&Device::Cpu, &[tokens, chosen], &ids).unwrap()
}

/// The numbers of tokens, of choices per token and of experts, and an expert that all tokens choose.
const CASES: [(usize, usize, usize, Option<usize>); 6] = [
    (1, 1, 1, None),
    (1, 2, 64, None),
    (129, 2, 5, None),
    (128, 1, 4, Some(2)),
    (700, 3, 3, None),
    (1300, 8, 130, Some(7)),
];

fn laid_out(tokens: usize, chosen: usize, experts: usize, favourite: Option<usize>) -> (Vec<i32>, Slots) {
    let ids = choices(tokens, chosen, experts, favourite);
    (ids.to_vec().unwrap(), slots(&ids, 0..experts).unwrap())
}

#[test]
fn slots_keep_the_order_of_choices_in_aligned_groups() {
    for (tokens, chosen, experts, favourite) in CASES {
        let (ids, slots) = laid_out(tokens, chosen, experts, favourite);
        let read = |t: &Tensor| t.to_vec::<i32>().unwrap();
        let (offsets, counts) = (read(&slots.groups.offsets), read(&slots.groups.counts));
        let (slot_of, pair_of) = (read(&slots.slot_of), read(&slots.pair_of));
        let mut expected = vec![-1; pair_of.len()];
        for e in 0..experts {
            let pairs: Vec<i32> = (0..ids.len() as i32).filter(|&pair| ids[pair as usize] == e as i32).collect();
            assert_eq!(counts[e] as usize, pairs.len());
            assert_eq!(offsets[e] % 128, 0);
            assert_eq!(offsets[e + 1] - offsets[e], (pairs.len() as i32 + 127) / 128 * 128);
            expected[offsets[e] as usize..][..pairs.len()].copy_from_slice(&pairs);
        }
        assert_eq!(pair_of, expected, "{tokens} tokens, {chosen} of {experts}");
        assert!(slot_of.iter().enumerate().all(|(pair, &slot)| pair_of[slot as usize] == pair as i32));
    }
}

#[test]
fn permutations_agree_across_devices() {
    for (tokens, chosen, experts, favourite) in CASES {
        for (dtype, channels) in [(DType::F32, 7), (DType::BF16, 40)] {
            let inputs = [
                choices(tokens, chosen, experts, favourite),
                normals("x", &[tokens, channels], dtype),
                normals("weights", &[tokens, chosen], DType::F32),
            ];
            // Both devices sum in the same order.
            let own = [0..experts, experts / 3..experts / 2 + 1];
            own.into_iter().for_each(|own| {
                parity(&inputs, Tolerance::Exact, |t| {
                    let slots = slots(&t[0], own.clone())?;
                    let gather = |weights| {
                        let mut rows = gather_to(&t[1], &slots, weights, Output::Plain)?.plain().expect("plain");
                        clear_unused_rows(&mut rows, &slots.groups)?;
                        Ok::<_, crate::Error>(rows)
                    };
                    let (gathered, weighed) = (gather(None)?, gather(Some(&t[2]))?);
                    let dots = normals("dots", &[slots.pair_of.len()], DType::F32).to_device(t[0].device())?;
                    Ok(vec![
                        combine(&gathered, &slots, Some(&t[2]), Some(&t[1]))?,
                        combine(&weighed, &slots, None, None)?,
                        weight_gradient(&dots, &slots, &t[2])?,
                        gathered,
                        weighed,
                        slots.slot_of,
                        used(&slots.pair_of, &slots.groups)?,
                        slots.groups.offsets,
                        slots.groups.counts,
                    ])
                })
            });
        }
    }
}

/// Returns the elements of `x`, I32 `[P]`, up to the end of the last group.
fn used(x: &Tensor, groups: &Groups) -> Result<Tensor> {
    let end = groups.offsets.to_vec::<i32>()?[groups.len()] as usize;
    let used = &x.to_vec::<i32>()?[..end];
    Tensor::from_slice(&Device::Cpu, &[end], used)
}

/// Each expert has one row more than a multiple of 128, so no row is unused.
#[test]
fn gathers_write_to_every_destination() {
    for (tokens, chosen, experts, channels) in [(2, 2, 4, 7), (258, 2, 4, 144), (1, 4, 4, 272)] {
        let ids: Vec<i32> = (0..tokens * chosen).map(|pair| (pair % experts) as i32).collect();
        for dtype in [DType::F16, DType::BF16] {
            let inputs = [
                ids_of(&ids, [tokens, chosen]),
                hostile("x", &[tokens, channels], dtype),
                hostile("weights", &[tokens, chosen], DType::F32),
            ];
            let slots = |ids: &Tensor| slots(ids, 0..experts);
            destinations(&inputs, |t, output| gather_to(&t[1], &slots(&t[0])?, None, output));
            destinations(&inputs, |t, output| gather_to(&t[1], &slots(&t[0])?, Some(&t[2]), output));
        }
    }
}

/// Returns the values of codes, along the rows and along the columns. The unused rows are set to zero.
fn used_values(codes: &QuantizedTensor, groups: &Groups) -> Result<Vec<Tensor>> {
    let mut all = vec![dequantize(Operand::Rows(codes), 1, DType::F32)?];
    if codes.transposed.is_some() {
        all.push(transpose(&dequantize(Operand::Columns(codes), 1, DType::F32)?)?);
    }
    all.iter_mut().try_for_each(|values| clear_unused_rows(values, groups))?;
    Ok(all)
}

/// Returns what an op writes to each output in rows of `groups`: values, codes, amax and statistics.
fn outputs(
    device: &Device,
    groups: &Groups,
    granularity: Granularity,
    op: impl Fn(Output) -> Result<Produced>,
) -> Result<Vec<Tensor>> {
    let mut plain = op(Output::Plain)?.plain().expect("plain");
    clear_unused_rows(&mut plain, groups)?;
    let mut amax = Tensor::zeros(device, &[1], DType::F32)?;
    op(Output::Amax { amax: &mut amax })?;
    let mut all = vec![plain, amax];
    let given = Tensor::from_slice(device, &[1], &[3.7f32])?;
    for copies in [CodeCopies::Rows, CodeCopies::Both] {
        let scale = match granularity {
            Granularity::PerTensor => CastScale::Given(&given),
            _ => CastScale::Own(granularity, CurrentScaling { epsilon: 0.0, power_of_two: false }),
        };
        let statistics = &mut CastStatistics::new(device, 1)?;
        let codes = op(Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies, statistics, slot: 0 }))?;
        all.extend(used_values(&codes.fp8().expect("codes"), groups)?);
        let CastStatistics { amax, saturated, underflowed, elements, .. } = statistics;
        all.extend([amax, saturated, underflowed, elements].map(|counts| counts.clone()));
    }
    Ok(all)
}

/// Kernels skip the rows after the last group, whatever these rows hold. What they write to the other rows, and the statistics, are as if unused rows
/// were zeros. Some experts have no tokens, and in the last case no expert has.
#[test]
fn unused_rows_change_nothing() {
    let (tokens, chosen, channels, how) = (300, 2, 512, Activation::SwiGlu);
    let same = |what: &str, expected: Result<Vec<Tensor>>, got: Result<Vec<Tensor>>| {
        for (part, (expected, got)) in expected.unwrap().iter().zip(&got.unwrap()).enumerate() {
            assert_close(&format!("{what}, part {part}"), expected, got, Tolerance::Exact);
        }
    };
    let ids: Vec<i32> = (0..tokens * chosen).map(|pair| [0, 2, 1, 2][pair % 4]).collect();
    let (ids, x) = (ids_of(&ids, [tokens, chosen]), normals("x", &[tokens, channels], DType::BF16));
    for own in [1..2, 0..4, 3..5] {
        let placed = slots(&ids, own.clone()).unwrap();
        let (rows, end) = (placed.pair_of.len(), placed.groups.offsets.to_vec::<i32>().unwrap()[own.len()] as usize);
        assert!(end < rows, "{own:?} has unused rows");
        let dirty = |name: &str, columns: usize| {
            let mut x = normals(name, &[rows, columns], DType::BF16);
            x.copy_from(end, &hostile("unused", &[rows - end, columns], DType::BF16)).unwrap();
            x
        };
        let [hidden, dy] = [dirty("hidden", channels), dirty("dy", channels / 2)];
        for granularity in
            [Granularity::PerTensor, Granularity::PerRow, Granularity::Blocks1x128, Granularity::MixedBlocks]
        {
            let gathered = |device: &Device| {
                let (ids, x) = (ids.to_device(device)?, x.to_device(device)?);
                let slots = slots(&ids, own.clone())?;
                outputs(device, &slots.groups, granularity, |output| gather_to(&x, &slots, None, output))
            };
            if let Some(device) = gpu() {
                let what = |op: &str| format!("{op}, experts {own:?}, {granularity}");
                same(&what("gather"), gathered(&Device::Cpu), gathered(&device));
                let groups = slots(&ids.to_device(&device).unwrap(), own.clone()).unwrap().groups;
                let [hidden, dy] = [&hidden, &dy].map(|x| x.to_device(&device).unwrap());
                let [clean_hidden, clean_dy] = [&hidden, &dy].map(|x| {
                    let mut x = x.duplicate().unwrap();
                    clear_unused_rows(&mut x, &groups).unwrap();
                    x
                });
                let of =
                    |x: GroupedRows| outputs(&device, &groups, granularity, |output| activation_to(how, x, output));
                same(&what("activation"), of((&clean_hidden).into()), of(groups.rows(&hidden)));
                let of = |dy: GroupedRows, x: &Tensor| {
                    outputs(&device, &groups, granularity, |output| {
                        Ok(activation_backward_to(how, dy, x, output, None)?.0)
                    })
                };
                same(&what("backward"), of((&clean_dy).into(), &clean_hidden), of(groups.rows(&dy), &hidden));
            }
        }
    }
}

/// Codes that are gathered after the cast equal the codes that a gather casts, bit for bit. Tests every granularity with one scale or with scales per
/// row.
#[test]
fn gathered_codes_are_those_of_gathered_values() {
    let how = CurrentScaling { epsilon: 0.0, power_of_two: false };
    for (tokens, chosen, experts, channels) in [(16, 2, 4, 48), (128, 2, 3, 144), (64, 4, 4, 272)] {
        let inputs = [choices(tokens, chosen, experts, None), hostile("x", &[tokens, channels], DType::BF16)];
        let scale = Tensor::from_slice(&Device::Cpu, &[1], &[3.7f32]).unwrap();
        for granularity in
            [Granularity::PerTensor, Granularity::PerRow, Granularity::Blocks1x128, Granularity::MixedBlocks]
        {
            let on = |device: &Device| {
                let [ids, x] = [&inputs[0], &inputs[1]].map(|t| t.to_device(device).unwrap());
                let scale = scale.to_device(device).unwrap();
                let slots = slots(&ids, 1..experts).unwrap();
                let is_one = granularity == Granularity::PerTensor;
                let copies = if is_one { CodeCopies::Both } else { CodeCopies::Rows };
                let cast = |op: &dyn Fn(Output) -> Result<Produced>, copies| {
                    let statistics = &mut CastStatistics::new(device, 1).unwrap();
                    let scale = if is_one { CastScale::Given(&scale) } else { CastScale::Own(granularity, how) };
                    let to = Fp8Output { format: DType::E4M3, scale, copies, statistics, slot: 0 };
                    op(Output::Fp8(to)).unwrap().fp8().unwrap()
                };
                let expected = cast(&|output| gather_to(&x, &slots, None, output), copies);
                let own = cast(&|output| output.apply(x.clone()), CodeCopies::Rows);
                (expected, gather_quantized(&own, &slots, is_one).unwrap(), slots.groups)
            };
            for device in std::iter::once(Device::Cpu).chain(gpu()) {
                let (expected, got, groups) = on(&device);
                let what = format!("{granularity} of {tokens} tokens on {device}");
                let [expected, got] = [expected, got].map(|codes| used_values(&codes, &groups).unwrap());
                assert_eq!(expected.len(), got.len());
                for (expected, got) in expected.iter().zip(&got) {
                    assert_close(&what, expected, got, Tolerance::Exact);
                }
            }
        }
    }
}

/// Together, ranges of experts have the rows of all experts, each row once. Their sums over choices add up to the sum over all experts.
#[test]
fn ranges_of_experts_share_the_choices() {
    for (tokens, chosen, experts, favourite) in CASES.into_iter().filter(|(_, _, experts, _)| *experts > 2) {
        let (ids, all) = laid_out(tokens, chosen, experts, favourite);
        let x = normals("x", &[tokens, 3], DType::F64);
        let weights = normals("weights", &[tokens, chosen], DType::F64);
        let of = |slots: &Slots| {
            let gathered = gather_to(&x, slots, None, Output::Plain).unwrap().plain().unwrap();
            let dots: Vec<f64> = values(&gathered).iter().step_by(3).copied().collect();
            let dots = Tensor::from_slice(&Device::Cpu, &[dots.len()], &dots).unwrap();
            let combined = values(&combine(&gathered, slots, Some(&weights), None).unwrap());
            [combined, values(&weight_gradient(&dots, slots, &weights).unwrap())]
        };
        let cuts = [0, 1, experts / 2, experts];
        let parts: Vec<_> =
            cuts.windows(2).map(|cut| slots(&ids_of(&ids, [tokens, chosen]), cut[0]..cut[1]).unwrap()).collect();
        let rows: i32 = parts.iter().flat_map(|part| part.groups.counts.to_vec::<i32>().unwrap()).sum();
        assert_eq!(rows as usize, tokens * chosen);
        let counts: Vec<i32> = parts.iter().flat_map(|part| part.groups.counts.to_vec::<i32>().unwrap()).collect();
        assert_eq!(counts, all.groups.counts.to_vec::<i32>().unwrap());
        for (cut, part) in cuts.windows(2).zip(&parts) {
            let slot_of = part.slot_of.to_vec::<i32>().unwrap();
            let is_here = |&id: &i32| (cut[0]..cut[1]).contains(&(id as usize));
            assert!(slot_of.iter().zip(&ids).all(|(&slot, id)| (slot >= 0) == is_here(id)));
        }
        let (expected, got) = (of(&all), parts.iter().map(of).collect::<Vec<_>>());
        for (what, expected) in expected.iter().enumerate() {
            for (at, expected) in expected.iter().enumerate() {
                let sum: f64 = got.iter().map(|part| part[what][at]).sum();
                // Sums of up to eight terms in F64, here added in three parts, differ by some units of 2⁻⁵³; up to 5e-16 was seen.
                assert!((sum - expected).abs() < 1e-12 * expected.abs().max(1.0), "{sum}, {expected}");
            }
        }
    }
}

fn ids_of(ids: &[i32], shape: [usize; 2]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &shape, ids).unwrap()
}

/// Weights are factors of rows, so the gradient times the weights is the product of rows and gradients.
#[test]
fn the_gradient_of_gathered_rows_by_their_weights_agrees_across_devices() {
    for (tokens, chosen, experts, favourite) in CASES {
        for (dtype, channels) in [(DType::F32, 7), (DType::BF16, 300)] {
            let ids = choices(tokens, chosen, experts, favourite);
            let rows = slots(&ids, 0..experts).unwrap().pair_of.len();
            let inputs = [ids, normals("z", &[rows, channels], dtype), normals("x", &[tokens, channels], dtype)];
            // A block sums its channels in another order than the CPU.
            parity(&inputs, Tolerance::Steps(DType::F32, 64.0), |t| {
                Ok(vec![gathered_weight_gradient(&t[1], &t[2], &slots(&t[0], 0..experts)?)?])
            });
        }
    }
    let (tokens, chosen, experts, channels) = (37, 3, 5, 4);
    // Some experts are on another rank.
    let slots = slots(&choices(tokens, chosen, experts, None), 1..experts).unwrap();
    let (x, z) =
        (normals("x", &[tokens, channels], DType::F64), normals("z", &[slots.pair_of.len(), channels], DType::F64));
    let weights = normals("weights", &[tokens, chosen], DType::F64);
    let gathered = values(&gather_to(&x, &slots, Some(&weights), Output::Plain).unwrap().plain().unwrap());
    let expected: f64 = gathered.iter().zip(values(&z)).map(|(row, z)| row * z).sum();
    let gradient = values(&gathered_weight_gradient(&z, &x, &slots).unwrap());
    let product: f64 = gradient.iter().zip(values(&weights)).map(|(gradient, weight)| gradient * weight).sum();
    assert!((product - expected).abs() < 1e-9 * expected.abs().max(1.0), "{product} and {expected}");
}

/// Checks `⟨gather(x), z⟩ = ⟨x, combine(z)⟩` with and without weights: each op is the gradient of the other.
#[test]
fn combine_is_the_gradient_of_gather() {
    let (tokens, chosen, experts, channels) = (37, 3, 5, 4);
    let slots = slots(&choices(tokens, chosen, experts, None), 0..experts).unwrap();
    let rows = slots.pair_of.len();
    let (x, z) = (normals("x", &[tokens, channels], DType::F64), normals("z", &[rows, channels], DType::F64));
    let weights = normals("weights", &[tokens, chosen], DType::F64);
    for weights in [None, Some(&weights)] {
        let gathered = gather_to(&x, &slots, weights, Output::Plain).unwrap().plain().unwrap();
        let combined = combine(&z, &slots, weights, None).unwrap();
        let product = |a: &Tensor, b: &Tensor| values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum::<f64>();
        let (forward, backward) = (product(&gathered, &z), product(&x, &combined));
        // The sum of 444 products in F64 has two orders, which round by 2⁻⁵³ of the partial sums; differences of up to 4e-15 were seen.
        assert!((forward - backward).abs() < 1e-9 * forward.abs().max(1.0), "{forward} and {backward}");
    }
}

#[test]
fn choices_are_added_in_order_and_rounded_once() {
    let ids = Tensor::from_slice(&Device::Cpu, &[1, 3], &[2, 0, 1]).unwrap();
    let slots = slots(&ids, 0..3).unwrap();
    let mut z = vec![0f32; slots.pair_of.len()];
    // If choices were added in the order of experts, the sum would be 0.
    for (slot, value) in slots.slot_of.to_vec::<i32>().unwrap().into_iter().zip([1e8, -1e8, 1.0]) {
        z[slot as usize] = value;
    }
    let z = Tensor::from_slice(&Device::Cpu, &[z.len(), 1], &z).unwrap();
    let one = Tensor::from_slice(&Device::Cpu, &[1, 1], &[0.5f32]).unwrap();
    assert_eq!(combine(&z, &slots, None, Some(&one)).unwrap().to_vec::<f32>().unwrap(), [1.5]);
}

#[test]
fn a_weight_of_zero_has_no_gradient() {
    let ids = Tensor::from_slice(&Device::Cpu, &[1, 2], &[1, 0]).unwrap();
    let slots = slots(&ids, 0..2).unwrap();
    let mut dots = vec![f32::NAN; slots.pair_of.len()];
    (dots[0], dots[128]) = (0.0, 6.0);
    let dots = Tensor::from_slice(&Device::Cpu, &[dots.len()], &dots).unwrap();
    let weights = Tensor::from_slice(&Device::Cpu, &[1, 2], &[2f32, 0.0]).unwrap();
    assert_eq!(weight_gradient(&dots, &slots, &weights).unwrap().to_vec::<f32>().unwrap(), [3.0, 0.0]);
}

#[test]
fn misfits_are_errors() {
    let slots = slots(&choices(4, 2, 3, None), 0..3).unwrap();
    let x = normals("x", &[5, 8], DType::F32);
    let message = gather_to(&x, &slots, None, Output::Plain).unwrap_err().to_string();
    assert_eq!(message, "gather: x has shape [5, 8], expected [4, 8]");
    let weights = normals("weights", &[4, 2], DType::F64);
    let x = normals("x", &[4, 8], DType::F32);
    let message = gather_to(&x, &slots, Some(&weights), Output::Plain).unwrap_err().to_string();
    assert!(message.contains("gather: weights"), "{message}");
}
