//! LoRA of experts: each expert has its own low-rank product. Hu et al. 2021, arXiv:2106.09685.

use super::dispatch::{Dispatch, Dispatched};
use ottava_common::error::Result;
use ottava_common::hash::name_hash;
use ottava_recipe::ExpertCounts;
use ottava_recipe::context::Context;
use ottava_recipe::lora::{ExpertParameter, PEFT_PREFIX};
use ottava_recipe::param::{
    AdapterMatrix, Builder, ExpertAdapter, FolderLayout, FolderTensor, Init, Param, Split, StackOrder, WgradProduct,
};
use ottava_tensor::ops::{
    Accumulation, DrawnColumns, Groups, Operand, add, cast, dropout, embedding, grouped_gemm_nt, grouped_wgrad_into,
    real_type, scale_columns, transpose,
};
use ottava_tensor::{DType, Tensor};
use std::ops::Range;

/// `y += s · (x · A[e]ᵀ) · B[e]ᵀ`; `dx += s · (dy · B[e]) · A[e]`; `dA[e] += s · (dy · B[e])ᵀ · x`; `dB[e] += dyᵀ · s · (x · A[e]ᵀ)`, over the rows of
/// each expert `e`, in the compute type.
///
/// The adapter of gate and up is one adapter, as in PEFT. With dropout, `x` in these formulas is the input after dropout, and `(dy · B[e]) · A[e]` is
/// multiplied by the same mask. The choices of a token share the mask of the token.
///
/// The grouped product of the weight has no addend, so the product of the adapter is rounded before the sum is rounded.
///
/// The kernels for tensor cores read rows of multiples of 16 bytes. So products read `A` and `B` padded with zeros to a multiple `R` of 8 ranks.
pub struct GroupedAdapter {
    a: Param, /* [E · r, K] */
    b: Param, /* [E · N, r] */
    /// The rank `r` of the matrices of an expert.
    rank: usize,
    /// The factor `s` for each of the `R` ranks, in the type of sums. `None` for a factor of 1.
    scales: Option<Tensor>,
    dropout: Option<Dropout>,
}

/// The dropout of an adapter's input.
struct Dropout {
    /// The probability that an element of the input is 0.
    p: f64,
    columns: DrawnColumns,
    /// Ones, `[1, K]` in the compute type.
    ones: Tensor,
}

/// The parameter that a [`GroupedAdapter`] adapts.
pub struct GroupedAdapterConfig<'a> {
    /// The parameter of all experts.
    pub parameter: &'a ExpertParameter,
    /// The order of the elements of the parameter in the memory of transformers.
    pub order: StackOrder,
    /// Whether PEFT adapts another parameter of the same experts after this one.
    pub is_inner: bool,
    /// The numbers of experts and of choices per token.
    pub experts: ExpertCounts,
    /// The experts of this rank.
    pub own: Range<usize>,
    /// The numbers of outputs and of inputs of an expert.
    pub sizes: [usize; 2],
}

/// The ranks are padded to a multiple of this number.
const RANKS: usize = 8;

impl GroupedAdapter {
    /// Creates the adapters of all experts of this rank. Returns `None` if the [`Lora`](ottava_recipe::lora::Lora) of the builder does not select the
    /// parameter.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) with magnitudes, and if the targets select a part of the parameter.
    pub fn new(build: &mut Builder, config: GroupedAdapterConfig) -> Result<Option<GroupedAdapter>> {
        let GroupedAdapterConfig { parameter, order, is_inner, experts, own, sizes: [outputs, inputs] } = config;
        let Some(lora) = build.lora else { return Ok(None) };
        let Some(found) = lora.of_experts(parameter)? else { return Ok(None) };
        lora.expect_without_magnitudes(&parameter.name)?;
        let (module, name) = parameter.name.rsplit_once('.').expect("a parameter is in a module");
        let is_divided = own.len() < experts.count;
        let split = if is_divided { Split::Expert } else { Split::None };
        let tensor = |expert: usize, matrix: AdapterMatrix| {
            let (of, shape) = match matrix {
                AdapterMatrix::A => ("lora_A", vec![found.rank, inputs]),
                AdapterMatrix::B => ("lora_B", vec![outputs, found.rank]),
            };
            let place =
                ExpertAdapter { matrix, order, expert, experts: experts.count, linears: parameter.linears, is_inner };
            FolderTensor {
                name: format!("{PEFT_PREFIX}{module}.{expert}.{name}.{of}.weight"),
                shape,
                layout: FolderLayout::ExpertAdapter(place),
            }
        };
        let mut param = |matrix: AdapterMatrix, init: Init| -> Result<Param> {
            let shards = own.clone().map(|expert| build.shard(tensor(expert, matrix), split)).collect::<Result<_>>()?;
            let param = Param::trained(build, shards, init)?;
            Ok(if is_divided { param.within_stack(tensor(0, matrix).name) } else { param })
        };
        // Kaiming's uniform distribution with a = sqrt(5), as in PEFT.
        let a = param(AdapterMatrix::A, Init::Uniform((inputs as f32).sqrt().recip()))?;
        let b = param(AdapterMatrix::B, Init::Zeros)?.at_rate(lora.b_rate);
        let idle = own.len() - own.len() * experts.chosen.min(experts.count) / experts.count;
        build.description.idle_adapters += idle * found.rank * (inputs + outputs);
        let (device, compute) = (build.device, build.recipe.compute);
        let vector = |len: usize, value: f32, dtype: DType| -> Result<Tensor> {
            Ok(cast(&Tensor::from_slice(device, &[len], &vec![value; len])?, dtype)?)
        };
        let scale = found.scale as f32;
        let scales = (scale != 1.0)
            .then(|| vector(found.rank.next_multiple_of(RANKS), scale, real_type(compute)))
            .transpose()?;
        let columns = DrawnColumns { key: name_hash(0, a.identity.name()), first: 0 };
        let of_dropout = || -> Result<Dropout> {
            Ok(Dropout { p: lora.dropout, columns, ones: vector(inputs, 1.0, compute)?.reshape(&[1, inputs])? })
        };
        let dropout = (lora.dropout > 0.0).then(of_dropout).transpose()?;
        Ok(Some(GroupedAdapter { a, b, rank: found.rank, scales, dropout }))
    }

    /// Returns the padded matrices `A`, `[E · R, K]`.
    fn padded_a(&self, context: &Context) -> Result<Tensor> {
        let a = self.a.read(context.loan)?;
        let ([rows, inputs], padded) = (a.dims("A")?, self.rank.next_multiple_of(RANKS));
        let experts = rows / self.rank;
        let all = with_columns(&a.reshape(&[experts, self.rank * inputs])?, padded * inputs)?;
        Ok(all.reshape(&[experts * padded, inputs])?)
    }

    /// Returns the padded matrices `B`, `[E · N, R]`.
    fn padded_b(&self, context: &Context) -> Result<Tensor> {
        with_columns(&self.b.read(context.loan)?, self.rank.next_multiple_of(RANKS))
    }

    /// Returns the factors of the inputs of this rank's rows, `[P, K]`: 0, or `1 / (1 - p)`. Returns `None` in a pass without dropout.
    pub fn mask(&self, dispatch: &Dispatch, choices: &Dispatched, context: &Context) -> Result<Option<Tensor>> {
        let Some(Dropout { p, columns, ones }) = &self.dropout else { return Ok(None) };
        let tokens = dispatch.own_tokens(choices, context);
        let Some(draws) = context.draws(tokens)? else { return Ok(None) };
        let first = Tensor::zeros(ones.device(), &[tokens], DType::I32)?;
        let mask = dropout(&embedding(ones, &first)?, *p, &draws, *columns)?;
        dispatch.rows_of_values(&mask, choices, context).map(Some)
    }

    /// Returns `y + s · (x · A[e]ᵀ) · B[e]ᵀ`.
    pub fn add_to(&self, y: &Tensor, x: &Tensor, rows: Rows, context: &Context) -> Result<Tensor> {
        let h = self.hidden(&rows.masked(x)?, rows.groups, context)?;
        let b = self.padded_b(context)?;
        Ok(add(y, &product(&h, Operand::plain(&b), rows.groups, y.dtype())?)?)
    }

    /// Returns `dx + s · (dy · B[e]) · A[e]`.
    pub fn add_dgrad(&self, dx: &Tensor, dy: &Tensor, rows: Rows, context: &Context) -> Result<Tensor> {
        let (dh, a) = (self.dhidden(dy, rows.groups, context)?, self.padded_a(context)?);
        let of_adapter = product(&dh, Operand::plain_transposed(&a), rows.groups, dx.dtype())?;
        Ok(add(dx, &rows.masked(&of_adapter)?)?)
    }

    /// Adds to the gradients of `A` and `B`.
    pub fn wgrad(&mut self, dy: &Tensor, x: &Tensor, rows: Rows, context: &Context) -> Result<()> {
        let x = rows.masked(x)?;
        let (h, dh) = (self.hidden(&x, rows.groups, context)?, self.dhidden(dy, rows.groups, context)?);
        if !self.rank.is_multiple_of(RANKS) {
            return self.add_padded(wgrad(dy, &h, rows.groups), wgrad(&dh, &x, rows.groups), [dy, &h, &x]);
        }
        self.b.gradient.add_product(wgrad(dy, &h, rows.groups))?;
        self.a.gradient.add_product(wgrad(&dh, &x, rows.groups))
    }

    /// Adds the products `of_b` `[E · N, R]` and `of_a` `[E · R, K]` to the gradients, without the ranks of the padding. The sizes are the columns of `dy`,
    /// of `h` and of `x`.
    fn add_padded(&mut self, of_b: WgradProduct, of_a: WgradProduct, [dy, h, x]: [&Tensor; 3]) -> Result<()> {
        let [outputs, padded, inputs] = [dy, h, x].map(|tensor| tensor.shape()[1]);
        let (rank, experts) = (self.rank, self.b.weights.shape()[0] / outputs);
        let computed = |product: WgradProduct, shape: [usize; 2]| -> Result<Tensor> {
            let mut into = Tensor::empty(x.device(), &shape, real_type(x.dtype()))?;
            let groups = product.groups.expect("products of experts have groups");
            grouped_wgrad_into(product.a, product.b, groups, &mut into, product.accumulation)?;
            Ok(into)
        };
        let db = with_columns(&computed(of_b, [experts * outputs, padded])?, rank)?;
        let da = computed(of_a, [experts * padded, inputs])?.reshape(&[experts, padded * inputs])?;
        let da = with_columns(&da, rank * inputs)?.reshape(&[experts * rank, inputs])?;
        for (param, gradient) in [(&mut self.b, db), (&mut self.a, da)] {
            let sum = param.gradient.sum_mut()?;
            let total = add(sum, &gradient)?;
            sum.copy_from(0, &total)?;
        }
        Ok(())
    }

    /// Returns `s · x · A[e]ᵀ`, `[P, R]`.
    fn hidden(&self, x: &Tensor, groups: &Groups, context: &Context) -> Result<Tensor> {
        let a = self.padded_a(context)?;
        self.scaled(product(x, Operand::plain(&a), groups, x.dtype())?)
    }

    /// Returns `s · dy · B[e]`, `[P, R]`.
    fn dhidden(&self, dy: &Tensor, groups: &Groups, context: &Context) -> Result<Tensor> {
        let b = self.padded_b(context)?;
        self.scaled(product(dy, Operand::plain_transposed(&b), groups, dy.dtype())?)
    }

    fn scaled(&self, h: Tensor) -> Result<Tensor> {
        match &self.scales {
            Some(scales) => Ok(scale_columns(&h, scales)?),
            None => Ok(h),
        }
    }

    /// Returns the parameters, always in the same order.
    pub fn parameters(&self) -> impl Iterator<Item = &Param> {
        [&self.a, &self.b].into_iter()
    }

    /// Returns the parameters mutably, in the order of [`GroupedAdapter::parameters`].
    pub fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Param> {
        [&mut self.a, &mut self.b].into_iter()
    }
}

/// The rows of an operand of a grouped product: the rows of each expert, and the factors of the inputs of adapters.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The rows of each expert.
    pub groups: &'a Groups,
    /// The factors of the inputs, `[P, K]`. `None` without dropout.
    pub mask: Option<&'a Tensor>,
}

impl Rows<'_> {
    /// Returns `x` times the factors, element by element.
    fn masked(&self, x: &Tensor) -> Result<Tensor> {
        let Some(mask) = self.mask else { return Ok(x.clone()) };
        let factors = cast(&mask.reshape(&[mask.len()])?, real_type(x.dtype()))?;
        Ok(scale_columns(&x.reshape(&[1, x.len()])?, &factors)?.reshape(x.shape())?)
    }
}

/// Returns the product `aᵀ · b` over the rows of each expert.
fn wgrad<'a>(a: &'a Tensor, b: &'a Tensor, groups: &'a Groups) -> WgradProduct<'a> {
    let [a, b] = [a, b].map(Operand::plain_transposed);
    WgradProduct { a, b, accumulation: Accumulation::Exact, groups: Some(groups) }
}

/// Returns `x` `[N, C]` with `columns` columns: with further columns of zeros, or without its last columns.
fn with_columns(x: &Tensor, columns: usize) -> Result<Tensor> {
    let [rows, own] = x.dims("the matrices of adapters")?;
    if own == columns {
        return Ok(x.clone());
    }
    // The columns of the transpose are rows, which are contiguous.
    let kept = transpose(x)?.rows(0, own.min(columns))?;
    let mut all = Tensor::zeros(x.device(), &[columns, rows], x.dtype())?;
    all.copy_from(0, &kept)?;
    Ok(transpose(&all)?)
}

/// Returns `a · b[e]ᵀ`.
fn product(a: &Tensor, b: Operand, groups: &Groups, out: DType) -> Result<Tensor> {
    Ok(grouped_gemm_nt(Operand::plain(a), b, groups, out, Accumulation::Exact)?)
}
