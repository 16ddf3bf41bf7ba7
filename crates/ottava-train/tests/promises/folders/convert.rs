//! A converted checkpoint computes the same results as the program that saved it.

use crate::setup::{largest_error, logits};
use ottava_checkpoint::FolderWeights;
use ottava_convert::convert;
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::param::Purpose;
use ottava_recipe::{Precision, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use serde_json::Value;
use std::path::Path;

/// Computes the logits of a folder in F32.
fn computed(folder: &Path, ids: &[i32]) -> Vec<f64> {
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let recipe = Precision { recipe: RecipeName::Fp32, ..Precision::default() }.recipe();
    let mut weights = FolderWeights::open(folder).unwrap();
    let mut decoder = Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, ids.len(), &mut weights).unwrap();
    weights.finish(&sizes).unwrap();
    decoder.quantize_weights().unwrap();
    values(&logits(&decoder, &Tensor::from_slice(&Device::Cpu, &[ids.len()], ids).unwrap()))
}

/// `scripts/make_megatron.py` computed the logits from the tensors of the ranks in Megatron's layout: groups of heads, gate and up of each rank, and
/// rotary positions of the two halves of a head or of neighbours in it. The cases include norms of heads, and biases.
#[test]
fn models_of_megatron_have_the_logits_of_their_checkpoints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ottava-convert/tests/data/megatron");
    for name in ["halves", "interleaved-norm", "interleaved-bias"] {
        let text = std::fs::read(root.join(name).join("logits.json")).unwrap();
        let recorded: Value = serde_json::from_slice(&text).unwrap();
        let ids: Vec<i32> = serde_json::from_value(recorded["ids"].clone()).unwrap();
        let expected: Vec<Vec<f64>> = serde_json::from_value(recorded["logits"].clone()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let [output, like] = ["model", "like"].map(|name| folder.path().join(name));
        for given in [None, Some(&*like)] {
            convert(&root.join(name), given, &output, DType::F32).unwrap();
            let error = largest_error(&computed(&output, &ids), &expected.concat());
            // F32 is compared with binary64.
            assert!(error < 1e-5, "{name}, like {given:?}: logits are {error:e} apart");
            if given.is_some() {
                continue;
            }
            std::fs::rename(&output, &like).unwrap();
            // Attention depends on positions, so another base changes the logits.
            let config = std::fs::read_to_string(like.join("config.json")).unwrap();
            std::fs::write(like.join("config.json"), config.replace("10000.0", "100.0")).unwrap();
            let error = largest_error(&computed(&like, &ids), &expected.concat());
            assert!(error > 1e-2, "{name}: positions of another base go unnoticed: {error:e}");
            std::fs::write(like.join("config.json"), config).unwrap();
        }
    }
}
