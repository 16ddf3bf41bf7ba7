//! Benchmarks of the products of a model's linear layers.

use super::shapes::expect_positive;
use ottava_common::error::Result;
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::{Cast, LinearCasts, Precision, ProductPrecision, Recipe, RecipeName};
use ottava_tensor::DType;
use ottava_tensor::bench::{Cost, Meter, Operands, Product, Rates, gemm_cost};
use ottava_tensor::ops::{Accumulation, real_type};
use serde::Serialize;

/// The measurements of one product.
#[derive(Clone, Debug, Serialize)]
pub struct GemmRow {
    /// The name of the linear, such as `mlp.down_proj`.
    pub linear: String,
    /// The kind of the product.
    pub product: Product,
    /// The recipe.
    pub recipe: RecipeName,
    /// The numbers of rows, outputs and inputs. Rows are the tokens, or the rows of all experts.
    pub sizes: [usize; 3],
    /// The number of experts that share the rows.
    pub experts: Option<usize>,
    /// The type of the result.
    pub out: &'static str,
    /// The measured cost.
    #[serde(flatten)]
    pub cost: Cost,
    /// The milliseconds at the peak rate of the operand types.
    pub floor_milliseconds: f64,
}

/// Returns the floating-point operations of one product of these sizes.
pub(super) fn flops([tokens, outputs, inputs]: [usize; 3]) -> f64 {
    2.0 * tokens as f64 * outputs as f64 * inputs as f64
}

/// Returns the recipe called `name` with its usual settings.
pub(super) fn recipe(name: RecipeName) -> Recipe {
    Precision { recipe: name, ..Precision::default() }.recipe()
}

/// Returns the operand types of the recipe's products.
pub(super) fn operands(recipe: &Recipe) -> Operands {
    let of = |cast: Cast| (cast.format, cast.granularity);
    match recipe.casts {
        None => Operands::Plain(recipe.compute),
        Some(LinearCasts { input, weight, grad_output }) => {
            Operands::Fp8 { input: of(input), weight: of(weight), grad_output: of(grad_output) }
        }
    }
}

/// Measures `product` alone, and returns its cost and the type of its result. Gradients of weights have type `gradients` if the recipe allows it.
/// With `experts`, the rows are divided among this number of matrices.
pub(super) fn cost(
    meter: Meter,
    recipe: &Recipe,
    product: Product,
    sizes: [usize; 3],
    experts: Option<usize>,
    gradients: DType,
) -> Result<(Cost, DType)> {
    let (out, precision) = match product {
        Product::Fprop => (recipe.compute, recipe.products.fprop),
        Product::Dgrad => (recipe.compute, recipe.products.dgrad),
        Product::Wgrad if recipe.compute == DType::BF16 => (gradients, recipe.products.wgrad),
        Product::Wgrad => (real_type(recipe.compute), recipe.products.wgrad),
    };
    let (operands, accumulation) = match precision {
        ProductPrecision::Fp8(accumulation) => (operands(recipe), accumulation),
        ProductPrecision::High => (Operands::Plain(recipe.compute), Accumulation::Exact),
    };
    Ok((gemm_cost(meter, product, sizes, experts, operands, out, accumulation)?, out))
}

/// Times the three products of each linear of a block in every recipe, and passes each row to `report`.
pub fn gemms(
    meter: Meter,
    model: &DecoderConfig,
    tokens: usize,
    recipes: &[RecipeName],
    gradients: DType,
    rates: &Rates,
    mut report: impl FnMut(GemmRow),
) -> Result<()> {
    expect_positive(&[tokens])?;
    let model = Decoder::describe(model, &recipe(RecipeName::Bf16))?;
    for linear in model.block_linears() {
        for product in Product::ALL {
            for &name in recipes {
                let (recipe, sizes) = (recipe(name), [linear.rows(tokens), linear.outputs, linear.inputs]);
                let experts = linear.experts.map(|experts| experts.count);
                let (cost, out) = cost(meter, &recipe, product, sizes, experts, gradients)?;
                let floor_milliseconds = flops(sizes) / rates.flops(operands(&recipe)) * 1e3;
                let (linear, recipe, out) = (linear.name_in_block().to_string(), name, out.name());
                report(GemmRow { linear, product, recipe, sizes, experts, out, cost, floor_milliseconds });
            }
        }
    }
    Ok(())
}
