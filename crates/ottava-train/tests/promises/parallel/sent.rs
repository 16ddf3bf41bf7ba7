//! Activations that ranks send as FP8 codes change results by no more than the error of the codes.

use crate::parallel::divided::{Setup, families, llama, train};
use crate::parallel::mesh::{Seen, distance};
use ottava_parallel::SentActivations;
use ottava_recipe::RecipeName;
use serde_json::json;

/// The largest relative errors of gradients and of losses that codes may cause. The mean error of an E4M3 code is 2.6 % of its value.
const GRADIENTS: f64 = 0.2;
const LOSSES: f64 = 2e-3;

/// Returns only the gradients, or only the losses and norms.
fn only(seen: &Seen, prefix: &str) -> Seen {
    seen.iter()
        .filter(|(name, _)| name.starts_with(prefix))
        .map(|(name, values)| (name.clone(), values.clone()))
        .collect()
}

#[test]
fn activations_sent_as_codes_change_results_by_their_rounding() {
    for (name, keys) in families().into_iter().filter(|(name, _)| ["llama", "gemma2"].contains(name)) {
        let alone = Setup::new(keys, RecipeName::Fp32);
        let expected = train(&alone);
        for mesh in [[1, 1, 1, 2], [1, 1, 1, 4], [1, 2, 1, 1], [1, 2, 1, 2]] {
            let mut sends = alone.on(mesh);
            sends.mesh.sent = SentActivations::Float8;
            let got = train(&sends);
            let (apart, tensor) = distance(&only(&expected, "gradient"), &only(&got, "gradient"));
            assert!(1e-3 < apart && apart < GRADIENTS, "{name} on {mesh:?}: {tensor} is {apart:.1e} apart");
            let losses = |seen: &Seen| seen["losses and norms"].iter().step_by(2).copied().collect::<Vec<_>>();
            for (expected, got) in losses(&expected).iter().zip(losses(&got)) {
                assert!((expected / got - 1.0).abs() < LOSSES, "{name} on {mesh:?}: loss {got}, expected {expected}");
            }
        }
    }
}

/// With data parallelism, ranks send gradients and no activations.
#[test]
fn ranks_that_send_no_activations_have_the_same_bits() {
    let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
    let expected = train(&alone.on([2, 1, 1, 1]));
    alone.mesh.sent = SentActivations::Float8;
    assert_eq!(distance(&expected, &train(&alone.on([2, 1, 1, 1]))).0, 0.0);
}
