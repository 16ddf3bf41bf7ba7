//! The cast of an operand: a matrix that two products of a linear contract along different dimensions.

use ottava_common::error::{Error, Result};
use ottava_recipe::ProductPrecision;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{FrozenScale, Matrix, View, Views};
use ottava_recipe::scaling::{Casts, Slot};
use ottava_tensor::ops::{CodeCopies, Groups, Output, Produced, clear_unused_rows, transpose};
use ottava_tensor::{Granularity, QuantizedTensor, Tensor};
use std::rc::Rc;

/// The name of a matrix that has no cast, for messages.
const ACTIVATIONS: &str = "activations";

/// The cast of a linear's input `x` (for fprop and wgrad) or of its output gradient `dy` (for dgrad and wgrad).
///
/// The first product contracts the columns of the matrix, and wgrad contracts its rows. An op that produces the matrix is passed as a closure.
/// The cast decides whether the op writes codes, their amax, or the value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperandCast {
    /// The slot of the cast. `None` if no product reads codes.
    slot: Option<Slot>,
    products: [ProductPrecision; 2],
    /// Whether the value is needed besides codes, for example for the gradient of a bias.
    needs_value: bool,
    /// Whether views of codes also have the value, for an adapter.
    for_adapter: bool,
    /// Whether the ranks of tensor parallelism divide the rows of the matrix, and products read all rows.
    gathers: bool,
}

/// The form in which a matrix is gathered if ranks divide its rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gathered {
    /// Nothing: this rank has all rows that products read.
    Nothing,
    /// Codes. Each rank casts its rows before the gather, and the ranks use one scale.
    Codes,
    /// The value. Each rank casts it after the gather.
    Value,
}

/// The view of an input that fprop reads, and what is saved for backward.
pub struct CastInput {
    /// The view that fprop reads.
    pub rows: View,
    /// The operand that backward reads.
    pub saved: SavedOperand,
}

/// The part of an operand that forward saves for backward.
#[derive(Clone)]
pub struct SavedOperand {
    /// The view that wgrad reads. `None` if the operand is recomputed.
    columns: Option<View>,
    /// The scale for casting a recomputed operand.
    frozen: FrozenScale,
}

impl SavedOperand {
    /// Creates a saved operand from the view that wgrad reads, if it is saved, and the scale of the operand's cast.
    pub(super) fn new(columns: Option<View>, frozen: FrozenScale) -> SavedOperand {
        SavedOperand { columns, frozen }
    }

    /// Returns the view that wgrad reads, or the scale for casting the operand if it must be recomputed.
    pub fn into_columns(self) -> Result<View, FrozenScale> {
        self.columns.ok_or(self.frozen)
    }

    /// Returns the scale for casting a recomputed operand.
    pub fn into_frozen(self) -> FrozenScale {
        self.frozen
    }
}

impl OperandCast {
    /// No cast: both products read the value.
    pub const NONE: OperandCast = OperandCast {
        slot: None,
        products: [ProductPrecision::High; 2],
        needs_value: false,
        for_adapter: false,
        gathers: false,
    };

    /// Creates the cast in `slot`. `products` are the precisions of the two products.
    pub fn new(slot: Slot, products: [ProductPrecision; 2], needs_value: bool) -> OperandCast {
        OperandCast { slot: Some(slot), products, needs_value, ..OperandCast::NONE }
    }

    /// Returns the same cast for a matrix whose rows may be divided among ranks, while products read all rows.
    pub fn gathering(self) -> OperandCast {
        OperandCast { gathers: true, ..self }
    }

    /// Returns the same cast for a matrix whose rows are all on each rank.
    pub fn of_all_rows(self) -> OperandCast {
        OperandCast { gathers: false, ..self }
    }

    /// Returns the same cast for an operand whose value an adapter reads.
    pub fn for_adapter(self) -> OperandCast {
        OperandCast { needs_value: true, for_adapter: true, ..self }
    }

    /// Returns what an op has written for this cast, from rows of `groups`. Measurements and casts of a value read all its rows, so its rows after the
    /// last group are set to zero.
    pub fn of_groups(&self, mut produced: Produced, groups: &Groups) -> ottava_tensor::Result<Produced> {
        if let (Some(_), Produced::Plain(value)) = (self.slot, &mut produced) {
            clear_unused_rows(value, groups)?;
        }
        Ok(produced)
    }

    /// Returns the slot of the cast, or `None` if no product reads codes.
    pub fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// Returns the slot if products read only codes and nothing reads the value.
    fn only_codes(&self, casts: &Casts) -> Option<Slot> {
        self.slot.filter(|_| self.reads_codes(casts) == [true; 2] && !self.needs_value)
    }

    /// Returns the slot if a producer should write codes directly. Returns `None` if the value is also needed, for example in a comparison, or if
    /// producers cannot write such codes.
    pub fn fused(&self, casts: &Casts) -> Option<Slot> {
        self.only_codes(casts).filter(|slot| casts.scales.is_fused(*slot) && !casts.compares_casts())
    }

    /// Returns whether a producer writes only codes, with one scale per row.
    pub fn writes_rows(&self, casts: &Casts) -> bool {
        self.fused(casts).is_some_and(|slot| casts.scales.granularity(slot) == Granularity::PerRow)
    }

    /// Returns whether the linear of this cast has FP8 products in this pass.
    pub fn is_cast(&self, casts: &Casts) -> bool {
        self.slot.is_some_and(|slot| !casts.is_high_precision(slot))
    }

    /// Returns whether this is a cast for products of these precisions.
    pub fn has_products(&self, products: [ProductPrecision; 2]) -> bool {
        self.products == products
    }

    /// Returns whether the first product reads codes, and whether wgrad reads codes.
    fn reads_codes(&self, casts: &Casts) -> [bool; 2] {
        self.products.map(|product| product != ProductPrecision::High && self.is_cast(casts))
    }

    fn gathered(&self, context: &Context) -> Gathered {
        match self.only_codes(&context.casts) {
            _ if !self.gathers || !context.divides_tokens() => Gathered::Nothing,
            Some(slot) if context.casts.scales.is_per_tensor(slot) => Gathered::Codes,
            _ => Gathered::Value,
        }
    }

    /// Returns the matrix with the rows of all ranks if ranks gather its value. Otherwise returns `x`, this rank's rows.
    fn whole(&self, x: Tensor, context: &Context) -> Result<Tensor> {
        match self.gathered(context) {
            Gathered::Value => {
                context.gather(self.slot.map_or(ACTIVATIONS, |slot| context.casts.scales.name(slot)), &x)
            }
            Gathered::Nothing | Gathered::Codes => Ok(x),
        }
    }

    /// Starts to gather a matrix that has no cast, so that the first product can begin before all rows have arrived. Returns `None` if the matrix has
    /// a cast, is not gathered, or is compared.
    fn arriving(&self, x: &Tensor, context: &Context) -> Result<Option<View>> {
        let waits = self.slot.is_some() || self.gathered(context) != Gathered::Value || context.casts.compares();
        let start = || Ok(View::Gathering(Rc::new(context.start_gather(ACTIVATIONS, Matrix::Value(x.clone()))?)));
        (!waits).then(start).transpose()
    }

    /// Returns which copies of its rows this rank writes, if products read `copies`.
    fn own_copies(&self, copies: CodeCopies, context: &Context) -> CodeCopies {
        if self.gathered(context) == Gathered::Codes { CodeCopies::Rows } else { copies }
    }

    /// Returns the views of codes that two products read, from `codes` with the copies [`OperandCast::own_copies`]. If codes are gathered, the first
    /// product can begin before the codes of all ranks have arrived.
    fn views_of(&self, codes: QuantizedTensor, context: &Context) -> Result<Views> {
        let (Gathered::Codes, Some(slot)) = (self.gathered(context), self.slot) else {
            return Ok(Views::of_codes(codes));
        };
        self.check_own_rows(&codes)?;
        let rows =
            View::Gathering(Rc::new(context.start_gather(context.casts.scales.name(slot), Matrix::Codes(codes))?));
        Ok(Views { columns: rows.clone(), rows })
    }

    /// Returns `copies` of the codes of all ranks, from `codes` with the copies [`OperandCast::own_copies`].
    fn all_codes(&self, codes: QuantizedTensor, copies: CodeCopies, context: &Context) -> Result<QuantizedTensor> {
        let (Gathered::Codes, Some(slot)) = (self.gathered(context), self.slot) else { return Ok(codes) };
        self.check_own_rows(&codes)?;
        let all = context.gather(context.casts.scales.name(slot), codes.codes.as_ref().expect("rows were cast"))?;
        let transposed = (copies != CodeCopies::Rows).then(|| transpose(&all)).transpose()?;
        let rows = all.shape()[0];
        Ok(QuantizedTensor { codes: (copies != CodeCopies::Columns).then_some(all), transposed, rows, ..codes })
    }

    /// Errors if the codes of this rank's rows are padded, because padded codes of several ranks do not join to a matrix.
    fn check_own_rows(&self, codes: &QuantizedTensor) -> Result<()> {
        let own = codes.codes.as_ref().expect("rows were cast");
        if codes.rows != own.shape()[0] {
            return Err(Error::Config(format!(
                "each rank has {} tokens of a micro-batch; with `parallel.tensor`, ranks gather FP8 codes of multiples of {} tokens: change \
                 `data.max_length` or `training.per_device_train_batch_size`",
                codes.rows,
                QuantizedTensor::PAD
            )));
        }
        Ok(())
    }

    /// Runs an op that produces an input, and casts the input. `copies` decides whether a copy for backward is written.
    pub fn produce_input<T>(
        &self,
        copies: CodeCopies,
        context: &mut Context,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<(Produced, T)>,
    ) -> Result<(CastInput, T)> {
        match self.fused(&context.casts).filter(|_| self.gathered(context) != Gathered::Value) {
            Some(slot) => {
                let (codes, frozen, rest) = context.casts.produce(slot, self.own_copies(copies, context), op)?;
                let Views { rows, columns } = self.views_of(codes, context)?;
                let columns = (copies == CodeCopies::Both).then_some(columns);
                Ok((CastInput { rows, saved: SavedOperand { columns, frozen } }, rest))
            }
            None => {
                let (value, rest) = op(Output::Plain)?;
                Ok((self.cast_input(plain(value), copies, context)?, rest))
            }
        }
    }

    /// Casts an input and measures its amax. `copies` decides whether a copy for backward is written.
    pub fn cast_input(&self, x: Tensor, copies: CodeCopies, context: &mut Context) -> Result<CastInput> {
        if let Some(rows) = self.arriving(&x, context)? {
            let columns = (copies == CodeCopies::Both).then(|| rows.clone());
            return Ok(CastInput { rows, saved: SavedOperand { columns, frozen: FrozenScale::default() } });
        }
        let x = self.whole(x, context)?;
        let codes = self.quantize(&x, copies, context)?;
        let frozen = codes.as_ref().map_or_else(FrozenScale::default, |(_, frozen)| frozen.clone());
        let codes = codes.map(|(codes, _)| codes);
        let [first, second] = self.reads_codes(&context.casts);
        let rows = self.view(first, &x, codes.as_ref().map(QuantizedTensor::only_rows));
        let columns =
            (copies == CodeCopies::Both).then(|| self.view(second, &x, codes.map(QuantizedTensor::only_transposed)));
        Ok(CastInput { rows, saved: SavedOperand { columns, frozen } })
    }

    /// Returns the view that wgrad reads of an operand. `op` recomputes the operand.
    pub fn reproduce_columns(
        &self,
        frozen: &FrozenScale,
        context: &mut Context,
        op: impl FnOnce(Output) -> Result<Produced>,
    ) -> Result<View> {
        match self.fused(&context.casts).filter(|_| self.gathered(context) != Gathered::Value) {
            Some(slot) => {
                let codes = context.casts.reproduce(slot, frozen, self.own_copies(CodeCopies::Columns, context), op)?;
                Ok(View::Codes(self.all_codes(codes, CodeCopies::Columns, context)?.only_transposed()))
            }
            None => self.recast_columns(plain(op(Output::Plain)?), frozen, context),
        }
    }

    /// Returns the views that both products read of an operand. `op` recomputes the operand.
    pub fn reproduce_both(
        &self,
        frozen: &FrozenScale,
        context: &mut Context,
        op: impl FnOnce(Output) -> Result<Produced>,
    ) -> Result<Views> {
        if let Some(slot) = self.fused(&context.casts).filter(|_| self.gathered(context) != Gathered::Value) {
            let codes = context.casts.reproduce(slot, frozen, self.own_copies(CodeCopies::Both, context), op)?;
            return self.views_of(codes, context);
        }
        self.recast_both(plain(op(Output::Plain)?), frozen, context)
    }

    /// Returns the views that both products read of an operand with the recomputed value `x`.
    pub fn recast_both(&self, x: Tensor, frozen: &FrozenScale, context: &mut Context) -> Result<Views> {
        let [first, second] = self.reads_codes(&context.casts);
        let x = self.whole(x, context)?;
        let codes = self.requantize(&x, [first, second], frozen, context)?;
        Ok(Views {
            rows: self.view(first, &x, codes.as_ref().map(QuantizedTensor::only_rows)),
            columns: self.view(second, &x, codes.map(QuantizedTensor::only_transposed)),
        })
    }

    /// Returns the view that wgrad reads of an operand with the recomputed value `x`.
    pub fn recast_columns(&self, x: Tensor, frozen: &FrozenScale, context: &mut Context) -> Result<View> {
        let [_, second] = self.reads_codes(&context.casts);
        let x = self.whole(x, context)?;
        let codes = self.requantize(&x, [false, second], frozen, context)?;
        Ok(self.view(second, &x, codes.map(QuantizedTensor::only_transposed)))
    }

    /// Runs an op that produces an output gradient, and casts the gradient.
    pub fn produce_gradient(
        &self,
        context: &mut Context,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<Produced>,
    ) -> Result<Views> {
        match self.fused(&context.casts).filter(|_| self.gathered(context) == Gathered::Nothing) {
            Some(slot) => {
                Ok(Views::of_codes(context.casts.produce(slot, CodeCopies::Both, |output| Ok((op(output)?, ())))?.0))
            }
            None => self.cast_gradient(&plain(op(Output::Plain)?), None, context),
        }
    }

    /// Returns a cleared F32 `[1]` for the amax of the gradient, if this cast needs the amax. The op that produces the gradient writes it.
    pub fn amax_for(&self, casts: &mut Casts) -> Result<Option<Tensor>> {
        self.fused(casts).map_or(Ok(None), |slot| casts.amax_for(slot))
    }

    /// Casts an output gradient and measures it. `amax` is the amax of `dy`, from [`OperandCast::amax_for`].
    pub fn cast_gradient(&self, dy: &Tensor, amax: Option<Tensor>, context: &mut Context) -> Result<Views> {
        if let (Some(slot), Some(amax)) = (self.slot, amax) {
            let frozen = context.casts.own_scale(slot, amax)?;
            let codes = context.casts.quantize(slot, &frozen, dy, self.own_copies(CodeCopies::Both, context))?;
            return self.views_of(codes, context);
        }
        if let Some(rows) = self.arriving(dy, context)? {
            return Ok(Views { columns: rows.clone(), rows });
        }
        if let Some(slot) = self.fused(&context.casts).filter(|_| self.gathered(context) == Gathered::Codes) {
            let frozen = context.casts.freeze(slot, dy)?;
            let codes = context.casts.quantize(slot, &frozen, dy, CodeCopies::Rows)?;
            return self.views_of(codes, context);
        }
        let dy = &self.whole(dy.clone(), context)?;
        let codes = self.quantize(dy, CodeCopies::Both, context)?.map(|(codes, _)| codes);
        let [first, second] = self.reads_codes(&context.casts);
        Ok(Views {
            rows: self.view(first, dy, codes.as_ref().map(QuantizedTensor::only_rows)),
            columns: self.view(second, dy, codes.map(QuantizedTensor::only_transposed)),
        })
    }

    fn view(&self, reads_codes: bool, x: &Tensor, codes: Option<QuantizedTensor>) -> View {
        match codes {
            Some(codes) if reads_codes && self.for_adapter => View::CodesAndValue(codes, x.clone()),
            Some(codes) if reads_codes => View::Codes(codes),
            _ => View::Value(x.clone()),
        }
    }

    /// Casts and measures `x`. If no product reads codes, `x` is only measured, and `None` is returned. If only wgrad reads codes, its copy is
    /// always written, because otherwise `x` would not be measured.
    fn quantize(
        &self,
        x: &Tensor,
        copies: CodeCopies,
        context: &mut Context,
    ) -> Result<Option<(QuantizedTensor, FrozenScale)>> {
        let Some(slot) = self.slot else { return Ok(None) };
        let [first, second] = self.reads_codes(&context.casts);
        let Some(copies) = copies_of([first, second && (copies == CodeCopies::Both || !first)]) else {
            context.casts.measure(slot, x)?;
            return Ok(None);
        };
        let frozen = context.casts.freeze(slot, x)?;
        let codes = context.casts.quantize(slot, &frozen, x, self.own_copies(copies, context))?;
        let codes = self.all_codes(codes, copies, context)?;
        self.probe(slot, &codes, x, context)?;
        Ok(Some((codes, frozen)))
    }

    /// Casts a value again that was already cast in this step. `read` says which of the two products read codes.
    fn requantize(
        &self,
        x: &Tensor,
        read: [bool; 2],
        frozen: &FrozenScale,
        context: &mut Context,
    ) -> Result<Option<QuantizedTensor>> {
        match (self.slot, copies_of(read)) {
            (Some(slot), Some(copies)) => {
                let codes = context.casts.requantize(slot, frozen, x, self.own_copies(copies, context))?;
                let codes = self.all_codes(codes, copies, context)?;
                self.probe(slot, &codes, x, context)?;
                Ok(Some(codes))
            }
            _ => Ok(None),
        }
    }

    /// In a comparison, compares the codes that products read with the rows of all ranks. `x` holds the rows that this rank has cast.
    fn probe(&self, slot: Slot, codes: &QuantizedTensor, x: &Tensor, context: &mut Context) -> Result<()> {
        if !context.casts.compares_casts() {
            return Ok(());
        }
        let all = match self.gathered(context) {
            Gathered::Codes => context.gather(context.casts.scales.name(slot), x)?,
            Gathered::Nothing | Gathered::Value => x.clone(),
        };
        context.casts.keep_rows(slot, &all)?;
        context.casts.probe_cast(slot, codes, &all)
    }
}

/// Returns the copies of an input without the transposed codes, if backward of its producer (for example SwiGLU) writes the transposed codes.
pub(super) fn copies_without_transpose(context: &Context, reader: &OperandCast) -> CodeCopies {
    if reader.fused(&context.casts).is_some() { CodeCopies::Rows } else { context.operand_copies() }
}

/// Returns the copies that products read, from whether codes are read along the rows and along the columns. Returns `None` if neither is read.
pub(super) fn copies_of(read: [bool; 2]) -> Option<CodeCopies> {
    match read {
        [true, true] => Some(CodeCopies::Both),
        [true, false] => Some(CodeCopies::Rows),
        [false, true] => Some(CodeCopies::Columns),
        [false, false] => None,
    }
}

pub(super) fn plain(value: Produced) -> Tensor {
    value.plain().expect("a plain output gives a value")
}
