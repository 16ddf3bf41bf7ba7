//! vLLM requantizes weights with block scales. No weight changes by this.

use super::export::{DOWN, FORMATS, checkpoint, codes_of_training, exported, inputs, numbers, precision, replace};
use ottava_checkpoint::ModelFiles;
use ottava_convert::export::{Convention, Fp8Format, Scheme};
use ottava_recipe::RecipeName;
use ottava_tensor::DType;
use ottava_tensor::fp8::E4M3;

/// Computes vLLM's `requant_weight_ue8m0_inplace`, which runs on Hopper GPUs with DeepGEMM. It dequantizes a block, divides its amax (at least 1e-4)
/// by 448, rounds this up to a power of two, and casts with the result as scale.
fn requantized(codes: &[u8], scale: f32) -> (Vec<u8>, f32) {
    let values: Vec<f32> = codes.iter().map(|code| E4M3(*code).to_f32() * scale).collect();
    let amax = values.iter().fold(1e-4f32, |amax, value| amax.max(value.abs()));
    let rounded = (amax / 448.0).log2().ceil().exp2();
    (values.iter().map(|value| E4M3::from_f32(value * (1.0 / rounded)).0).collect(), rounded)
}

/// The codes come from training, and from weights that are cast for the export.
#[test]
fn requantization_by_vllm_changes_no_weight() {
    let inputs = inputs(256);
    for recipe in [RecipeName::Fp8Block, RecipeName::Bf16] {
        let folder = checkpoint(inputs.path(), precision(recipe));
        let output = inputs.path().join(format!("exported-{}", recipe.as_str()));
        // 225 is rounded to the code of 224.
        replace(&folder, DOWN, |i| (225.0 - (i % 97) as f32) / 2048.0);
        exported(&folder, FORMATS[0], &output).unwrap();
        assert_eq!(unchanged_by_vllm(&ModelFiles::open(&output).unwrap(), "_scale_inv"), [22, 24]);
    }
}

/// Engines multiply the same codes as training, in all formats with blocks, also if other linears have no whole blocks.
#[test]
fn codes_of_powers_of_two_go_from_training_to_vllm_unchanged() {
    for (intermediate, blocks) in [(256, 24), (192, 12)] {
        let inputs = inputs(intermediate);
        let precision = precision(RecipeName::Fp8Block);
        let folder = checkpoint(inputs.path(), precision.clone());
        let (trained, checkpoint) =
            (codes_of_training(&folder, &precision.recipe()), ModelFiles::open(&folder).unwrap());
        for (layout, scheme) in FORMATS.into_iter().filter(|(_, scheme)| *scheme == Scheme::Block) {
            let output = inputs.path().join(format!("exported-{layout:?}"));
            let report = exported(&folder, (layout, scheme), &output).unwrap();
            assert!(report.linears.iter().all(|linear| linear.recast.is_none()), "{report:?}");
            let files = ModelFiles::open(&output).unwrap();
            for (name, (codes, scales)) in &trained {
                if intermediate == 192 && name.contains(".mlp.") {
                    assert_eq!(
                        files.read(name).unwrap(),
                        checkpoint.read(name).unwrap(),
                        "{name} is not the trained one"
                    );
                    continue;
                }
                let scale = Fp8Format { layout, scheme }.scale_name(name.strip_suffix(".weight").unwrap());
                assert_eq!((&files.read(name).unwrap(), &numbers(&files, &scale)), (codes, scales), "{name}");
            }
            let ending = if layout == Convention::DeepSeek { "_scale_inv" } else { "_scale" };
            assert_eq!(unchanged_by_vllm(&files, ending), [blocks, blocks], "{layout:?}");
        }
    }
}

/// Requantizes the blocks of a folder, and checks that no value changes. Returns the number of blocks that keep their bytes, and the number of all
/// blocks. The names of scales end in `ending`.
fn unchanged_by_vllm(files: &ModelFiles, ending: &str) -> [usize; 2] {
    let (mut blocks, mut same) = (0, 0);
    for name in files.names().filter(|name| name.ends_with("_proj.weight")) {
        let (info, codes) = (files.info(name).unwrap(), files.read(name).unwrap());
        if info.dtype != DType::E4M3 {
            continue;
        }
        let (shape, scales) = (info.shape, numbers(files, &format!("{name}{ending}")));
        for (i, scale) in scales.into_iter().enumerate() {
            assert_eq!(scale.log2().fract(), 0.0, "{name}: {scale} is no power of two");
            let (row, column) = (i / (shape[1] / 128) * 128, i % (shape[1] / 128) * 128);
            let block: Vec<u8> =
                (row..row + 128).flat_map(|r| &codes[r * shape[1] + column..][..128]).copied().collect();
            let (again, rescaled) = requantized(&block, scale);
            let value = |(code, scale): (&u8, f32)| E4M3(*code).to_f32() * scale;
            for (before, after) in block.iter().zip(&again) {
                assert_eq!(value((before, scale)), value((after, rescaled)), "{name}, block {i}");
            }
            // If the amax was rounded down to 224, half of the largest code, requantization doubles the codes and halves the scale.
            let largest = block.iter().map(|code| E4M3(*code).to_f32().abs()).fold(0.0, f32::max);
            assert!((224.0..=448.0).contains(&largest), "{name}, block {i}: the largest code is {largest}");
            assert_eq!(again == block && rescaled == scale, largest > 224.0, "{name}, block {i}");
            (blocks, same) = (blocks + 1, same + usize::from(again == block));
        }
    }
    [same, blocks]
}
