//! The batch of evaluations changes no metric beyond rounding.

use crate::runs::resume::{self, STEPS, metrics, state, write_inputs};
use ottava_data::Packing;
use ottava_recipe::RecipeName;
use ottava_tensor::Device;
use ottava_train::trainer::Start;

#[test]
fn the_batch_of_evaluations_changes_losses_by_rounding_alone() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for packing in [Packing::Wrapped, Packing::Bfd] {
        let with = |recipe: RecipeName, batch: Option<usize>| {
            let run = inputs.path().join(format!("{packing:?}-{recipe:?}-{batch:?}"));
            let mut config = resume::config(inputs.path(), &run, recipe);
            (config.data.packing, config.data.document_mask) = (packing, Some(packing != Packing::Wrapped));
            (config.data.val_set_size, config.evaluation.per_device_eval_batch_size) = (13.0, batch);
            resume::train(&config, &Device::Cpu, &Start::New, STEPS + 1).unwrap();
            (metrics(&run), state(&run))
        };
        let of = |batch| with(RecipeName::Bf16, batch);
        let (expected, weights) = of(None);
        for batch in [1, 4, 64] {
            let (found, weights_of_batch) = of(Some(batch));
            assert!(weights_of_batch == weights, "evaluations change no weights");
            for (found, expected) in found.iter().zip(&expected) {
                let [found, expected] = [found, expected].map(|line| line["eval_loss"].as_f64());
                let agree = match (found, expected) {
                    (Some(found), Some(expected)) => (found - expected).abs() <= 1e-12 * expected,
                    (found, expected) => found == expected,
                };
                assert!(agree, "{packing:?} {batch}: {found:?} and {expected:?}");
            }
        }
        assert!(of(Some(6)) == (expected, weights), "the batch of training is the default");
        // The scale of a tensor is the scale of all rows of its batch.
        let [alone, together] = [Some(1), None].map(|batch| with(RecipeName::Fp8Current, batch).0);
        assert_ne!(alone[0]["eval_loss"], together[0]["eval_loss"], "{packing:?}");
    }
}
