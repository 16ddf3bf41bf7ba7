//! The plan of each linear of a model.

use ottava_common::error::Result;
use ottava_models::Quantization;
use ottava_recipe::param::Description;
use ottava_recipe::{Cast, Decision, LinearCasts, LinearSite, ProductPrecision, Recipe};
use ottava_settings::RunConfig;
use ottava_tensor::ops::Accumulation;
use ottava_tensor::{DType, Granularity};
use serde::Serialize;

/// The decision about one linear, or about the linears of one name in all blocks.
#[derive(Clone, Debug, Serialize)]
pub struct LinearPlan {
    /// The name of the linear, with `*` in place of the number of the block.
    pub name: String,
    /// The number of linears.
    pub count: usize,
    /// The numbers of outputs and inputs.
    pub shape: [usize; 2],
    /// The operands of fprop, `y = x · Wᵀ`.
    pub fprop: String,
    /// The operands of dgrad, `dx = dy · W`.
    pub dgrad: String,
    /// The operands of wgrad, `dW = dyᵀ · x`.
    pub wgrad: String,
    /// The reason for the decision.
    pub reason: String,
}

/// Says whether a run of adapters keeps the FP8 codes of the model folder. Returns `None` for a run without adapters, a recipe without casts, or a
/// folder without FP8 codes.
pub(super) fn folder_codes(run: &RunConfig, recipe: &Recipe) -> Result<Option<String>> {
    let folder = &run.model.path;
    let (Some(casts), true) = (recipe.casts.as_ref(), run.lora.r > 0 && folder.is_dir()) else { return Ok(None) };
    let Some(Quantization { method, scales }) = Quantization::of_folder(folder)? else { return Ok(None) };
    let own = casts.weight.granularity.of_rows();
    let kept = scales.granularity() == Some(own);
    let scales = scales.granularity().map_or("other blocks of".to_string(), |scales| scales.to_string());
    Ok(Some(match kept {
        true => format!(
            "frozen weights keep the FP8 codes of the folder ({method}, {scales} scales), except fused weights whose parts have different scales"
        ),
        false => format!(
            "frozen weights are cast again: the folder has FP8 codes with {scales} scales ({method}), the recipe {own} scales"
        ),
    }))
}

/// Returns the linears of a model under `recipe`, with one entry per name and decision. The head is last.
pub(super) fn linears(model: &Description, recipe: &Recipe) -> Vec<LinearPlan> {
    let mut kinds: Vec<Vec<&(LinearSite, Decision)>> = Vec::new();
    for linear in &model.linears {
        match kinds.iter_mut().find(|kind| kind[0].0.name_in_block() == linear.0.name_in_block()) {
            Some(kind) => kind.push(linear),
            None => kinds.push(vec![linear]),
        }
    }
    let high = format!("{}, exact", recipe.compute);
    let head = model.head.iter().map(|site| LinearPlan {
        name: site.name.clone(),
        count: 1,
        shape: [site.outputs, site.inputs],
        fprop: high.clone(),
        dgrad: high.clone(),
        wgrad: high.clone(),
        reason: "the head stays in high precision in every recipe".into(),
    });
    let plans = kinds.iter().flat_map(|kind| linear_plans(kind, recipe.compute)).chain(head);
    let wgrad = |plan: LinearPlan| match model.frozen {
        0 => plan,
        _ if model.modules.trains(&plan.name) => plan,
        _ => LinearPlan { wgrad: "none, the weight is frozen".into(), ..plan },
    };
    plans.map(wgrad).collect()
}

/// Returns one entry for each decision about the linears of one name. `blocks` has one linear per block.
fn linear_plans(blocks: &[&(LinearSite, Decision)], compute: DType) -> Vec<LinearPlan> {
    let mut groups: Vec<(&Decision, Vec<usize>)> = Vec::new();
    for (block, (_, decision)) in blocks.iter().enumerate() {
        match groups.iter_mut().find(|(other, _)| *other == decision) {
            Some((_, members)) => members.push(block),
            None => groups.push((decision, vec![block])),
        }
    }
    let site = &blocks[0].0;
    let plan = |(decision, members): (&Decision, Vec<usize>)| {
        let [fprop, dgrad, wgrad] = match &decision.fp8 {
            Some((LinearCasts { input, weight, grad_output }, how)) => {
                let product = |a: &str, x: String, b: &str, y: String, how: ProductPrecision| {
                    let sums = match how {
                        ProductPrecision::High => return format!("{compute}, exact sums"),
                        ProductPrecision::Fp8(Accumulation::Fast) => "fast sums",
                        ProductPrecision::Fp8(Accumulation::Exact) => "exact sums",
                    };
                    format!("{a} {x} · {b} {y}, {sums}")
                };
                let rows = |cast: &Cast| operand(cast.format, cast.granularity.of_rows());
                let columns = |cast: &Cast| operand(cast.format, cast.granularity.of_columns());
                [
                    product("x", rows(input), "W", rows(weight), how.fprop),
                    product("dy", rows(grad_output), "W", columns(weight), how.dgrad),
                    product("dy", columns(grad_output), "x", columns(input), how.wgrad),
                ]
            }
            None => [(); 3].map(|()| format!("{compute}, exact sums")),
        };
        let count = members.len() * site.matrices()[0];
        let which = if members.len() == blocks.len() { "*".to_string() } else { ranges(&members) };
        let name = site.name_in_blocks(&which);
        LinearPlan {
            name,
            count,
            shape: [site.outputs, site.inputs],
            fprop,
            dgrad,
            wgrad,
            reason: decision.reason.clone(),
        }
    };
    groups.into_iter().map(plan).collect()
}

/// Abbreviates ascending numbers: `3`, or `{0-2,7}`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let runs = runs.collect::<Vec<_>>().join(",");
    if numbers.len() == 1 { runs } else { format!("{{{runs}}}") }
}

/// Returns a short name of codes: their format, and their granularity unless it is per tensor.
fn operand(format: DType, granularity: Granularity) -> String {
    let format = if format == DType::E4M3 { "E4M3" } else { "E5M2" };
    match granularity {
        Granularity::PerTensor => format.to_string(),
        granularity if granularity.has_tensor_scale() => granularity.to_string(),
        granularity => format!("{format} {granularity}"),
    }
}
