//! Faults that tests plant in matrix products on the CPU, to check whether they are detected.

use crate::dtype::DType;
use crate::element::Float;
use crate::tensor::Tensor;
use half::{bf16, f16};
use std::cell::RefCell;

/// The damage of a fault to the result of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Damage {
    /// Multiplies the result.
    Factor(f32),
    /// Flips a bit of an element.
    Flip {
        /// The index of the element.
        element: usize,
        /// The index of the bit, counted from the lowest.
        bit: usize,
    },
}

/// A fault in the FP8 products of this thread whose results have this `shape`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductFault {
    /// The shape of the results.
    pub shape: [usize; 2],
    /// The index of the first product with the fault, from 0.
    pub first: usize,
    /// The number of products from one fault to the next.
    pub every: usize,
    /// The damage to the result.
    pub damage: Damage,
}

thread_local! {
    static FAULT: RefCell<Option<(ProductFault, usize)>> = const { RefCell::new(None) };
}

/// Plants a fault in later products of this thread, replacing an earlier fault. `None` removes the fault.
pub fn plant(fault: Option<ProductFault>) {
    FAULT.set(fault.map(|fault| (fault, 0)));
}

/// Damages `result`, the result of an FP8 product, if a fault is planted for it.
pub(crate) fn damage(result: &mut Tensor) {
    FAULT.with_borrow_mut(|planted| {
        let Some((fault, seen)) = planted else { return };
        if result.shape() != fault.shape {
            return;
        }
        let at = *seen;
        *seen += 1;
        if at >= fault.first && (at - fault.first).is_multiple_of(fault.every) {
            fault.damage.apply(result);
        }
    });
}

impl Damage {
    fn apply(self, result: &mut Tensor) {
        match self {
            Damage::Factor(factor) => match result.dtype() {
                DType::F32 => multiply(result.host_mut::<f32>(), factor),
                DType::F16 => multiply(result.host_mut::<f16>(), factor),
                _ => multiply(result.host_mut::<bf16>(), factor),
            },
            Damage::Flip { element, bit } => {
                let mut bytes = result.read_bytes().expect("a tensor on the CPU");
                bytes[element * result.dtype().size() + bit / 8] ^= 1 << (bit % 8);
                result.write_bytes(&bytes).expect("as many bytes");
            }
        }
    }
}

fn multiply<X: Float<Real = f32>>(values: &mut [X], factor: f32) {
    values.iter_mut().for_each(|x| *x = X::store(x.load() * factor));
}
