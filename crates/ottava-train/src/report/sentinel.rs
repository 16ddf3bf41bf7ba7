//! Writes `sentinel.jsonl`: one line for each comparison of the recipe with BF16.

use ottava_recipe::scaling::{Comparison, PrecisionComparison, Quantity};
use ottava_sentinel::{Decision, Finding, Verdict};
use serde_json::{Map, Value, json};

/// Returns the fields of a line:
/// * the losses and their difference
/// * the agreement of the gradients of all weights of the blocks
/// * the findings, each with a sentence, and the decision
/// * by tensor, the relative `error` of each cast, and of the output and the input gradient of each block
/// * by tensor, `slope`, `cosine` and `norm_ratio` of products and gradients
/// * by linear, how much its casts change the loss
pub fn sentinel_line(
    comparison: &PrecisionComparison,
    verdict: &Verdict,
    decision: &Decision,
) -> Vec<(&'static str, Value)> {
    let finding = |finding: &Finding| {
        json!({"tensor": finding.tensor, "measure": finding.measure, "value": finding.value, "bound": finding.bound,
               "text": finding.to_string()})
    };
    let mut tensors: Map<String, Value> = Map::new();
    for compared in &comparison.tensors {
        let entry = tensors.entry(compared.quantity.as_str()).or_insert_with(|| Value::Object(Map::new()));
        entry[&compared.name] = numbers(compared, comparison);
    }
    let mut fields = vec![
        ("loss", json!(comparison.losses[0])),
        ("loss_bf16", json!(comparison.losses[1])),
        ("loss_gap", json!(verdict.loss_gap)),
        ("gradient_cosine", json!(verdict.cosine)),
        ("gradient_norm_ratio", json!(verdict.norm_ratio)),
        ("findings", verdict.findings.iter().map(finding).collect()),
        ("decision", json!(decision)),
    ];
    for quantity in Quantity::ALL {
        if let Some(of_quantity) = tensors.remove(quantity.as_str()) {
            fields.push((quantity.as_str(), of_quantity));
        }
    }
    fields
}

fn numbers(compared: &Comparison, comparison: &PrecisionComparison) -> Value {
    let (error, slope) = (compared.error(), compared.slope());
    match compared.quantity {
        Quantity::Cast | Quantity::Output | Quantity::GradInput => json!({"error": error}),
        Quantity::Fprop | Quantity::Dgrad | Quantity::Wgrad => json!({"error": error, "slope": slope}),
        Quantity::LossCost => json!(comparison.loss_cost(compared)),
        Quantity::Gradient => json!({
            "error": error,
            "slope": slope,
            "cosine": compared.cosine(),
            "norm_ratio": compared.norm_ratio(),
        }),
    }
}
