//! Benchmarks of linear layers: with their casts, and of their products alone.

use super::gemm::{cost, flops, operands, recipe};
use super::shapes::expect_positive;
use ottava_checkpoint::RandomWeights;
use ottava_common::error::Result;
use ottava_models::layers::{Linear, LinearConfig};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Builder, GradFormat, MemoryPolicy, Purpose, Split};
use ottava_recipe::scaling::ScalingState;
use ottava_recipe::storage::{Formats, Gradients, Masters, Storage};
use ottava_recipe::{Recipe, RecipeName};
use ottava_tensor::bench::{Meter, Product, Rates, time_for};
use ottava_tensor::ops::{cast, normal};
use ottava_tensor::{Device, Tensor};
use serde::Serialize;
use std::rc::Rc;

/// The measurements of one linear in one recipe.
#[derive(Clone, Debug, Serialize)]
pub struct LinearRow {
    /// The name of the linear in a block, such as `mlp.down_proj`.
    pub linear: String,
    /// The recipe.
    pub recipe: RecipeName,
    /// The numbers of tokens, outputs and inputs.
    pub sizes: [usize; 3],
    /// The milliseconds of forward and backward, with the casts of input and gradient. The weight is cast before.
    pub milliseconds: f64,
    /// The milliseconds of the three products alone.
    pub products_milliseconds: f64,
    /// The milliseconds of the products at the peak rate of their types, and of the casts at the speed of a copy.
    pub floor_milliseconds: f64,
}

/// The measurements of one shape in BF16 and in another recipe.
#[derive(Clone, Debug, Serialize)]
pub struct SweepCell {
    /// The numbers of tokens, outputs and inputs.
    pub sizes: [usize; 3],
    /// The milliseconds of forward and backward in BF16.
    pub bf16_milliseconds: f64,
    /// The milliseconds of forward and backward in the other recipe.
    pub milliseconds: f64,
}

/// The milliseconds of a timed round. Rounds of products alone are as long, so the chip is equally warm. A round of a sweep is shorter.
const ROUND_MILLISECONDS: f64 = 40.0;
const SWEEP_MILLISECONDS: f64 = 10.0;

/// Returns the milliseconds of forward and backward of a linear of sizes `[T, N, K]`, with the kernels of training. Timed in rounds of about `round`
/// milliseconds.
fn layer(device: &Device, recipe: &Recipe, sizes: [usize; 3], gradients: Gradients, round: f64) -> Result<f64> {
    let [tokens, outputs, inputs] = sizes;
    let mut weights = RandomWeights { seed: 1, device: device.clone() };
    let formats = Formats { masters: Masters::None, gradients, ..Storage::Float32.formats() };
    let memory = MemoryPolicy { formats, ..MemoryPolicy::FULL };
    let mut build = Builder::new(device, recipe, Purpose::Train(memory));
    let parts = &[("linear".into(), outputs)];
    let config = LinearConfig {
        fused: &[],
        replicas: &[],
        name: "linear",
        parts,
        inputs,
        bias: false,
        std: 0.02,
        layout: ottava_recipe::param::FolderLayout::Same,
        split: Split::None,
        shared_input: None,
        uncast: None,
    };
    let mut linear = Linear::new(&mut build, config)?;
    let mut loaded = Ok(());
    linear.parameters_mut(&mut |param| {
        loaded = std::mem::replace(&mut loaded, Ok(())).and(param.load_whole(&mut weights))
    });
    loaded?;
    let mut scaling = ScalingState::new(device, build.slots, Rc::new(Undivided))?;
    let random = |width, std, seed| cast(&normal(device, &[tokens, width], std, seed)?, recipe.compute);
    let (x, dy): (Tensor, Tensor) = (random(inputs, 1.0, 2)?, random(outputs, 1e-3, 3)?);
    let sequences = Sequences::new(device, 1, tokens)?;
    let pass = |linear: &mut Linear, scaling: &mut ScalingState| -> Result<()> {
        let mut context = Context::new(scaling.casts(Mode::TRAINING), &Undivided, &sequences);
        let (y, saved) = linear.forward(x.clone(), None, &mut context)?;
        drop(y);
        linear.backward(dy.clone(), saved, &mut context)?;
        linear.parameters_mut(&mut |param| param.gradient.clear());
        Ok(())
    };
    // The first step is not timed, since delayed scales are known only from the second step on.
    quantize(&mut linear, &mut scaling)?;
    pass(&mut linear, &mut scaling)?;
    scaling.update()?;
    quantize(&mut linear, &mut scaling)?;
    time_for(device, round, || pass(&mut linear, &mut scaling))
}

/// Casts the weight for the next step.
fn quantize(linear: &mut Linear, scaling: &mut ScalingState) -> Result<()> {
    let mut params = Vec::new();
    linear.parameters_mut(&mut |param| params.push(param));
    let mut casts = scaling.casts(Mode::TRAINING);
    params.into_iter().try_for_each(|param| param.quantize(&mut casts))
}

/// Times each linear of a block in every recipe, and passes each row to `report`.
pub fn linears(
    device: &Device,
    model: &DecoderConfig,
    tokens: &[usize],
    recipes: &[RecipeName],
    gradients: Gradients,
    rates: &Rates,
    mut report: impl FnMut(LinearRow),
) -> Result<()> {
    expect_positive(tokens)?;
    let model = Decoder::describe(model, &recipe(RecipeName::Bf16))?;
    for &tokens in tokens {
        for linear in model.block_linears() {
            for &name in recipes {
                let (recipe, sizes) = (recipe(name), [tokens, linear.outputs, linear.inputs]);
                let sums = GradFormat::for_matrix(gradients, recipe.compute).sums();
                let meter = Meter { device, power: false };
                let products = Product::ALL.map(|product| cost(meter, &recipe, product, sizes, None, sums));
                let products = products
                    .into_iter()
                    .try_fold(0.0, |sum, one| Ok::<_, ottava_common::Error>(sum + one?.0.milliseconds))?;
                let cast_bytes = recipe.casts.map_or(0, |_| 4 * tokens * (linear.outputs + linear.inputs));
                let floor = 3.0 * flops(sizes) / rates.flops(operands(&recipe)) + cast_bytes as f64 / rates.copy_bytes;
                report(LinearRow {
                    linear: linear.name_in_block().to_string(),
                    recipe: name,
                    sizes,
                    milliseconds: layer(device, &recipe, sizes, gradients, ROUND_MILLISECONDS)?,
                    products_milliseconds: products,
                    floor_milliseconds: floor * 1e3,
                });
            }
        }
    }
    Ok(())
}

/// Times square and oblong linears of all `sizes` in BF16 and in the recipe called `name`, and passes each shape to `report`.
pub fn sweep(
    device: &Device,
    tokens: &[usize],
    sizes: &[usize],
    name: RecipeName,
    gradients: Gradients,
    mut report: impl FnMut(SweepCell),
) -> Result<()> {
    expect_positive(tokens)?;
    expect_positive(sizes)?;
    for &tokens in tokens {
        for &outputs in sizes {
            for &inputs in sizes {
                let sizes = [tokens, outputs, inputs];
                let time = |name| layer(device, &recipe(name), sizes, gradients, SWEEP_MILLISECONDS);
                report(SweepCell { sizes, bf16_milliseconds: time(RecipeName::Bf16)?, milliseconds: time(name)? });
            }
        }
    }
    Ok(())
}
