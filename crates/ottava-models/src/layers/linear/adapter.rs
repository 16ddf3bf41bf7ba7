//! LoRA: a low-rank product that is added to the product of a frozen weight. Hu et al. 2021, arXiv:2106.09685. DoRA adds a magnitude for each output.
//! Liu et al. 2024, arXiv:2402.09353.

use super::config::LinearConfig;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::lora::{MAGNITUDE, PEFT_PREFIX};
use ottava_recipe::param::{Builder, FolderTensor, Init, Loan, Param, Split, WgradProduct};
use ottava_tensor::ops::{
    Accumulation, DrawnColumns, Operand, add, bias_gradient, cast, dropout, gemm_nt, gemm_nt_plus, magnitude_factors,
    magnitude_gradient, real_type, row_squares, scale_columns,
};
use ottava_tensor::{DType, Tensor};
use std::ops::Range;

/// `y += s · (x · Aᵀ) · Bᵀ`;  `dx += s · (dy · B) · A`;  `dA += s · (dy · B)ᵀ · x`;  `dB += dyᵀ · s · (x · Aᵀ)`, in the compute type.
///
/// Each part of a fused weight has its own adapter, as in PEFT. The adapters of the parts are computed as one adapter of rank R, the sum of their
/// ranks: their `A` are stacked, and their `B` form a block-diagonal matrix.
///
/// With dropout, `x` in these formulas is the input after dropout, and `(dy · B) · A` is multiplied by the same mask. The parts of a fused weight share
/// a mask; in PEFT, each part has its own.
///
/// With magnitudes `m`, the linear multiplies its outputs `x · Wᵀ + s · (x · Aᵀ) · Bᵀ` by the factors `m / ‖W + s · B · A‖`
/// ([`Adapter::factors`]). In the formulas above, `dy` is then the gradient by the outputs before the factors. As in PEFT, norms are constants in
/// backward.
pub struct Adapter {
    a: Param, /* [R, K] */
    parts: Vec<AdapterPart>,
    /// The number of outputs of the linear.
    outputs: usize,
    /// The factor `s` for each row of `a`, `[R]` in the type of sums. `None` if all factors are 1.
    scales: Option<Tensor>,
    /// The identity `[R, R]` in the compute type and in the type of gradients. Products with its rows select columns.
    identity: [Tensor; 2],
    /// Ones `[N]` in the type of sums. `None` without magnitudes.
    ones: Option<Tensor>,
    dropout: Option<Dropout>,
}

/// The dropout of an adapter's input.
struct Dropout {
    /// The probability that an element of the input is 0.
    p: f64,
    columns: DrawnColumns,
}

/// The adapter of one part of a fused weight.
struct AdapterPart {
    b: Param,                 /* [N of the part, r] */
    magnitude: Option<Param>, /* [N of the part] */
    /// The part's rows in the weight.
    rows: Range<usize>,
    /// The part's rows in `a`.
    columns: Range<usize>,
}

impl Adapter {
    /// Creates the adapters of the parts of a linear. Returns `None` if no part is a target of the builder's
    /// [`Lora`](ottava_recipe::lora::Lora).
    ///
    /// Ranks divide `A` by inputs, or `B` and magnitudes by outputs, following the weight's `split`. Several ranks may have the same outputs.
    pub fn new(build: &mut Builder, config: &LinearConfig) -> Result<Option<Adapter>> {
        let LinearConfig { parts, fused, inputs, split, std, layout, .. } = *config;
        let Some(lora) = build.lora else { return Ok(None) };
        let tensor = |name: &str, of: &str, shape| FolderTensor::new(format!("{PEFT_PREFIX}{name}.{of}"), shape);
        let (of_a, of_b) = match split {
            Split::Input => (Split::Input, Split::None),
            Split::Output => (Split::None, Split::Output),
            Split::None | Split::Vocabulary | Split::Expert => (Split::None, Split::None),
        };
        let (mut end, mut size, mut targets) = (0, 0, Vec::new());
        for (at, (name, outputs)) in parts.iter().enumerate() {
            // A fused tensor is divided like the weight.
            let of_outputs = |of: &str, shape: Vec<usize>| {
                let tensor = FolderTensor { layout: config.layout_of_outputs(), ..tensor(name, of, shape) };
                build.shards(tensor, fused, config.replicas_of(at), of_b)
            };
            let rank = lora.rank(name);
            let b = of_outputs("lora_B.weight", vec![*outputs, rank])?;
            let own: usize = b.iter().map(|shard| shard.range.len()).sum();
            end += own;
            if lora.has(name) {
                let columns = size..size + rank;
                size = columns.end;
                targets.push((name, b, of_outputs(MAGNITUDE, vec![*outputs])?, end - own..end, columns));
            }
        }
        if targets.is_empty() {
            return Ok(None);
        }
        let factors = targets.iter().flat_map(|(name, .., columns)| vec![lora.scale(name) as f32; columns.len()]);
        let factors: Vec<f32> = factors.collect();
        let a = targets
            .iter()
            .map(|(name, .., columns)| build.shard(tensor(name, "lora_A.weight", vec![columns.len(), inputs]), of_a));
        let a = a.collect::<Result<_>>()?;
        // Kaiming's uniform distribution with a = sqrt(5), as in PEFT.
        let a = Param::trained(build, a, Init::Uniform((inputs as f32).sqrt().recip()))?;
        let parts = targets.into_iter().map(|(_, b, magnitude, rows, columns)| {
            let b = Param::trained(build, b, Init::Zeros)?.at_rate(lora.b_rate);
            let norms = Init::RowNorms { columns: inputs, layout, std };
            let magnitude = lora.use_dora.then(|| Param::trained(build, magnitude, norms)).transpose()?;
            Ok(AdapterPart { b, magnitude: magnitude.map(|vector| vector.in_sums(build)), rows, columns })
        });
        let parts = parts.collect::<Result<_>>()?;
        let real = real_type(build.recipe.compute);
        let vector = |values: &[f32]| -> Result<Tensor> {
            Ok(cast(&Tensor::from_slice(build.device, &[values.len()], values)?, real)?)
        };
        let scales = factors.iter().any(|factor| *factor != 1.0).then(|| vector(&factors)).transpose()?;
        let ones_of_rows = lora.use_dora.then(|| vector(&vec![1.0; end])).transpose()?;
        let ones: Vec<f32> = (0..size * size).map(|at| f32::from(u8::from(at % (size + 1) == 0))).collect();
        let ones = Tensor::from_slice(build.device, &[size, size], &ones)?;
        let compute = build.recipe.compute;
        let identity = [cast(&ones, compute)?, cast(&ones, real)?];
        let first = if split == Split::Input { build.place().range(inputs).start } else { 0 };
        let columns = DrawnColumns { key: a.identity.seed(), first };
        let dropout = (lora.dropout > 0.0).then_some(Dropout { p: lora.dropout, columns });
        Ok(Some(Adapter { a, parts, outputs: end, scales, identity, ones: ones_of_rows, dropout }))
    }

    /// Returns whether the adapter has magnitudes.
    pub fn has_magnitudes(&self) -> bool {
        self.ones.is_some()
    }

    /// Returns whether the adapter has dropout. Then its products need all tokens of the pass at once, because each token has its random numbers.
    pub fn has_dropout(&self) -> bool {
        self.dropout.is_some()
    }

    /// Returns the factor `m / ‖W + s · B · A‖` of each output, `[N]` in the type of sums, for the `weight` `[N, K]`. Parts without an adapter have
    /// the factor 1. `sum` adds the squares of the columns of other ranks.
    ///
    /// Panics without magnitudes.
    pub fn factors(&self, weight: &Tensor, loan: &Loan, sum: impl FnOnce(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (b, a) = (self.scaled(self.b(loan)?)?, self.a.read(loan)?);
        let change = product(Operand::plain(&b), Operand::plain_transposed(&a), None, weight.dtype())?;
        let squares = sum(row_squares(weight, Some(&change))?)?;
        let mut factors = self.ones.as_ref().expect("it has magnitudes").duplicate()?;
        for AdapterPart { magnitude, rows, .. } in &self.parts {
            let magnitude = magnitude.as_ref().expect("it has magnitudes").weights.value()?;
            let squares = squares.rows(rows.start, rows.end)?;
            factors.copy_from(rows.start, &magnitude_factors(&squares, &magnitude)?)?;
        }
        Ok(factors)
    }

    /// Adds to the gradients of the magnitudes. `dy` is the gradient by the outputs after the factors, and `y` `[T, N]` are the outputs before the
    /// factors.
    pub fn magnitude_wgrad(&mut self, dy: &Tensor, y: &Tensor) -> Result<()> {
        let ones = self.ones.as_ref().expect("it has magnitudes");
        let mut sums = Tensor::zeros(ones.device(), ones.shape(), ones.dtype())?;
        // Parts without an adapter have the magnitude 0.
        let mut magnitudes = sums.duplicate()?;
        for AdapterPart { magnitude, rows, .. } in &self.parts {
            magnitudes.copy_from(rows.start, &magnitude.as_ref().expect("it has magnitudes").weights.value()?)?;
        }
        magnitude_gradient(dy, y, &magnitudes, &mut sums)?;
        for AdapterPart { magnitude, rows, .. } in &mut self.parts {
            let own = sums.rows(rows.start, rows.end)?.reshape(&[1, rows.len()])?;
            bias_gradient(&own, magnitude.as_mut().expect("it has magnitudes").gradient.sum_mut()?)?;
        }
        Ok(())
    }

    /// Returns `s · (x · Aᵀ) · Bᵀ` `[T, N]`, plus `residual` if given.
    pub fn forward(&self, x: &Tensor, residual: Option<&Tensor>, context: &Context) -> Result<Tensor> {
        let x = &self.dropped(x, context)?;
        let (h, b) = (self.hidden(x, context.loan)?, self.b(context.loan)?);
        product(Operand::plain(&h), Operand::plain(&b), residual, x.dtype())
    }

    /// Returns `s · (dy · B) · A` `[T, K]`, plus `other` if given.
    pub fn dgrad(&self, dy: &Tensor, other: Option<&Tensor>, context: &Context) -> Result<Tensor> {
        let (dh, a) = (self.dhidden(dy, context.loan)?, self.a.read(context.loan)?);
        let multiply = |other| product(Operand::plain(&dh), Operand::plain_transposed(&a), other, dy.dtype());
        if !self.has_dropout() {
            return multiply(other);
        }
        let dx = self.dropped(&multiply(None)?, context)?;
        other.map_or_else(|| Ok(dx.clone()), |other| Ok(add(other, &dx)?))
    }

    /// Adds to the gradients of `A` and `B`.
    pub fn wgrad(&mut self, dy: &Tensor, x: &Tensor, context: &Context) -> Result<()> {
        let (loan, x) = (context.loan, &self.dropped(x, context)?);
        let h = self.hidden(x, loan)?;
        let (dy_columns, h) = (Operand::plain_transposed(dy), Operand::plain_transposed(&h));
        if self.is_whole() {
            self.parts[0].b.gradient.add_product(WgradProduct::exact(dy_columns, h))?;
        } else {
            let [_, identity] = &self.identity;
            let db = gemm_nt(dy_columns, h, identity.dtype(), Accumulation::Exact)?;
            for AdapterPart { b, rows, columns, .. } in &mut self.parts {
                let (db, select) = (db.rows(rows.start, rows.end)?, identity.rows(columns.start, columns.end)?);
                b.gradient.add_product(WgradProduct::exact(Operand::plain(&db), Operand::plain(&select)))?;
            }
        }
        let dh = self.dhidden(dy, loan)?;
        let (dh, x) = (Operand::plain_transposed(&dh), Operand::plain_transposed(x));
        self.a.gradient.add_product(WgradProduct::exact(dh, x))
    }

    /// Returns `x` after dropout, in a pass that draws random numbers. Also returns the gradient by the input from the gradient by the dropped input.
    fn dropped(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let Some(Dropout { p, columns }) = &self.dropout else { return Ok(x.clone()) };
        match context.draws(x.shape()[0])? {
            Some(draws) => Ok(dropout(x, *p, &draws, *columns)?),
            None => Ok(x.clone()),
        }
    }

    /// Returns `s · x · Aᵀ`, `[T, R]`.
    fn hidden(&self, x: &Tensor, loan: &Loan) -> Result<Tensor> {
        let a = self.a.read(loan)?;
        self.scaled(product(Operand::plain(x), Operand::plain(&a), None, x.dtype())?)
    }

    /// Returns `s · dy · B`, `[T, R]`.
    fn dhidden(&self, dy: &Tensor, loan: &Loan) -> Result<Tensor> {
        let b = self.b(loan)?;
        self.scaled(product(Operand::plain(dy), Operand::plain_transposed(&b), None, dy.dtype())?)
    }

    fn scaled(&self, h: Tensor) -> Result<Tensor> {
        match &self.scales {
            Some(scales) => Ok(scale_columns(&h, scales)?),
            None => Ok(h),
        }
    }

    /// Returns whether one part covers all outputs of the linear.
    fn is_whole(&self) -> bool {
        self.parts.len() == 1 && self.parts[0].rows.len() == self.outputs
    }

    /// Returns the block-diagonal `B`, `[N, R]`.
    fn b(&self, loan: &Loan) -> Result<Tensor> {
        if self.is_whole() {
            return self.parts[0].b.read(loan);
        }
        let [identity, _] = &self.identity;
        let mut all = Tensor::zeros(identity.device(), &[self.outputs, identity.shape()[0]], identity.dtype())?;
        for AdapterPart { b, rows, columns, .. } in &self.parts {
            let (b, place) = (b.read(loan)?, identity.rows(columns.start, columns.end)?);
            all.copy_from(
                rows.start,
                &product(Operand::plain(&b), Operand::plain_transposed(&place), None, b.dtype())?,
            )?;
        }
        Ok(all)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        visit(&self.a);
        for AdapterPart { b, magnitude, .. } in &self.parts {
            visit(b);
            magnitude.iter().for_each(&mut *visit);
        }
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Adapter::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.a);
        for AdapterPart { b, magnitude, .. } in &mut self.parts {
            visit(b);
            magnitude.iter_mut().for_each(&mut *visit);
        }
    }
}

/// Returns `a · bᵀ`, plus `addend` if given.
fn product(a: Operand, b: Operand, addend: Option<&Tensor>, out: DType) -> Result<Tensor> {
    Ok(match addend {
        Some(addend) => gemm_nt_plus(a, b, addend, Accumulation::Exact)?,
        None => gemm_nt(a, b, out, Accumulation::Exact)?,
    })
}
