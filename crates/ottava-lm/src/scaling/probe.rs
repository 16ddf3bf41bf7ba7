//! Comparisons of what a recipe computes with what the compute type gives, recorded in one pass.

use crate::error::Result;
use crate::mode::StepPrecision;
use ottava_tensor::ops::{self, SUMS};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What is compared. If a pass is repeated in the same precision, the tensors of both passes are compared as those of two precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// FP8 codes, with the operand that was cast.
    Cast,
    /// A linear's `y = x · Wᵀ` of codes, with the product of the values of these codes in the compute type.
    Fprop,
    /// A linear's `dx = dy · W`, in the same way.
    Dgrad,
    /// A linear's `dW = dyᵀ · x`, in the same way.
    Wgrad,
    /// The output of a block after forward by the recipe, with that after forward in the compute type.
    Output,
    /// The gradient by the input of a block after backward by the recipe, with that after backward in the compute type.
    GradInput,
    /// The gradient of a parameter after backward by the recipe, with that after backward in the compute type.
    Gradient,
}

impl Quantity {
    /// All quantities.
    pub const ALL: [Quantity; 7] = [
        Quantity::Cast,
        Quantity::Fprop,
        Quantity::Dgrad,
        Quantity::Wgrad,
        Quantity::Output,
        Quantity::GradInput,
        Quantity::Gradient,
    ];

    /// Its name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Quantity::Cast => "cast",
            Quantity::Fprop => "fprop",
            Quantity::Dgrad => "dgrad",
            Quantity::Wgrad => "wgrad",
            Quantity::Output => "output",
            Quantity::GradInput => "grad_input",
            Quantity::Gradient => "gradient",
        }
    }

    /// Whether it is a product of a linear.
    pub fn is_product(self) -> bool {
        matches!(self, Quantity::Fprop | Quantity::Dgrad | Quantity::Wgrad)
    }
}

/// The comparison of a tensor `x` with its reference `r`.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The cast, linear, block or parameter.
    pub name: String,
    /// What was compared.
    pub quantity: Quantity,
    /// `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²`.
    pub sums: [f64; SUMS],
}

impl Comparison {
    /// `‖x − r‖ / ‖r‖`; 0 if both are zero.
    pub fn error(&self) -> f64 {
        root_of_ratio(self.sums[3], self.sums[1])
    }

    /// `‖x‖ / ‖r‖`; 1 if both are zero.
    pub fn norm_ratio(&self) -> f64 {
        if self.is_zero() { 1.0 } else { root_of_ratio(self.sums[0], self.sums[1]) }
    }

    /// `x·r / (‖x‖ ‖r‖)`; 1 if both are zero.
    pub fn cosine(&self) -> f64 {
        let [x, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / (x * r).sqrt().max(f64::MIN_POSITIVE) }
    }

    /// `x·r / r·r`, the factor of `r` that is nearest to `x`; 1 if both are zero.
    pub fn slope(&self) -> f64 {
        let [_, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / r.max(f64::MIN_POSITIVE) }
    }

    /// Whether all elements are equal.
    pub fn is_equal(&self) -> bool {
        self.sums[3] == 0.0
    }

    fn is_zero(&self) -> bool {
        self.sums[0] == 0.0 && self.sums[1] == 0.0
    }

    /// Adds the sums of comparisons of parts of the same tensors, in the order in which their names first appear.
    pub fn merge(parts: impl IntoIterator<Item = Comparison>) -> Vec<Comparison> {
        let (mut all, mut places): (Vec<Comparison>, HashMap<_, usize>) = (Vec::new(), HashMap::new());
        for part in parts {
            let place = *places.entry((part.name.clone(), part.quantity)).or_insert(all.len());
            match all.get_mut(place) {
                Some(before) => before.sums.iter_mut().zip(part.sums).for_each(|(sum, own)| *sum += own),
                None => all.push(part),
            }
        }
        all
    }
}

/// The comparison of a recipe with the compute type on some sequences, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionComparison {
    /// Mean loss per target token, by the recipe and in the compute type.
    pub losses: [f64; 2],
    /// Casts, products, blocks and parameters, in the order of the passes.
    pub tensors: Vec<Comparison>,
}

fn root_of_ratio(x: f64, r: f64) -> f64 {
    if x == 0.0 { 0.0 } else { (x / r.max(f64::MIN_POSITIVE)).sqrt() }
}

/// Rows of the buffers in which a device collects sums.
const ROWS: usize = 256;

/// The comparisons of a pass so far, whose sums stay on the device until the end.
pub struct Probe {
    device: Device,
    /// The precisions of the two passes.
    precisions: [StepPrecision; 2],
    names: Vec<(String, Quantity)>,
    sums: Vec<Tensor>,
}

impl Probe {
    /// No comparisons yet of passes in these precisions.
    pub fn new(device: &Device, precisions: [StepPrecision; 2]) -> Probe {
        Probe { device: device.clone(), precisions, names: Vec::new(), sums: Vec::new() }
    }

    /// The precisions of the two passes.
    pub fn precisions(&self) -> [StepPrecision; 2] {
        self.precisions
    }

    /// Whether both passes compute the same.
    pub fn repeats(&self) -> bool {
        self.precisions[0] == self.precisions[1]
    }

    /// Compares `x` with `reference`. Enqueues work without waiting.
    pub fn compare(&mut self, name: &str, quantity: Quantity, x: &Tensor, reference: &Tensor) -> Result<()> {
        let (sums, at) = self.next(name, quantity)?;
        Ok(ops::compare(x, reference, sums, at)?)
    }

    /// Compares the copies of `codes` with the matrix that was cast. Enqueues work without waiting.
    pub fn compare_cast(&mut self, name: &str, codes: &QuantizedTensor, x: &Tensor) -> Result<()> {
        if codes.codes.is_some() {
            self.compare(name, Quantity::Cast, &ops::dequantize(codes, x.dtype())?, x)?;
        }
        if codes.transposed.is_some() {
            let columns = codes.clone().only_transposed();
            self.compare(name, Quantity::Cast, &ops::dequantize(&columns, x.dtype())?, x)?;
        }
        Ok(())
    }

    fn next(&mut self, name: &str, quantity: Quantity) -> Result<(&mut Tensor, usize)> {
        let at = self.names.len();
        if at == ROWS * self.sums.len() {
            self.sums.push(Tensor::zeros(&self.device, &[ROWS, SUMS], DType::F64)?);
        }
        self.names.push((name.to_string(), quantity));
        Ok((self.sums.last_mut().expect("there is room"), at % ROWS))
    }

    /// All comparisons, those of one tensor added; waits for the device.
    pub fn read(self) -> Result<Vec<Comparison>> {
        let mut all = Vec::with_capacity(self.names.len());
        let mut names = self.names.into_iter();
        for sums in self.sums {
            let sums = sums.to_vec::<f64>()?;
            let rows = names.by_ref().take(ROWS).zip(sums.chunks_exact(SUMS));
            all.extend(rows.map(|((name, quantity), sums)| Comparison {
                name,
                quantity,
                sums: sums.try_into().expect("four sums"),
            }));
        }
        Ok(Comparison::merge(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(name: &str, sums: [f64; SUMS]) -> Comparison {
        Comparison { name: name.into(), quantity: Quantity::Fprop, sums }
    }

    #[test]
    fn a_factor_is_the_slope() {
        let factor = comparison("a", [4.0 * 9.0, 9.0, 2.0 * 9.0, 9.0]);
        assert_eq!([factor.slope(), factor.cosine(), factor.norm_ratio(), factor.error()], [2.0, 1.0, 2.0, 1.0]);
        let zero = comparison("a", [0.0; SUMS]);
        assert_eq!([zero.slope(), zero.cosine(), zero.norm_ratio(), zero.error()], [1.0, 1.0, 1.0, 0.0]);
        let lost = comparison("a", [0.0, 9.0, 0.0, 9.0]);
        assert_eq!([lost.slope(), lost.norm_ratio(), lost.error()], [0.0, 0.0, 1.0]);
    }

    #[test]
    fn parts_of_a_tensor_are_added_in_the_order_of_the_model() {
        let parts = [comparison("b", [1.0; 4]), comparison("a", [2.0; 4]), comparison("b", [3.0; 4])];
        assert_eq!(Comparison::merge(parts), [comparison("b", [4.0; 4]), comparison("a", [2.0; 4])]);
    }
}
