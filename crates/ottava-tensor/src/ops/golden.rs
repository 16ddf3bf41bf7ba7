//! Compares casts and scaling updates with bytes and states recorded from Transformer Engine; see `tests/data/README.md`.

use super::{AmaxReducer, CastStatistics, CodeCopies, CurrentScaling, DelayedScales, DelayedScaling, NonFinite};
use super::{amax, delayed_scaling, quantize, quantize_blocks, take_scale, transpose};
use crate::testing::{Tolerance, assert_close, gpu};
use crate::{DType, Device, Granularity, Tensor};
use safetensors::SafeTensors;

fn golden() -> SafeTensors<'static> {
    static FILE: &[u8] = include_bytes!("../../tests/data/transformer_engine.safetensors");
    SafeTensors::deserialize(FILE).expect("the recorded file is whole")
}

fn tensor(name: &str, dtype: DType) -> Tensor {
    let golden = golden();
    let view = golden.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    Tensor::from_bytes(&Device::Cpu, view.shape(), dtype, view.data()).expect("shape and bytes agree")
}

fn devices() -> Vec<Device> {
    std::iter::once(Device::Cpu).chain(gpu()).collect()
}

const FORMATS: [(&str, DType); 2] = [("e4m3", DType::E4M3), ("e5m2", DType::E5M2)];

#[test]
fn casts_with_a_given_scale_match_transformer_engine() {
    let x = tensor("x_bf16_bits", DType::BF16);
    for device in devices() {
        let x = x.to_device(&device).unwrap();
        for (name, format) in FORMATS {
            for scale in ["1.0", "0.37", "64.0", "1e-30"] {
                let given = Tensor::from_slice(&device, &[1], &[scale.parse::<f32>().unwrap()]).unwrap();
                let mut seen = CastStatistics::new(&device, 1).unwrap();
                let q = quantize(&x, format, &given, CodeCopies::Both, &mut seen, 0).unwrap();
                let what = format!("cast/{name}/{scale}");
                let expected = tensor(&format!("{what}/bytes"), format);
                assert_close(&what, &expected, &q.codes.unwrap(), Tolerance::Exact);
                assert_close(&what, &transpose(&expected).unwrap(), &q.transposed.unwrap(), Tolerance::Exact);
                assert_close(&what, &tensor(&format!("{what}/amax"), DType::F32), &seen.amax, Tolerance::Exact);
            }
        }
    }
}

#[test]
fn current_scaling_matches_transformer_engine() {
    let mut bits = tensor("x_bf16_bits", DType::BF16).to_vec::<half::bf16>().unwrap();
    bits[7 * 272 + 5] = half::bf16::ONE;
    for device in devices() {
        let x = Tensor::from_slice(&device, &[160, 272], &bits).unwrap();
        for (name, format) in FORMATS {
            for (word, power_of_two) in [("False", false), ("True", true)] {
                let how = CurrentScaling { epsilon: 0.0, power_of_two };
                let scale = take_scale(&mut amax(&x).unwrap(), format, how).unwrap();
                let mut seen = CastStatistics::new(&device, 1).unwrap();
                let q = quantize(&x, format, &scale, CodeCopies::Rows, &mut seen, 0).unwrap();
                let what = format!("current/{name}/{word}");
                assert_close(&what, &tensor(&format!("{what}/bytes"), format), &q.codes.unwrap(), Tolerance::Exact);
                assert_close(&what, &tensor(&format!("{what}/scale_inv"), DType::F32), &q.scale_inv, Tolerance::Exact);
            }
        }
    }
}

#[test]
fn block_scaling_matches_transformer_engine() {
    let x = tensor("block/x_bits", DType::BF16);
    for device in devices() {
        let x = x.to_device(&device).unwrap();
        for (granularity, of_rows, of_columns) in [
            (Granularity::Blocks1x128, "1d", "1d"),
            (Granularity::Blocks128x128, "2d", "2d"),
            (Granularity::MixedBlocks, "1d", "2d"),
        ] {
            for (word, power_of_two) in [("False", false), ("True", true)] {
                let how = CurrentScaling { epsilon: 0.0, power_of_two };
                let mut seen = CastStatistics::new(&device, 1).unwrap();
                let q = quantize_blocks(&x, DType::E4M3, granularity, how, CodeCopies::Both, &mut seen, 0).unwrap();
                let [rows, columns] = [of_rows, of_columns].map(|blocks| format!("block/{blocks}/{word}"));
                let codes = [(&rows, "bytes", q.codes.unwrap()), (&columns, "col_bytes", q.transposed.unwrap())];
                for (what, part, got) in codes {
                    let expected = tensor(&format!("{what}/{part}"), DType::E4M3);
                    assert_close(&format!("{what}/{part}"), &expected, &got, Tolerance::Exact);
                }
                let scales = [
                    (&rows, "scale_inv", q.scale_inv, 256, granularity.of_rows()),
                    (&columns, "col_scale_inv", *q.transposed_scale_inv.unwrap(), 128, granularity.of_columns()),
                ];
                for (what, part, got, length, granularity) in scales {
                    let mut expected = tensor(&format!("{what}/{part}"), DType::F32);
                    if granularity == Granularity::Blocks128x128 {
                        // The recorded scales beyond the last block are arbitrary bytes.
                        let width = expected.shape()[1];
                        let beyond =
                            expected.host_mut::<f32>().chunks_mut(width).flat_map(|row| &mut row[length / 128..]);
                        beyond.for_each(|scale| *scale = 0.0);
                    }
                    assert_close(&format!("{what}/{part}"), &expected, &got, Tolerance::Exact);
                }
            }
        }
    }
}

#[test]
fn delayed_scaling_follows_transformer_engine_for_forty_updates() {
    let reducers = [("max", AmaxReducer::Max), ("most_recent", AmaxReducer::MostRecent)];
    for device in devices() {
        for window in [1, 2, 4, 16] {
            for (reducer_name, reducer) in reducers {
                for (name, format) in FORMATS {
                    for margin in [0, 2] {
                        let what = format!("delayed/{window}/{reducer_name}/{name}/{margin}");
                        let how = DelayedScaling { reducer, margin, interval: 1, non_finite: NonFinite::Keep };
                        follow(&device, &what, window, format, how);
                    }
                }
            }
        }
    }
}

fn follow(device: &Device, what: &str, window: usize, format: DType, how: DelayedScaling) {
    let recorded = |part: &str| tensor(&format!("{what}/{part}"), DType::F32);
    let (amaxes, histories, scales) = (recorded("amax"), recorded("history"), recorded("scale"));
    let mut state = DelayedScales::new(device, window, &[format.max_finite().unwrap(); 8]).unwrap();
    for step in 0..40 {
        let row = |t: &Tensor, shape: &[usize]| t.rows(step, step + 1).unwrap().reshape(shape).unwrap();
        let mut measured = row(&amaxes, &[8]).to_device(device).unwrap();
        delayed_scaling(&mut measured, &mut state, how).unwrap();
        assert_close(&format!("{what} scale, step {step}"), &row(&scales, &[8]), &state.scale, Tolerance::Exact);
        assert_close(
            &format!("{what} history, step {step}"),
            &row(&histories, &[window, 8]),
            &state.history,
            Tolerance::Exact,
        );
    }
}
